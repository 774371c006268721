"""The page of flags is complete."""

from miles.config.parser import build_parser
from scripts.pages.flags import flags_reference


def test_page_has_every_flag():
    switches = {"-h", "--help", "--config", "--explain", "--strict-flags", "--version"}
    assert all(f"| `{name}` |" in flags_reference() for name in set(build_parser()._option_string_actions) - switches)
