"""docs/flags.md is generated, complete and up to date."""

from pathlib import Path

from miles.arguments.pages.flags import flags_reference
from miles.arguments.parser import build_parser

PAGE = Path(__file__).parents[4] / "docs" / "flags.md"


def test_page_is_up_to_date():
    assert PAGE.read_text(encoding="utf-8") == flags_reference(), "run python -m miles.arguments.pages.flags"


def test_page_has_every_flag():
    switches = {"-h", "--help", "--config", "--explain", "--strict-flags", "--version"}
    assert all(f"| `{name}` |" in flags_reference() for name in set(build_parser()._option_string_actions) - switches)
