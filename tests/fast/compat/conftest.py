"""The fixtures of the rooms whose behaviour the border changes."""

from tests.fast.config.conftest import accepted, command, refusals, refused, validated  # noqa: F401
from tests.fast.objective.conftest import gradient_of, make_micro  # noqa: F401
