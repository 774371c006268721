"""A suggestion is related to the flag that does not exist, and never its opposite."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.arguments.launch.normalize import FOREIGN_FLAGS
from miles.arguments.launch.suggest import suggestion
from miles.arguments.megatron.fields import megatron_fields
from miles.arguments.parser import build_parser

KNOWN = sorted({*build_parser()._option_string_actions, *FOREIGN_FLAGS, *(f.flag for f in megatron_fields().values())})


@pytest.mark.parametrize(
    ("flag", "expected"),
    [
        ("--rolout-batch-size", "did you mean --rollout-batch-size?"),
        ("--rollout-batch", "did you mean --rollout-batch-size?"),
        ("--tensor-model-parallel", "did you mean --tensor-model-parallel-size?"),
        ("--tis-lower-bound", "did you mean --tis-clip-low?"),
        ("--tis-upper-bound", "did you mean --tis-clip?"),
        ("--rs-lowr-bound", "did you mean --rs-lower-bound?"),
        ("--xyzzy", "--help lists all flags"),
        ("--rm-uri-list", "--help lists all flags"),
        ("--no-colocate", "--help lists all flags"),
        ("--disable-balance-data", "--help lists all flags"),
    ],
)
def test_suggestion(flag, expected):
    assert suggestion(flag, KNOWN) == expected


@given(st.sampled_from(KNOWN), st.sampled_from(["no", "disable"]))
def test_never_the_opposite(flag, negative):
    opposite = f"--{negative}-{flag.removeprefix('--')}"
    assert flag + "?" not in suggestion(opposite, KNOWN)
    if flag.startswith("--no-"):
        assert f"{flag}?" not in suggestion("--" + flag.removeprefix("--no-"), KNOWN)
