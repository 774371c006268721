"""``import miles`` is enough to check settings, to train with a function of one's own, and to read a run."""

import json
import os
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import miles
from miles.base.flags import FlagError
from miles.base.user_code import load_function
from miles.compat.border import read_command
from miles.config.parser import judge
from miles.tasks.rewards.built_in.f1 import f1
from tests.fast.config.conftest import minimal
from tests.fast.support.run_folder import write_run

REPO = Path(__file__).parents[2]
KEYWORDS = {
    "hf_checkpoint": "some/model",
    "prompt_data": "reasoning_gym:products",
    "num_rollout": 10,
    "rollout_batch_size": 8,
    "n_samples_per_prompt": 4,
    "rollout_max_response_len": 64,
}


def python(code, folder, **environment):
    """Run a script, as a user does, in another folder."""
    (folder / "script.py").write_text(code)
    path = os.pathsep.join([str(REPO), *environment.pop("path", [])])
    environ = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | environment
    return subprocess.run([sys.executable, "script.py"], cwd=folder, env=environ, capture_output=True, text=True)


def test_settings_by_name_are_those_of_the_flags(tmp_path):
    words = minimal("--lr 1e-5 --use-kl-loss --eval-prompt-data a hf:b --eval-interval 2 --num-experts 8")
    expected = judge(read_command(words)).settings
    more = {"lr": 1e-5, "use_kl_loss": True, "eval_prompt_data": {"a": "hf:b"}, "eval_interval": 2, "num_experts": 8}
    settings = miles.Settings.from_flags(**KEYWORDS, **more, rm_type="last_number", colocate=False, save=None)
    assert vars(settings) == vars(expected)
    assert vars(miles.Settings.from_flags(" ".join(words), lr=1e-5)) == vars(expected)
    (tmp_path / "run.yaml").write_text(settings.to_yaml())
    assert miles.Settings.from_yaml(tmp_path / "run.yaml") == settings
    assert miles.Settings.from_yaml(tmp_path / "run.yaml", use_kl_loss=False, lr=0.3).optimizer.lr == 0.3


def test_all_mistakes_are_reported_together():
    with pytest.raises(ValueError) as caught:
        miles.Settings.from_flags("--lr fast", **KEYWORDS, rolout_seed=3, colocate=2, rm_type="length")
    assert set(str(caught.value).splitlines()) == {
        "rolout_seed=3: no such setting; did you mean rollout_seed?",
        "colocate=2: is a switch; write true or false",
        "--lr fast: must be a number; correct the value",
    }


def test_the_hub_is_asked_about_its_models(monkeypatch):
    def refuse(model):
        raise FlagError(f"--hf-checkpoint {model.hf_checkpoint}: the hub has no such model; correct the name")

    monkeypatch.setattr("miles.config.parser.fetch_configs", refuse)
    with pytest.raises(ValueError, match="the hub has no such model"):
        miles.Settings.from_flags(minimal())


def test_flags_without_effect_are_a_warning():
    with pytest.warns(UserWarning, match="flags that were accepted:\n.*\n.*--distributed-backend nccl"):
        miles.Settings.from_flags("--distributed-backend nccl", **KEYWORDS, rm_type="length")


def test_a_reward_is_required_once():
    settings = miles.Settings.from_flags(**KEYWORDS)
    with pytest.raises(ValueError, match="^reward: responses must be scored; give miles.train a function"):
        miles.train(settings)
    with pytest.raises(ValueError, match="^reward: int is not a function"):
        miles.train(settings, reward=3)
    with pytest.raises(ValueError, match="^reward: the settings name a second one, length"):
        miles.train(miles.Settings.from_flags(**KEYWORDS, rm_type="length"), reward=f1)
    assert "custom_rm_path" not in settings.to_yaml()
    with pytest.raises(ValueError, match="^rehearse=True: miles.train does not rehearse"):
        miles.train(miles.Settings.from_flags(**KEYWORDS, rehearse=True), reward=f1)


def test_checking_settings_imports_neither_torch_nor_ray(tmp_path):
    code = f"import sys, miles\nmiles.explain(miles.Settings.from_flags(**{KEYWORDS!r}))\n"
    code += "sys.exit(str({'torch', 'ray', 'numpy', 'pandas'} & sys.modules.keys() or ''))"
    ended = python(code, tmp_path)
    assert ended.stderr.strip() == "", ended.stderr


def test_functions_reach_another_process(tmp_path):
    from miles.run.function_file import function_path

    assert function_path(f1, tmp_path, "reward") == "miles.tasks.rewards.built_in.f1:f1"
    bonus = 2.5
    added = function_path(lambda samples: [bonus for _ in samples], tmp_path, "reward")
    code = f"from miles.base.user_code import load_function\nprint(load_function({added!r}, '--x')([1, 2]))"
    assert python(code, tmp_path).stdout == "[2.5, 2.5]\n"
    lock = threading.Lock()
    with pytest.raises(ValueError, match="^reward lambda: cannot be sent to the process that runs it"):
        function_path(lambda samples: [lock for _ in samples], tmp_path, "reward")


