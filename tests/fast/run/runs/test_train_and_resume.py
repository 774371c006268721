"""A run of ``train.py`` that is killed and resumed, until it is complete: its processes, and the files it writes."""

import json
import math
import re
from pathlib import Path

import pytest
from tolerance import METRIC_ERROR, RELATIVE_ERROR, RUN_ERROR, RUN_METRIC_ERROR

from tests.fast.run.runs.launches import LOCAL_RAY, UMASK, is_loopback, kind_of, trained

pytestmark = pytest.mark.timeout(900)

SAVING = ["--use-kl-loss", "--kl-loss-coef", "0.1", "--save-interval", "3", "--eval-interval", "3"]
IN_EVERY_STEP = {"train/loss", "train/pg_loss", "train/kl_loss", "train/ppo_kl", "train/grad_norm", "train/lr"}
IN_EVERY_STEP |= {"train/ess_ratio"}
IN_LAST_STEP = {"rollout/reward", "rollout/response_length", "time/generate", "time/sync_weights"}
SECRET = "hf-open-sesame"
STEPS = 2  # optimizer steps per iteration


def flags(workplace):
    sets = ["--eval-prompt-data", "held", str(workplace / "prompts.jsonl")]
    answers = ["--save-debug-rollout-data", str(workplace / "debug_{rollout_id}.jsonl")]
    return [*SAVING, *sets, *answers, "--save", str(workplace / "whole_checkpoints")]


@pytest.fixture(scope="module")
def held(launch, workplace):
    """Return a run with a secret, which waits forever in its last iteration."""
    mark = workplace / "whole.held"
    secret = ["--train-env-vars", json.dumps({"HF_TOKEN": SECRET})]
    run = launch("whole", *flags(workplace), *secret, ranks=2, HOLD_AT="5", HELD=str(mark))
    run.wait_until(lambda: mark.exists() and 5 * STEPS in run.rows())
    return run


def test_a_run_on_one_machine_listens_on_the_loopback_interface_only(held):
    listening = held.listening()
    assert listening.keys() <= LOCAL_RAY, "a process that is not in docs/security.md listens"
    assert {"gcs_server", "raylet", "ray::TrainActor"} <= listening.keys()
    assert all(is_loopback(address) for addresses in listening.values() for address in addresses), listening
    assert not {"monitor.py", "dashboard.py"} & {kind_of(process) for process in held.left()}, "no run uses them"


def test_no_other_user_can_see_a_secret(held):
    lines = [" ".join(words) for _, words in held.command_lines()]
    assert not [line for line in lines if SECRET in line]
    [session] = {name for line in lines for name in re.findall(r"(?<![\w/.-])/[^\s=]*/session_2[\w-]+", line)}
    assert Path(session).parents[1].stat().st_mode & 0o077 == 0, "Ray opens the folders below it for everybody"
    assert not [path for path in Path(session, "logs").rglob("*") if path.is_file() and SECRET in path.read_text()]
    assert "hidden" in (held.output / "run.json").read_text()
    assert not [path for path in held.output.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]


@pytest.fixture(scope="module")
def rows_when_killed(held):
    """Kill every process of the run, and return its metrics."""
    held.kill()
    return held.rows()


@pytest.fixture(scope="module")
def whole(rows_when_killed, launch, workplace):
    """Resume the run from its checkpoint of iteration 3, and let it end."""
    going_on = ["--load", str(workplace / "whole_checkpoints"), "--save-hf", str(workplace / "hf")]
    run = launch("whole", *flags(workplace), *going_on, ranks=2)
    assert run.wait() == 0, run.err
    return run


def test_killed_run_resumes_as_if_it_had_not_been_killed(rows_when_killed, whole):
    """Compare every metric of the steps that both runs have taken, and of those before."""
    rows = whole.rows()
    assert sorted(rows_when_killed) == list(range(1 + 5 * STEPS)), "it was to be killed past its checkpoint"
    for step, expected in rows_when_killed.items():
        assert trained(rows[step]) == pytest.approx(trained(expected), rel=RELATIVE_ERROR, abs=METRIC_ERROR), step


def test_every_step_is_logged(whole):
    rows = whole.rows()
    assert sorted(rows) == list(range(1 + 6 * STEPS))  # step 0 is the evaluation before training
    assert all(rows[step].keys() >= IN_EVERY_STEP for step in range(1, 13))
    assert all(rows[step].keys() >= IN_LAST_STEP for step in range(STEPS, 13, STEPS))
    assert [step for step, row in rows.items() if "eval/held/reward" in row] == [0, 3 * STEPS, 6 * STEPS]
    assert all(math.isfinite(value) for row in rows.values() for value in row.values())
    assert all(rows[step]["train/grad_norm"] > 0 for step in range(1, 13))


