"""All errors of a command are found at once, each once; what passes is final."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.base.flags import FlagError, flag_choices
from miles.config.explain import explain
from miles.config.parallel import ParallelArguments
from miles.config.parser import parse
from miles.config.servers.flags import SglangArguments
from miles.config.settings import SECTIONS
from miles.config.validate import validate
from miles.objective.canary import CanarySchedule
from miles.objective.settings import LossArguments
from tests.fast.support.rows import rows

MINIMAL = (
    "--hf-checkpoint some/model --prompt-data reasoning_gym:products --rm-type last_number --num-rollout 10 "
    "--rollout-batch-size 8 --n-samples-per-prompt 4 --rollout-max-response-len 64"
)


def leading_flags(messages: tuple[str, ...]) -> list[str]:
    return [message.split()[0].rstrip(":") for message in messages]


def test_errors_of_all_stages_are_found_at_once(refused):
    messages = refused(
        "--lr 0 --eps-clip 0 --rollout-top-p 2 --context-parallel-size 3 --global-batch-size 5 --use-opd",
        without="--prompt-data",
    )
    assert leading_flags(messages) == [
        "--rollout-top-p",
        "--eps-clip",
        "--lr",
        "--prompt-data",
        "--context-parallel-size",
        "--use-opd",
        "--global-batch-size",
    ]


def test_an_empty_command_asks_for_all_that_is_required():
    with pytest.raises(FlagError) as caught:
        validate(parse(["--disable-rewards-normalization"]))
    assert leading_flags(caught.value.messages) == [
        "--hf-checkpoint",
        "--prompt-data",
        "--rollout-batch-size",
        "--rollout-max-response-len",
        "--num-rollout",
        "--rm-type",
    ]


@pytest.mark.parametrize(("flags", "without", "only"), rows(__file__, "test_a_rule_waits_for_the_values_it_builds_on"))
def test_a_rule_waits_for_the_values_it_builds_on(refused, flags, without, only):
    assert leading_flags(refused(flags, without)) == [only]


def test_settings_made_by_hand_are_limited_to_the_choices(validated):
    """The parser checks choices too; rules that branch on them must not meet anything else."""
    settings = validated().settings
    rollout = dataclasses.replace(settings.rollout, rollout_engine="lmdeploy")
    training = dataclasses.replace(settings.training, train_backend="jax")
    with pytest.raises(FlagError) as caught:
        validate(dataclasses.replace(settings, rollout=rollout, training=training))
    assert caught.value.messages == (
        "--rollout-engine lmdeploy: no such choice; give one of torch, sglang, vllm",
        "--train-backend jax: no such choice; give one of fsdp, megatron",
    )


@pytest.mark.parametrize(("flags", "section", "final"), rows(__file__, "test_what_other_flags_imply_is_filled_in"))
def test_what_other_flags_imply_is_filled_in(validated, flags, section, final):
    values = vars(getattr(validated(flags).settings, section))
    assert {name: values[name] for name in final} == final


def test_the_policy_loss_of_an_estimator_is_noted_if_it_is_its_own(validated):
    assert any("--policy-loss is gspo" in note for note in validated("--advantage-estimator gspo").notes)
    assert not any("--policy-loss" in note for note in validated().notes)


@pytest.mark.parametrize(
    "read",
    [
        lambda: SglangArguments(pause_generation_mode="other").keeps_cache,
        lambda: ParallelArguments(qkv_format="other").pads,
        lambda: CanarySchedule(LossArguments(loss_canary="other")),
    ],
)
def test_an_unknown_choice_is_not_read_as_the_last_known_one(read):
    """Code that was not given validated settings must not compute what another choice asks for."""
    with pytest.raises(AssertionError, match="other"):
        read()


@pytest.mark.parametrize(
    ("flags", "note"),
    [
        ("--rollout-temperature 0", "samples greedily"),
        ("--log-passrate --rm-type format:1,length:0.1", "an answer passes if the sum is 1 or more"),
        ("--use-dynamic-batch-size --max-tokens-per-gpu 32", "its own micro-batch"),
        ("", "--global-batch-size is 32"),
    ],
)
def test_notes(validated, flags, note):
    assert any(note in said for said in validated(flags).notes)


FIELDS = [
    (name, field)
    for name, section in SECTIONS.items()
    for field in dataclasses.fields(section)
    if field.type in (int, float, int | None, float | None) or flag_choices(field)
]


def odd_values(field: dataclasses.Field) -> st.SearchStrategy:
    if flag_choices(field):
        return st.sampled_from(flag_choices(field))
    whole = st.sampled_from([-1, 0, 1, 2, 3, 8, 64])
    return whole if field.type in (int, int | None) else whole | st.sampled_from([0.5, float("nan"), float("inf")])


@given(data=st.data(), chosen=st.lists(st.sampled_from(FIELDS), max_size=6, unique=True))
def test_any_values_are_accepted_or_refused_by_name(data, chosen):
    """Rules run although others have failed, so none may divide by zero or meet a missing value."""
    settings = validate(parse(MINIMAL.split())).settings
    for name, field in chosen:
        section = dataclasses.replace(getattr(settings, name), **{field.name: data.draw(odd_values(field))})
        settings = dataclasses.replace(settings, **{name: section})
    try:
        result = validate(settings)
    except FlagError as error:
        assert all(message.startswith("--") for message in error.messages)
        return
    assert explain(result)
    assert validate(result.settings).settings == result.settings
