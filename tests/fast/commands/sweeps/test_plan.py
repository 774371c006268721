"""The commands of a sweep: a child's flags mean what was validated, and every error of every variant is reported."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from sweep_files import planned, write_sweep

from miles.base.flags import FlagError
from miles.commands.sweeps.definition import PlannedRun, plan, read_definition
from miles.compat.border import read_command
from miles.config.model import Fetched, ModelArguments
from miles.config.parser import judge
from miles.config.rules import check_one_process
from miles.config.run_file import run_config


def judged(run: PlannedRun, resumed: bool = False):
    words = run.resuming if resumed else run.words
    assert words is not None
    return judge(read_command(words)).settings


def test_the_words_of_a_child_mean_what_was_validated(tmp_path: Path) -> None:
    """Settings come from a file, words, common flags or a variant: lists, objects, SGLang's and Megatron's."""
    base = planned(tmp_path / "base", {"lr": "3e-5"})[1][0].settings
    (tmp_path / "base.yaml").write_text(run_config(base))
    flags = {
        "eval_prompt_data": ["held", "reasoning_gym:products"],
        "apply_chat_template_kwargs": {"enable_thinking": False},
        "use_kl_loss": True,
        "kl_loss_coef": "0.1",
    }
    definition, runs = planned(
        tmp_path,
        flags,
        config=str(tmp_path / "base.yaml"),
        variants={"a": {}, "b": {"use_kl_loss": None, "kl_loss_coef": None, "eps_clip_high": "0.28"}},
        seeds=["1", "2"],
    )
    assert [run.name for run in runs] == ["a seed 1", "b seed 1", "a seed 2", "b seed 2"]
    for run in runs:
        assert judged(run) == run.settings
        assert run.settings.optimizer.lr == 3e-5
        assert (run.settings.training.seed, run.settings.data.rollout_seed) == (run.seed, run.seed)
        assert run.settings.tracking.output_dir == str(run.folder)
        assert run.settings.loss.use_kl_loss == (run.variant == "a")
    assert len({run.folder for run in runs}) == 4


def test_a_variant_with_an_offset_has_other_seeds_and_the_same_pairs(tmp_path: Path) -> None:
    _, runs = planned(tmp_path, variants={"a": {}, "noise": {"seed_offset": "100"}}, seeds=["1", "2"])
    assert [(run.variant, run.seed, run.settings.training.seed) for run in runs] == [
        ("a", 1, 1),
        ("noise", 1, 101),
        ("a", 2, 2),
        ("noise", 2, 102),
    ]


def test_a_run_saves_in_its_own_folder_and_resumes_from_there(tmp_path: Path) -> None:
    start = {
        "save": "anywhere",
        "save_hf": "x/{iteration}",
        "load": "pretrained",
        "finetune": True,
        "no_load_rng": True,
    }
    (run,) = planned(tmp_path, start)[1]
    checkpoint, resumed = run.settings.checkpoint, judged(run, resumed=True).checkpoint
    assert (checkpoint.load, checkpoint.finetune, checkpoint.no_load_rng) == ("pretrained", True, True)
    assert (resumed.load, resumed.finetune, resumed.no_load_rng) == (resumed.save, False, False)
    assert checkpoint.save == resumed.save == str(run.folder / "checkpoints")
    assert checkpoint.save_hf == str(run.folder / "hf" / "{iteration}")
    assert planned(tmp_path / "other")[1][0].resuming is None
    urls = {"save": "memory://bucket/all/", "save_hf": "memory://bucket/hf", "storage_options": "{}"}
    (run,) = planned(tmp_path / "remote", urls)[1]
    own = f"{run.variant}/seed-{run.seed}"
    assert run.settings.checkpoint.save == f"memory://bucket/all/{own}"
    assert run.settings.checkpoint.save_hf == f"memory://bucket/hf/{own}"


def test_results_do_not_depend_on_the_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of ranks is 1 on CPU unless the file states more; by default it follows the cores of the process."""
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(16)))
    assert planned(tmp_path)[1][0].settings.cluster.actor_num_gpus_per_node == 1
    run = planned(tmp_path / "given", {"actor_num_gpus_per_node": "2"})[1][0]
    assert run.settings.cluster.actor_num_gpus_per_node == 2
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0})
    assert judged(planned(tmp_path)[1][0]).cluster.actor_num_gpus_per_node == 1


