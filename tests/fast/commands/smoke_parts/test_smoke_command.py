"""``miles smoke`` ends with a status for what happened: passed, failed check, wrong flags, failed or slow run."""

import json
import math
from xml.etree import ElementTree

import pytest

from miles import cli
from miles.base.junit import CheckResult
from miles.commands import smoke
from miles.commands.smoke import RUN, Expectation, _check
from miles.observe.run_files import RunFiles


@pytest.fixture
def line(tiny_model, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"input": f"{i} + 1 = ", "label": str(i + 1)}) + "\n" for i in range(9)))
    flags = f"--hf-checkpoint {tiny_model} --prompt-data {prompts} --label-key label --num-rollout 100 --lr 1e-4"
    flags += " --rollout-batch-size 16 --n-samples-per-prompt 8 --rollout-max-response-len 64 --rm-type exact_match"
    return flags.split()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("", "the flags of a training command are missing; write them after --"),
        ("--expect a=1 --", "--expect 'a=1': is not an expectation"),
        ("--expect-file nowhere --", "--expect-file nowhere: cannot be read"),
        ("--iterations 0 --", "--iterations 0: must be finite and at least 1"),
        ("--timeout inf --", "--timeout inf: must be finite"),
        ("--timeout 1e9 --", "--timeout 1e+09: must be at most 1000000; give a number nearer to 0"),
        ("--folder . --", "--folder .: is there already"),
        ("-- --lr fast", "--lr fast: must be a number"),
    ],
)
def test_wrong_flags_are_refused(options, message, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["smoke", *options.split()])
    assert end.value.code == 2 and message in capsys.readouterr().err


def test_a_last_value_that_is_not_finite_fails(tmp_path):
    (tmp_path / RUN).mkdir()
    for step, loss in enumerate((1.0, math.nan)):
        RunFiles(tmp_path / RUN).append_metrics(step, {"loss": loss, "train/grad_norm": math.inf})
    RunFiles(tmp_path / RUN).append_metrics(2, {"other": 1.0})
    gradient, loss, other = _check(tmp_path, [Expectation.parse(text) for text in ("loss < 5", "other == 1")])
    assert gradient.fault == "train/grad_norm is not a finite number in 2 of 2 steps"
    assert loss.fault == "loss is not a finite number in 1 of 2 steps" and other.fault is None


def test_a_report_that_cannot_be_written_is_one_error(line, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(smoke, "_run", lambda *arguments: (4, [CheckResult("the run ends", 1.0, "slow")]))
    with pytest.raises(SystemExit) as end:
        cli.main(["smoke", "--junit", str(tmp_path), "--", *line])
    ended = capsys.readouterr()
    assert end.value.code == 2 and "cannot be written (Is a directory)" in ended.err
    assert "FAILED  the run ends: slow" in ended.out


def test_a_run_that_takes_too_long_is_stopped(line, tmp_path, capsys):
    junit = tmp_path / "junit.xml"
    assert cli.main(["smoke", "--timeout", "1", "--junit", str(junit), "--expect", "a > 1", "--", *line]) == 4
    assert "FAILED  the run ends: it was stopped after 1 s (--timeout)" in capsys.readouterr().out
    assert ElementTree.parse(junit).getroot().get("failures") == "1", "nothing was measured, so nothing else is checked"


@pytest.mark.slow
def test_a_line_runs_and_its_metrics_are_checked(line, tmp_path, capsys):
    folder = tmp_path / "kept"
    saving = ["--save", "somewhere", "--save-hf", "elsewhere"]
    options = ["--folder", str(folder), "--timeout", "900", "--expect", "rollout/reward_errors == 0"]
    assert cli.main(["smoke", *options, "--expect", "rollout/reward > 5", "--", *line, *saving]) == 1
    output = capsys.readouterr().out
    for passed in ("the run ends", "a gradient arrives", "rollout/reward_errors == 0"):
        assert f"passed  {passed}\n" in output
    assert "FAILED  rollout/reward > 5: last(rollout/reward) is " in output
    assert (folder / "export" / "model.safetensors").is_file() and (folder / "checkpoints" / "iter_0000002").is_dir()


@pytest.mark.slow
def test_a_run_that_fails_has_a_status_of_its_own(line, tmp_path, monkeypatch, capsys):
    (tmp_path / "broken_reward.py").write_text("def score(samples):\n    raise KeyError('nothing')\n")
    monkeypatch.chdir(tmp_path)
    line[line.index("--rm-type") :] = ["--custom-rm-path", "broken_reward:score"]
    assert cli.main(["smoke", "--timeout", "900", "--", *line]) == 3
    ended = capsys.readouterr()
    assert "FAILED  the run ends: it ended with status 2" in ended.out
    assert "raised KeyError: 'nothing'" in ended.err, "the end of its log is shown"
