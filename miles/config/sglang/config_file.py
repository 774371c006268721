"""Read ``--sglang-config FILE``: SGLang's own form becomes its flags, so that a run checks the settings of the file.

Related launchers give another file by this flag: groups of servers that differ.
"""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from miles.base.text import one_line
from miles.config.sglang.installed import server_flags

CONFIG = "--config"
_GROUPS = {"sglang", "server_groups", "engine_groups", "prefill_num_servers"}
_INLINE = "base64:"


def read_server_config(path: str) -> tuple[list[str], str | None]:
    """Return the words of SGLang's flags in a file, and why it cannot be obeyed with what to do; None if it can."""
    try:
        is_inline = path.startswith(_INLINE)
        text = b64decode(path.removeprefix(_INLINE)) if is_inline else Path(path).read_bytes()
        content = yaml.safe_load(text.decode("utf-8"))
    except OSError as error:
        what = "no such file" if isinstance(error, FileNotFoundError) else f"cannot be read ({error.strerror})"
        return [], f"{what}; check the path"
    except (ValueError, yaml.YAMLError) as error:
        return [], f"is no YAML ({one_line(str(error), 200)}); correct it"
    settings = {} if content is None else content
    if isinstance(settings, dict) and (groups := sorted(_GROUPS & {*map(str, settings)})):
        rule = f"describes groups of servers ({', '.join(groups)}), and all engines of a run are equal"
        size = "their size as --rollout-num-gpus-per-engine, and what they share as --sglang-NAME"
        return [], f"{rule}; drop it, and give {size}"
    if not isinstance(settings, dict):
        return [], "must be a mapping from SGLang's flags to their values; correct it"
    return [word for key, value in settings.items() for word in _words(f"--{key}", value)], None


def _words(flag: str, value: Any) -> Iterator[str]:
    known = server_flags()
    flag = flag if flag in known else flag.replace("_", "-")
    if isinstance(value, bool) and (flag not in known or known[flag].most == 0):
        yield from [flag] if value else []
    elif isinstance(value, list):
        yield from [flag, *map(str, value)] if value else []
    else:
        yield flag
        yield json.dumps(value, separators=(",", ":")) if isinstance(value, dict | bool) else str(value)
