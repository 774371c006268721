"""The page of launch scripts has a verdict on every flag of the ecosystem."""

import re
from pathlib import Path

import pytest

from miles.compat.verdicts import FOREIGN_FLAGS
from miles.config.megatron.fields import megatron_fields
from miles.config.parser import build_parser
from miles.config.sglang.installed import server_flags
from scripts.pages.launch_scripts import launch_page

LINES = (Path(__file__).parents[2] / "compat/launch/ecosystem_flags.txt").read_text(encoding="utf-8").splitlines()
FLAGS = [line.split()[0] for line in LINES]


@pytest.fixture(scope="module")
def page() -> str:
    return launch_page()


def test_every_flag_of_the_ecosystem_has_a_verdict(page):
    assert len(FLAGS) == 303
    assert not [flag for flag in FLAGS if f"`{flag}`" not in page]


def test_every_flag_of_megatron_and_sglang_has_a_verdict(page):
    flags = [field.flag for field in megatron_fields().values()] + [f"--sglang-{f[2:]}" for f in server_flags()]
    assert not [flag for flag in flags if f"`{flag}`" not in page]


def test_no_flag_has_two_verdicts(page):
    listed = re.findall(r"^\| `(--[\w-]+)` \| (?:obeyed|noted|refused)", page, flags=re.M)
    assert len(listed) == len(set(listed))
    own = {*build_parser()._option_string_actions}
    assert not own & {*FOREIGN_FLAGS}


def test_a_refusal_says_what_to_do():
    for row in FOREIGN_FLAGS.values():
        assert row.why and (row.heading is not None or row.instead), row.flag