def test_report_and_events_are_written(whole):
    assert (whole.output / "report.html").stat().st_size > 1000
    assert list((whole.output / "tensorboard").rglob("events.out.tfevents.*"))


def test_checkpoints_are_complete(whole, workplace):
    folder = workplace / "whole_checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["iter_0000003", "iter_0000006"]


def test_export_is_the_trained_model(whole, workplace, tiny_model):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    export = workplace / "hf"
    assert AutoTokenizer.from_pretrained(export)("1 + 1").input_ids
    before = dict(AutoModelForCausalLM.from_pretrained(tiny_model).named_parameters())
    after = dict(AutoModelForCausalLM.from_pretrained(export).named_parameters())
    assert before.keys() == after.keys()
    assert all(not torch.equal(before[name], after[name]) for name in before)


def test_files_are_no_wider_than_the_umask_and_exports_no_narrower(whole, workplace):
    folders = [whole.output, workplace / "whole_checkpoints", workplace / "hf"]
    files = [path for folder in folders for path in (folder, *folder.rglob("*"))]
    assert len(files) > 20
    assert not [path for path in files[1:] if path.stat().st_mode & UMASK]
    assert {path.stat().st_mode & 0o777 for path in (workplace / "hf").glob("*.*")} == {0o666 & ~UMASK}


def test_no_process_is_left(whole):
    assert whole.none_left()


def test_console_shows_only_the_run(whole):
    assert whole.out.count("step ") >= 3 * STEPS
    (warning,) = whole.said()
    assert "12 of its 12 prompts are training prompts too" in warning


@pytest.mark.slow
def test_saved_samples_train_the_same_first_step_in_another_layout(whole, launch, workplace):
    """The first run used data parallelism; this one uses context parallelism, with the canary on."""
    saved = ["--load-debug-rollout-data", str(workplace / "debug_{rollout_id}.jsonl"), "--num-rollout", "1"]
    split = ["--dynamic-context-parallel", "--max-seqlen-per-dp-cp-rank", "16", "--loss-canary", "always"]
    run = launch("debug", "--use-kl-loss", "--kl-loss-coef", "0.1", *saved, *split, ranks=2)
    assert run.wait() == 0, run.err
    first, expected = run.rows()[1], whole.rows()[1]
    assert first["train/loss_mass"] == expected["train/loss_mass"] == pytest.approx(1.0, rel=RELATIVE_ERROR)
    names = [name for name in expected if name.startswith("train/") and name != "train/lr"]  # the run is shorter
    assert {name: first[name] for name in names} == pytest.approx(
        {name: expected[name] for name in names}, rel=RUN_ERROR, abs=RUN_METRIC_ERROR
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_runs_in_one_output_folder_keep_their_metrics_apart(launch, workplace):
    """One is stopped, another runs in its output folder, and the first is resumed there, over its own export."""
    saving = ["--save", str(workplace / "first"), "--save-hf", str(workplace / "first_hf"), "--save-interval", "1"]
    first = launch("shared", *saving, "--num-rollout", "2")
    assert first.wait() == 0, first.err
    run = json.loads((first.output / "run.json").read_text())["run"]
    (workplace / "first_hf" / "README.md").write_text("mine")
    second = launch("shared", "--num-rollout", "3")
    assert second.wait() == 0, second.err
    other = json.loads((second.output / "run.json").read_text())["run"]
    resumed = launch("shared", *saving, "--num-rollout", "3", "--load", str(workplace / "first"))
    assert resumed.wait() == 0, resumed.err
    assert json.loads((resumed.output / "run.json").read_text())["run"] == run != other
    steps = {name: sorted({*rows_of(resumed.output / name)}) for name in (".", "earlier-1", "earlier-2")}
    assert steps == {".": [5, 6], "earlier-1": [1, 2, 3, 4], "earlier-2": [1, 2, 3, 4, 5, 6]}
    said = " ".join(resumed.out.split())
    assert f"held the metrics of run {other['id']} " in said and f"this run continues run {run['id']} " in said
    assert {"README.md", "config.json", "model.safetensors"} <= {p.name for p in (workplace / "first_hf").iterdir()}


def rows_of(folder):
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
