"""Log the answers that a built-in reward cannot judge."""

from __future__ import annotations

import logging

from miles.base.one_line import one_line
from miles.types.sample import Sample

_logger = logging.getLogger(__name__)


def log_no_verdict(rm_type: str, sample: Sample, error: Exception) -> None:
    """Log that ``sample`` is scored 0, because judging it raised ``error``."""
    _logger.warning(
        "--rm-type %s: no verdict (%s), scored 0: prompt %s, response ends %r",
        rm_type,
        one_line(f"{type(error).__name__}: {error}", 200),
        sample.prompt.source,
        sample.response[-80:],
    )