def test_the_errors_of_all_variants_are_told_at_once_and_once(tmp_path: Path) -> None:
    with pytest.raises(FlagError) as refused:
        planned(
            tmp_path,
            {"num_rollout": "0", "report_port": "8600"},
            variants={"a": {}, "b": {"lr": "fast"}, "c": {"lr": "fast", "no_such_flag": "1"}},
            seeds="2",
        )
    told = sorted(refused.value.messages)
    assert [message.partition(":")[0] for message in told] == ["all variants", "all variants", "b; c", "c"]
    for message, part in zip(told, ("--num-rollout 0", "--report-port 8600", "--lr fast", "no_such_flag"), strict=True):
        assert part in message


def test_the_hub_is_asked_once_about_each_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def fetch(model: ModelArguments) -> Fetched:
        asked.append(model.hf_checkpoint)
        if model.hf_checkpoint == "of/none":
            raise FlagError("--hf-checkpoint of/none: the hub has no such model; correct the name")
        return Fetched(True, ())

    monkeypatch.setattr("miles.commands.sweeps.definition.fetch_configs", fetch)
    variants = {"a": {"lr": 1e-5}, "b": {"lr": 1e-6}, "c": {"hf_checkpoint": "of/none"}}
    with pytest.raises(FlagError) as caught:
        planned(tmp_path, variants=variants, seeds=[1, 2])
    assert caught.value.messages == ("c: --hf-checkpoint of/none: the hub has no such model; correct the name",)
    assert asked == ["some/model", "of/none"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"report_port": "8600"}, "--report-port 8600: two runs at once cannot have one port; give 0"),
        ({"save_debug_rollout_data": "x/{iteration}"}, "--save-debug-rollout-data x/{iteration}: all runs would write"),
        ({"rehearse": True}, "--rehearse: a sweep trains; drop it, and run miles rehearse"),
    ],
)
def test_what_runs_cannot_share_is_refused(tmp_path: Path, flags: dict[str, object], message: str) -> None:
    with pytest.raises(FlagError) as refused:
        planned(tmp_path, flags)
    assert any(message in told for told in refused.value.messages)


def test_a_file_that_wins_over_the_command_may_not_set_the_folder(tmp_path: Path) -> None:
    (tmp_path / "custom.yaml").write_text("output_dir: elsewhere\n")
    with pytest.raises(FlagError, match="sets one of --seed, --rollout-seed, --output-dir"):
        planned(tmp_path, {"custom_config_path": str(tmp_path / "custom.yaml")})


def test_what_a_run_in_one_process_cannot_do_is_refused_for_each_variant(tmp_path: Path) -> None:
    variants = {
        "small": {},
        "served": {"rollout_engine": "sglang"},
        "saved": {"save": "x", "save_interval": "1"},
        "ranks": {"actor_num_gpus_per_node": "2"},
        "profiled": {"profile": True},
    }
    definition = read_definition(write_sweep(tmp_path, variants=variants))
    with pytest.raises(FlagError) as refused:
        plan(definition, tmp_path / "out", check_one_process)
    assert [message.split(": a run in one process")[0] for message in refused.value.messages] == [
        "served: --rollout-engine sglang",
        f"saved: --save {tmp_path}/out/saved/seed-1/checkpoints",
        "ranks: --actor-num-gpus-per-node",
        "profiled: --profile",
    ]
    assert [
        run.variant for run in plan(replace(definition, variants=definition.variants[:1]), tmp_path, check_one_process)
    ]