def test_a_module_that_only_the_script_finds_is_sent_along(tmp_path):
    (tmp_path / "away").mkdir()
    (tmp_path / "away" / "only_here.py").write_text(
        "SCALE = 3\ndef scaled(samples):\n    return [SCALE for _ in samples]\n"
    )
    code = "import sys, pathlib\nsys.path.insert(0, 'away')\nimport only_here\n"
    code += "from miles.run.function_file import function_path\n"
    code += "print(function_path(only_here.scaled, pathlib.Path('.'), 'reward'))"
    path = python(code, tmp_path).stdout.strip()
    assert re.fullmatch(r"scaled-\w{12}\.pkl:scaled", path)
    ended = python(
        f"from miles.base.user_code import load_function\nprint(load_function({path!r}, '--x')([1]))", tmp_path
    )
    assert ended.stdout == "[3]\n", ended.stderr


def test_a_file_that_cannot_be_loaded_is_one_sentence(tmp_path):
    (tmp_path / "bad.pkl").write_bytes(b"not a pickle")
    with pytest.raises(ValueError, match=r"^--custom-rm-path .*bad.pkl:f: cannot be loaded in this process \("):
        load_function(f"{tmp_path}/bad.pkl:f", "--custom-rm-path")
    with pytest.raises(ValueError, match=r"none.pkl \(No such file or directory\); check the path"):
        load_function(f"{tmp_path}/none.pkl:f", "--custom-rm-path")


def test_signals_are_left_alone_in_other_threads():
    from miles.run.stop_requests import StopRequests

    with ThreadPoolExecutor(1) as pool:
        stop = StopRequests(1.0)
        assert pool.submit(lambda: stop.listening().__enter__()).result() is stop


def test_a_run_is_read_as_data_frames(tmp_path):
    run = miles.Run.open(write_run(tmp_path / "run", steps=40))
    metrics = run.metrics()
    assert list(metrics.index) == list(range(1, 41)) and metrics["eval/heldout/accuracy"].count() == 8
    assert metrics["rollout/reward"].iloc[-1] > metrics["rollout/reward"].iloc[0]
    samples = run.samples()
    assert len(samples) == 160 and {"prompt", "response", "reward", "rollout_id"} <= set(samples.columns)
    assert list(run.samples(7)["rollout_id"]) == [7] * 4 and run.samples(400).empty
    assert set(run.verdicts()["state"]) <= {"ok", "may fire", "no data", "unhealthy"}
    assert run.settings["optimizer"]["lr"] == 1e-5 and run.provenance == {}
    with pytest.raises(ValueError, match="--output-dir"):
        miles.Run.open(tmp_path)
    (tmp_path / "run.json").write_text('{"title": "miles", "newer": 1}')
    with pytest.raises(ValueError, match=r"run.json: cannot be read \(.*'newer'.*\); read it with the version"):
        miles.Run.open(tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_script_of_the_docs_trains(tmp_path, tiny_model):
    (code, *_) = re.findall(r"```python\n(.*?)```", (REPO / "docs" / "commands.md").read_text(), re.DOTALL)
    assert len([line for line in code.splitlines() if line]) <= 17
    for before, after in (
        ("HuggingFaceTB/SmolLM2-135M-Instruct", str(tiny_model)),
        ("--num-rollout 40", "--num-rollout 2"),
        ("batch-size 8", "batch-size 2"),
        ("run.metrics()", "import matplotlib; matplotlib.use('Agg'); run.metrics()"),
    ):
        assert before in code
        code = code.replace(before, after)
    code += "assert list(run.metrics().index)[-1] == 2 and len(run.samples()) == 32\n"
    code += "again = miles.Settings.from_yaml('outputs/python/run.yaml', output_dir='outputs/again')\n"
    code += "repeated = miles.train(again)\nassert len(repeated.samples(2)) == 16\n"
    code += "assert list(repeated.samples().response) == list(run.samples().response)\n"
    code += "def fails(samples):\n    raise KeyError('gold')\n"
    code += "try:\n    miles.train(settings, reward=fails)\n"
    code += "except Exception as error:\n    print('END', type(error).__name__, error)\n"
    ended = python(code, tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "KeyError" in ended.stdout.rpartition("END")[2]
    header = json.loads((tmp_path / "outputs/python/run.json").read_text())
    path = header["settings"]["reward"]["custom_rm_path"]
    assert re.fullmatch(r"outputs/python/last_number_is_right-\w{12}\.pkl:last_number_is_right", path)
