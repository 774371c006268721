"""The sentence on whether a run learns, as a property of its curves, and the charts and lights that go with it."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from run_folder import SETTINGS, healthy_row, write_header, write_rows

from miles.config.tracking import TrackingArguments
from miles.observe.charts import main_metrics, run_charts
from miles.observe.health import RULES, Judgement, judge, verdicts
from miles.observe.metrics_file import MetricsFile
from miles.observe.page import RunView
from miles.observe.run_files import METRICS, RunFiles, RunHeader
from miles.observe.tracker import Tracker

SFT = {"loss": {"loss_type": "sft_loss"}}
POLICY = {"loss": {"loss_type": "policy_loss"}}
REWARD, HELD_OUT, LOSS = "rollout/reward", "eval/heldout/accuracy", "train/loss"

noises = st.floats(0.0, 0.05)  # eight measurements with more may fall as far as they rise
lengths = st.integers(8, 120)
seeds = st.integers(0, 10**6)


def metrics_of(folder: Path, **columns: list[float | None]) -> MetricsFile:
    """Return a file with the columns; their names have ``__`` instead of the slash."""
    names = {name.replace("__", "/"): values for name, values in columns.items()}
    rows = max(map(len, names.values()), default=0)
    (folder / METRICS).unlink(missing_ok=True)
    records = [{n: v[i] for n, v in names.items() if i < len(v) and v[i] is not None} for i in range(rows)]
    write_rows(folder, enumerate(records, 1))  # type: ignore[arg-type]
    metrics = MetricsFile(folder / METRICS)
    metrics.refresh()
    return metrics


def curve(shape: Callable[[float], float], length: int, noise: float, seed: int) -> list[float]:
    random_ = random.Random(seed)
    return [shape(i / max(length - 1, 1)) + random_.gauss(0, noise) for i in range(length)]


def judged(folder: Path, run: dict = POLICY, runs: bool = False, **columns: list) -> Judgement:
    return judge(metrics_of(folder, **columns), run, runs, 200)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run")


@settings(max_examples=60, deadline=None)
@given(lengths, noises, seeds)
def test_a_reward_that_rises_is_learning(folder: Path, length: int, noise: float, seed: int) -> None:
    shape = curve(lambda x: 0.1 + 0.8 * x, length, noise, seed)
    judgement = judged(folder, rollout__reward=shape)
    assert judgement.is_learning and judgement.sentence.startswith("It learned: reward rose from ")
    assert judged(folder, runs=True, rollout__reward=shape).sentence.startswith("It is learning: ")


@settings(max_examples=100, deadline=None)
@given(lengths, noises, seeds, st.floats(0.1, 0.9))
def test_noise_alone_is_never_called_learning(folder: Path, length: int, noise: float, seed: int, level: float) -> None:
    judgement = judged(folder, rollout__reward=curve(lambda x: level, length, noise, seed))
    assert not judgement.is_learning


def test_a_constant_reward_is_named(folder: Path) -> None:
    judgement = judged(folder, rollout__reward=[0.0] * 20)
    assert judgement == Judgement(False, "It did not learn: reward has been 0 in every measurement.")


@settings(max_examples=60, deadline=None)
@given(st.integers(20, 120), st.floats(0.0, 0.05), seeds)
def test_a_reward_that_rises_and_collapses_got_worse(folder: Path, length: int, noise: float, seed: int) -> None:
    judgement = judged(folder, rollout__reward=curve(lambda x: 0.1 + 1.6 * min(x, 1 - x), length, noise, seed))
    assert judgement.is_learning is False and "got worse: reward fell from" in judgement.sentence


@settings(max_examples=60, deadline=None)
@given(st.integers(40, 400), st.floats(0.0, 0.05), seeds, st.floats(0.05, 0.9))
def test_the_light_of_a_flat_reward_is_no_matter_of_noise(
    folder: Path, length: int, noise: float, seed: int, level: float
) -> None:
    def state(growth: float, noise: float, run: dict = POLICY) -> str:
        rewards = curve(lambda x: level + growth * x, length, noise, seed)
        return next((verdict.state for verdict in verdicts(metrics_of(folder, rollout__reward=rewards), run)), "")

    assert state(0.1, noise) != "unhealthy"
    assert state(0.0, min(noise, 0.01)) == "unhealthy"
    assert state(0.0, 0.0, {"rollout": {"debug_rollout_only": True}}) == "", "nothing is trained"


@settings(max_examples=60, deadline=None)
@given(lengths, st.floats(0.0, 0.1), seeds)
def test_fine_tuning_is_judged_by_its_loss(folder: Path, length: int, noise: float, seed: int) -> None:
    falls = curve(lambda x: 1 + 2 * math.exp(-4 * x), length, noise, seed)
    judgement = judged(folder, SFT, train__loss=falls, rollout__reward=[0.0] * length)
    assert judgement.is_learning and judgement.sentence.startswith("It learned: loss fell from ")
    worse = judged(folder, SFT, train__loss=[4 - value for value in falls])
    assert worse.is_learning is False and "got worse: loss rose from" in worse.sentence


def test_held_out_decides_before_reward_and_loss(folder: Path) -> None:
    rising, flat = [i / 20 for i in range(21)], [0.3, *[None] * 9, 0.3, *[None] * 9, 0.3]
    assert judged(folder, rollout__reward=rising, eval__heldout__accuracy=flat).is_learning is False
    assert judged(folder, SFT, train__loss=flat, eval__a__loss=[2.0, None, 1.0]).sentence.startswith(
        "It learned: held-out loss fell from 2 to 1"
    )
    once = judged(folder, rollout__reward=rising, eval__heldout__accuracy=[0.3])
    assert once.is_learning, "one evaluation states nothing; the reward does"
    few = {"eval__heldout__reward": [0.15, *[None] * 9, 0.36, *[None] * 8, 0.36]}
    assert judged(folder, rollout__reward=rising, **few).sentence.endswith(
        "; held-out reward rose from 0.15 to 0.36 in 3 measurements."
    )
    assert judged(folder, rollout__reward=flat, **few).is_learning is None, "the reward has not risen"


@pytest.mark.parametrize(
    ("columns", "run", "sentence"),
    [
        ({}, POLICY, "No step has finished yet."),
        ({"rollout__reward": [0.1] * 3}, POLICY, "Too early to tell: 3 of 200 steps are done."),
        (
            {"eval__heldout__reward": [0.08, None, 0.19, None, 0.17]},
            POLICY,
            "3 measurements cannot tell: held-out reward is 0.17, and was 0.08 at the start.",
        ),
        (
            {"rollout__reward": [0.22, 0.28, 0.15, 0.32, 0.21, 0.38, 0.28, 0.5]},
            POLICY,
            "8 measurements cannot tell: reward is 0.39, and was 0.25 at the start.",
        ),
        ({"train__grad_norm": [1.0] * 30}, POLICY, "It measures no reward and no loss that tells whether it learns."),
        (
            {"rollout__reward": [0.5] * 30},
            {"rollout": {"debug_rollout_only": True}},
            "It only generates (--debug-rollout-only); nothing is trained. Its reward is 0.5 on average.",
        ),
        (
            {"rollout__reward": [0.5], "rollout__zero_std_groups": [0.75]},
            {"rollout": {"debug_rollout_only": True}},
            "It only generates (--debug-rollout-only); nothing is trained. Its reward is 0.5 on average. "
            "75% of the groups have the same reward for all answers, which would teach nothing.",
        ),
        ({"rollout__reward": [1.0] * 30}, POLICY, "Little is left to learn: reward has been 1 in every measurement."),
    ],
)
def test_what_cannot_be_judged_is_not(folder: Path, columns: dict, run: dict, sentence: str) -> None:
    assert judged(folder, run, True, **columns) == Judgement(None, sentence)


def test_the_two_large_charts_are_those_that_decide() -> None:
    names = sorted([REWARD, HELD_OUT, LOSS, "rollout/response_length", "train/grad_norm"])
    assert main_metrics(names, POLICY) == [HELD_OUT, REWARD]
    assert main_metrics([n for n in names if n != HELD_OUT], POLICY) == [REWARD, "rollout/response_length"]
    assert main_metrics(names, SFT) == [LOSS, HELD_OUT]
    assert main_metrics([LOSS, "train/grad_norm"], SFT) == [LOSS, "train/grad_norm"]
    assert main_metrics([*names, "eval/a/loss"], SFT) == ["eval/a/loss", LOSS]


def test_rounding_errors_are_zero_and_a_learning_rate_is_not(folder: Path) -> None:
    columns = {"train__pg_loss": [1e-8, -3e-8], "train__lr": [1e-9, 1e-9], "train__grad_norm": [0.0, 0.1]}
    by_title = {chart["title"]: chart["is_zero"] for chart in run_charts(metrics_of(folder, **columns), POLICY)}
    assert by_title == {"Policy loss": True, "Learning rate": False, "Gradient norm": False}


ALL = {"/".join(rule.metric.split("/")): 1.0 for rule in RULES}


@pytest.mark.parametrize(
    ("run", "absent"),
    [
        (SFT, {rule.name for rule in RULES} - {"Gradient spikes"}),
        ({"rollout": {"n_samples_per_prompt": 1}}, {"Groups without spread"}),
        ({"loss": {"advantage_estimator": "ppo"}}, {"Groups without spread"}),
        (POLICY, set()),
    ],
)
def test_rules_that_do_not_apply_are_not_shown(folder: Path, run: dict, absent: set[str]) -> None:
    columns = {name.replace("/", "__"): [value] for name, value in ALL.items()}
    names = {verdict.rule for verdict in verdicts(metrics_of(folder, **columns), run)}
    assert {rule.name for rule in RULES} - names == absent
    assert verdicts(metrics_of(folder, rollout__tokens=[1.0]), run) == [], "nothing that a rule reads is measured"


GIVEN = {
    "--use-tis": {"loss": {"use_tis": True}},
    "--async-steps": {"rollout": {"async_steps": 0}},
    "--num-steps-per-rollout": {"training": {"num_steps_per_rollout": 1}},
    "--dynamic-sampling-filter-path": {"rollout": {"dynamic_sampling_filter_path": "a.b"}},
    "--clip-grad": {"optimizer": {"clip_grad": 0.0}},
    "--entropy-coef": {"loss": {"entropy_target": 0.5}},
}


@pytest.mark.parametrize("flag", GIVEN)
def test_advice_that_the_run_already_follows_is_not_given(folder: Path, flag: str) -> None:
    metrics = metrics_of(folder, **{name.replace("/", "__"): [value] for name, value in ALL.items()})
    before, after = verdicts(metrics, POLICY), verdicts(metrics, GIVEN[flag])
    assert any(flag in f"{verdict.advice} {verdict.flag}" or verdict.flag == flag for verdict in before)
    assert not any(flag in verdict.advice or verdict.flag == flag for verdict in after)
    assert all(verdict.advice and verdict.flag for verdict in after), "some advice always applies"


def test_a_rule_may_fire_before_it_does(folder: Path) -> None:
    def state(fraction: float) -> str:
        columns = {"train__pg_clipfrac": [fraction] * 20}
        return verdicts(metrics_of(folder, **columns), POLICY)[0].state

    assert [state(f) for f in (0.1, 0.25, 0.31)] == ["ok", "may fire", "unhealthy"]


def test_the_state_says_how_the_run_ended_and_why(tmp_path: Path) -> None:
    def ended(error: BaseException | None, steps: int = 3) -> tuple[str, str]:
        tracking = TrackingArguments(output_dir=str(tmp_path), no_report=True)
        try:
            with Tracker(tracking, RunHeader("miles", {}, "", "", 3)) as tracker:
                for step in range(1, steps + 1):
                    tracker.log(step, {"rollout/reward": 0.5})
                if error is not None:
                    raise error
        except BaseException as raised:
            assert raised is error
        overview = RunView(tmp_path).overview()
        return overview["state"], overview["why"]

    assert ended(None) == ("finished", "")
    assert ended(ValueError("the reward failed\nhere"), 2) == ("failed", "ValueError: the reward failed")
    assert ended(KeyboardInterrupt(), 2)[0] == "stopped"
    RunFiles(tmp_path).forget_end()
    state, why = RunView(tmp_path).overview()["state"], RunView(tmp_path).overview()["why"]
    assert state == "failed" and "it was killed" in why
    write_rows(tmp_path, [(3, healthy_row(3, 3))])
    assert RunView(tmp_path).overview()["state"] == "finished"


def test_settings_that_differ_have_their_defaults(tmp_path: Path) -> None:
    write_header(tmp_path, SETTINGS)
    table = {part["section"]: part["rows"] for part in RunView(tmp_path).overview()["settings"]}
    assert table["optimizer"] == [["lr", "1e-05", "1e-06"]]
    assert ["use_tis", "False", None] in table["loss"]
