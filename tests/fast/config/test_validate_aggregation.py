"""The validator table of docs/loss-aggregation.md, row by row."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.base.flags import FlagError, collect_errors
from miles.compat.border import read_command
from miles.config.parser import judge
from miles.objective.aggregation import VERL_MODES, reconcile_aggregation
from miles.objective.settings import LossArguments
from tests.fast.config.conftest import minimal
from tests.fast.support.rows import rows

REDUCER = "--custom-pg-loss-reducer-function-path mine:reducer"


def test_default_is_the_sample_mean_and_says_nothing(validated):
    loss = validated("--global-batch-size 32").settings.loss
    assert loss == LossArguments(policy_loss="ppo")
    assert validated("--global-batch-size 32").notes == ()


def test_token_mean_sets_the_per_token_path(validated):
    result = validated("--loss-aggregation token_mean")
    assert result.settings.loss.calculate_per_token_loss
    assert any("sets --calculate-per-token-loss" in note for note in result.notes)


def test_per_token_loss_is_relabelled_token_mean(validated):
    result = validated("--calculate-per-token-loss")
    assert result.settings.loss == validated("--loss-aggregation token_mean").settings.loss
    assert any("relabelled" in note for note in result.notes)


def test_per_token_loss_is_left_to_a_custom_reducer(validated):
    loss = validated(f"--calculate-per-token-loss {REDUCER}").settings.loss
    assert (loss.loss_aggregation, loss.calculate_per_token_loss) == ("sample_mean", True)


@pytest.mark.parametrize("divisor", ["0", "=-3", "nan", "inf", "=-inf"])
@pytest.mark.parametrize(
    "flag",
    [
        "--loss-aggregation constant --loss-aggregation-divisor",
        "--pg-loss-divisor",
        "--loss-agg-mode seq-mean-token-sum-norm --loss-scale-factor",
    ],
)
def test_a_divisor_is_finite_and_above_zero(validated, flag, divisor):
    words = f"{flag}{divisor}" if divisor.startswith("=") else f"{flag} {divisor}"
    with pytest.raises(ValueError, match=rf"{flag.split()[-1]} .*{divisor.strip('=')}.*finite and above 0"):
        validated(words)


REFUSED = [
    ("--loss-aggregation constant", r"--loss-aggregation constant: needs .*--loss-aggregation-divisor"),
    ("--loss-aggregation-divisor 8", r"--loss-aggregation-divisor 8.*ignored by --loss-aggregation sample_mean"),
    ("--loss-aggregation prompt_mean --loss-aggregation-divisor 8", "ignored by --loss-aggregation prompt_mean"),
    ("--loss-aggregation token_mean --loss-aggregation-divisor 8", "ignored by --loss-aggregation token_mean"),
    ("--loss-aggregation constant --loss-aggregation-divisor 8 --calculate-per-token-loss", "divide the normalization"),
    ("--loss-aggregation delta_l", "needs the number that token losses are divided by"),
    ("--loss-aggregation delta_l --loss-aggregation-divisor 8 --loss-aggregation-alpha 2", "must be from 0"),
    ("--loss-aggregation-alpha 0.5", "ignored by --loss-aggregation sample_mean"),
    ("--loss-aggregation prompt_mean --calculate-per-token-loss", "normalization of --loss-aggregation prompt_mean"),
    (f"--loss-aggregation-divisor 8 {REDUCER}", "would be ignored by --loss-aggregation sample_mean"),
    (
        f"--loss-aggregation token_mean --loss-aggregation-divisor 8 {REDUCER}",
        "ignored by --loss-aggregation token_mean",
    ),
    (f"--loss-aggregation token_mean --pg-loss-divisor 8 {REDUCER}", "contradicts --loss-aggregation token_mean"),
    (f"--loss-agg-mode token-mean --loss-scale-factor 8 {REDUCER}", "ignored by --loss-agg-mode token-mean"),
    (f"--pg-loss-divisor 0 {REDUCER}", "must be finite and above 0"),
    (
        "--loss-aggregation prompt_mean --global-batch-size 2",
        r"size 2 .*--n-samples-per-prompt 4 in two.*multiple of 4",
    ),
    ("--context-parallel-size 2 --qkv-format bshd", "padded lengths are not known"),
    ("--dynamic-context-parallel --max-seqlen-per-dp-cp-rank 64 --qkv-format bshd", "padded lengths are not known"),
    ("--pg-loss-divisor 8 --loss-aggregation token_mean", "contradicts --loss-aggregation token_mean"),
    ("--pg-loss-divisor 8 --loss-aggregation prompt_mean", "contradicts --loss-aggregation prompt_mean"),
    ("--pg-loss-divisor 8 --loss-agg-mode token-mean", "contradicts --loss-agg-mode"),
    ("--pg-loss-divisor 8 --loss-aggregation-divisor 8", "names the divisor twice"),
    ("--pg-loss-divisor 8 --calculate-per-token-loss", "divide the normalization"),
    ("--loss-scale-factor 8", "ignored without --loss-agg-mode"),
    ("--loss-agg-mode token-mean --loss-scale-factor 8", "ignored by --loss-agg-mode token-mean"),
    ("--loss-agg-mode seq-mean-token-sum --loss-scale-factor 8", "ignored by --loss-agg-mode seq-mean-token-sum"),
    ("--loss-agg-mode token-sum --loss-scale-factor 8", "ignored by --loss-agg-mode token-sum"),
    ("--loss-agg-mode token-sum --calculate-per-token-loss", "normalization of --loss-agg-mode token-sum"),
    ("--loss-agg-mode token-mean --loss-aggregation prompt_mean", "names the aggregation twice"),
    ("--loss-agg-mode token-mean --loss-aggregation-divisor 8", "cannot use --loss-aggregation-divisor"),
]


@pytest.mark.parametrize(("flags", "sentence"), REFUSED)
def test_refused_in_one_sentence(validated, flags, sentence):
    with pytest.raises(ValueError, match=sentence) as caught:
        validated(flags)
    assert re.match(r"--[a-z-]+.*: .*; ", str(caught.value)), "flag, rule; what to do"
    assert "\n" not in str(caught.value)


SAMPLE_MEAN_ASKED_FOR = [
    ("--loss-agg-mode token-mean", "token-mean: names the aggregation twice, alongside --loss-aggregation sample_mean"),
    ("--pg-loss-divisor 5", "contradicts --loss-aggregation sample_mean"),
]


@pytest.mark.parametrize(("flags", "sentence"), SAMPLE_MEAN_ASKED_FOR)
def test_the_default_is_not_replaced_if_it_was_asked_for(flags, sentence):
    with pytest.raises(FlagError) as caught:
        judge(read_command(minimal(f"--loss-aggregation sample_mean {flags}")))
    (message,) = caught.value.messages
    assert sentence in message
    assert judge(read_command(minimal(flags))).settings.loss.loss_aggregation != "sample_mean"


@pytest.mark.parametrize("further", ["", "--calculate-per-token-loss"])
@pytest.mark.parametrize("flags", rows(__file__, "test_a_custom_reducer_takes_precedence"))
def test_a_custom_reducer_takes_precedence(flags, further):
    """Nothing is left of the other flags: a note on each, and an error with --strict-flags."""
    others = " ".join(word for word in re.findall(r"--global-batch-size \d+", flags))
    alone = judge(read_command(minimal(f"{REDUCER} {further} {others}")))
    result = judge(read_command(minimal(f"{REDUCER} {further} {flags}")))
    assert result.settings == alone.settings
    overruled = re.findall(r"--(?:loss|pg)-[a-z-]+ \S+", flags)
    notes = {note.written.removesuffix(".0"): note for note in result.accepted if "takes precedence" in note.why}
    assert sorted(notes) == sorted(overruled)
    with pytest.raises(FlagError) as caught:
        judge(read_command(minimal(f"{REDUCER} {further} {flags} --strict-flags")))
    assert len(caught.value.messages) == len(overruled)
    assert all("has no effect (--custom-pg-loss-reducer" in message for message in caught.value.messages)


@pytest.mark.parametrize("mode", ["--loss-aggregation sample_mean", "--loss-agg-mode seq-mean-token-mean"])
def test_a_sample_mean_that_was_asked_for_becomes_token_mean_too(mode):
    result = judge(read_command(minimal(f"{mode} --calculate-per-token-loss --strict-flags")))
    assert result.settings == judge(read_command(minimal("--loss-aggregation token_mean"))).settings
    assert any("relabelled" in note for note in result.notes)


@pytest.mark.parametrize(("first", "last"), rows(__file__, "test_of_one_flag_given_twice_the_last_counts"))
def test_of_one_flag_given_twice_the_last_counts(first, last):
    """A note reports it; the same value twice needs no note."""
    alone, both = (judge(read_command(minimal(flags))) for flags in (last, f"{first} {last}"))
    assert both.settings == alone.settings
    assert [note.written for note in both.accepted if "given twice" in note.why] == [first.replace("=", " ")]
    assert judge(read_command(minimal(f"{last} {last}"))) == alone


def test_verls_name_may_say_the_same_as_the_aggregation():
    command = read_command(minimal("--loss-aggregation sample_mean --loss-agg-mode seq-mean-token-mean"))
    assert judge(command).settings.loss.loss_aggregation == "sample_mean"


SEVERAL = [
    (
        "--loss-aggregation constant --calculate-per-token-loss",
        ["--loss-aggregation constant: needs", "--calculate-per-token-loss: would divide"],
    ),
    (
        "--pg-loss-divisor 0 --loss-aggregation-divisor 3",
        ["--pg-loss-divisor 0.0: names the divisor twice", "--pg-loss-divisor 0.0: the divisor must be finite"],
    ),
    (
        "--loss-agg-mode seq-mean-token-sum-norm --loss-scale-factor 0 --loss-aggregation prompt_mean",
        [
            "--loss-agg-mode seq-mean-token-sum-norm: names the aggregation twice",
            "--loss-scale-factor 0.0: the divisor",
        ],
    ),
    ("--loss-aggregation prompt_mean --global-batch-size 6", ["--global-batch-size 6: must divide"]),
    (
        "--loss-aggregation constant --rollout-batch-size 0",
        ["--rollout-batch-size 0: must be", "--loss-aggregation constant: needs"],
    ),
]


@pytest.mark.parametrize(("flags", "sentences"), SEVERAL)
def test_every_mistake_is_one_error(validated, flags, sentences):
    with pytest.raises(FlagError) as caught:
        validated(flags)
    messages = sorted(caught.value.messages)
    assert len(messages) == len(sentences)
    assert all(message.startswith(start) for message, start in zip(messages, sorted(sentences), strict=True)), messages


@pytest.mark.parametrize("size", [4, 8, 16, 32])
def test_prompt_mean_takes_steps_of_whole_groups(validated, size):
    settings = validated(f"--loss-aggregation prompt_mean --global-batch-size {size}").settings
    assert settings.loss.loss_aggregation == "prompt_mean"
    assert settings.steps_per_iteration == 32 // size


@pytest.mark.parametrize("more", ["", "--loss-aggregation constant"])
def test_pg_loss_divisor_is_constant(validated, more):
    result = validated(f"--pg-loss-divisor 12 {more}")
    expected = validated("--loss-aggregation constant --loss-aggregation-divisor 12").settings
    assert result.settings == expected
    assert any("--pg-loss-divisor 12 is read as" in note for note in result.notes)


VERL = [
    ("token-mean", "--loss-aggregation token_mean"),
    ("seq-mean-token-mean", "--loss-aggregation sample_mean"),
    ("seq-mean-token-sum", "--loss-aggregation constant --loss-aggregation-divisor 1"),
    ("token-sum", "--loss-aggregation constant --loss-aggregation-divisor 0.03125"),
    (
        "token-sum --global-batch-size 8",
        "--global-batch-size 8 --loss-aggregation constant --loss-aggregation-divisor 0.125",
    ),
    ("seq-mean-token-mean --calculate-per-token-loss", "--loss-aggregation token_mean"),
    ("seq-mean-token-sum-norm --loss-scale-factor 9", "--loss-aggregation constant --loss-aggregation-divisor 9"),
    ("seq-mean-token-sum-norm", "--loss-aggregation constant --loss-aggregation-divisor 64"),
]


@pytest.mark.parametrize(("theirs", "ours"), VERL)
def test_verl_names(validated, theirs, ours):
    result = validated(f"--loss-agg-mode {theirs}")
    assert result.settings == validated(ours).settings
    assert any("--loss-agg-mode" in note for note in result.notes)


def test_what_differs_from_verl_is_said(validated):
    notes = {name: " ".join(validated(f"--loss-agg-mode {name}").notes) for name in VERL_MODES}
    assert "1 / N for the N = 32 trajectories" in notes["token-sum"]
    assert [n for n in notes if "fully masked answers" in notes[n]] == [n for n in notes if n.startswith("seq-mean")]


def test_verl_default_factor_is_said(validated):
    notes = validated("--loss-agg-mode seq-mean-token-sum-norm").notes
    assert any("--rollout-max-response-len 64" in note for note in notes)


divisors = st.none() | st.floats(allow_nan=True, allow_infinity=True)
losses = st.builds(
    LossArguments,
    loss_aggregation=st.sampled_from(["sample_mean", "prompt_mean", "token_mean", "constant", "delta_l"]),
    loss_aggregation_divisor=divisors,
    loss_aggregation_alpha=st.none() | st.floats(-0.5, 1.5),
    calculate_per_token_loss=st.booleans(),
    pg_loss_divisor=divisors,
    loss_agg_mode=st.none() | st.sampled_from(sorted(VERL_MODES)),
    loss_scale_factor=divisors,
    custom_pg_loss_reducer_function_path=st.none() | st.just("mine:reducer"),
)


def reconcile(loss, trajectories_per_step, samples_per_prompt):
    with collect_errors() as errors:
        result = reconcile_aggregation(loss, 64, trajectories_per_step, samples_per_prompt, errors)
    return result


@given(loss=losses, rollouts=st.integers(1, 64), samples=st.integers(1, 8))
def test_what_is_accepted_is_consistent_and_stays_as_it_is(loss, rollouts, samples):
    """Anything is refused with a flag's name, or becomes one mode without aliases; twice is the same as once."""
    try:
        result, _ = reconcile(loss, rollouts, samples)
    except ValueError as error:
        assert str(error).startswith("--")
        return
    assert result.pg_loss_divisor is result.loss_agg_mode is result.loss_scale_factor is None
    assert (result.loss_aggregation_divisor is not None) == (result.loss_aggregation in ("constant", "delta_l"))
    assert (result.loss_aggregation_alpha is not None) == (result.loss_aggregation == "delta_l")
    if result.custom_pg_loss_reducer_function_path is None:
        assert result.calculate_per_token_loss == (result.loss_aggregation == "token_mean")
    else:
        assert result.loss_aggregation == "sample_mean"
    if result.loss_aggregation in ("prompt_mean", "delta_l"):
        assert rollouts % samples == 0
    assert reconcile(result, rollouts, samples) == (result, [])


@given(loss=losses)
def test_only_aggregation_flags_change(loss):
    try:
        result, _ = reconcile(loss, 8, 4)
    except ValueError:
        return
    names = ("loss_aggregation", "loss_aggregation_divisor", "loss_aggregation_alpha", "calculate_per_token_loss")
    aliases = ("pg_loss_divisor", "loss_agg_mode", "loss_scale_factor")
    assert replace(loss, **{name: getattr(result, name) for name in names + aliases}) == result
