"""Flags without effect are accepted with a note, change nothing, and are refused by --strict-flags."""

import dataclasses
import json
import shlex
from pathlib import Path

import pytest
import yaml

from miles.base.flags import FlagError, flag_name
from miles.compat.border import read_command
from miles.config.megatron import rules as normalize
from miles.config.needs import CONDITIONS, read_needs
from miles.config.parser import judge
from miles.config.settings import SECTIONS
from miles.objective.estimators import ESTIMATORS
from miles.objective.settings import LossArguments
from miles.tasks.rewards.settings import RewardArguments
from tests.fast.config.conftest import QWEN3
from tests.fast.support.rows import rows

DYNAMIC = "--use-dynamic-batch-size --max-tokens-per-gpu 100"
SAVED = "--load-debug-rollout-data saved_{rollout_id}.jsonl"
SGLANG = "--rollout-engine sglang --actor-num-gpus-per-node 2"


# flags, and the same command without those that have no effect
CASES = [
    ("--kl-loss-coef 0.001 --kl-loss-type k3", ""),
    (f"{SGLANG} --colocate --rollout-num-gpus 4", f"{SGLANG} --colocate"),
    ("--ref-load nowhere_torch_dist", ""),
    ("--ref-update-interval 5", ""),
    ("--rm-type math --custom-rm-path my:reward", "--custom-rm-path my:reward"),
    ("--rm-url http://host/reward", ""),
    ("--gamma 0.9 --lambd 0.9 --value-clip 0.3 --opsm-delta 0.1", ""),
    ("--critic-lr 1e-5 --critic-lr-warmup-iters 3 --num-critic-only-steps 2", ""),
    ("--advantage-estimator rloo --disable-grpo-std-normalization", "--advantage-estimator rloo"),
    ("--max-tokens-per-gpu 100", ""),
    (f"--debug-train-only {SAVED} --async-steps 1", f"--debug-train-only {SAVED}"),
    ("--tito-model qwen3", ""),
    ("--grad-reduce-in-bf16 --train-backend megatron", "--train-backend megatron"),
    ("--eval-num-gpus 1 --eval-num-gpus-per-engine 1 --eval-hf-dir folder --eval-keep-snapshots 2", ""),
    (
        "--use-dynamic-batch-size --max-tokens-per-gpu 100 --micro-batch-size 2",
        "--use-dynamic-batch-size --max-tokens-per-gpu 100",
    ),
    ("--num-epoch 3", ""),
    ("--over-sampling-batch-size 64", ""),
    ("--eval-interval 5 --eval-top-p 0.7", ""),
    ("--eval-prompt-data a b --n-samples-per-eval-prompt 4", ""),
    ("--save-interval 3 --save-retain-interval 6", ""),
    ("--finetune --no-load-optim --no-load-rng", ""),
    ("--wandb-project p --wandb-key k --disable-wandb-random-suffix", ""),
    ("--wandb-mode offline --wandb-dir folder", ""),
    ("--lr-decay-style constant --min-lr 1e-8 --lr-decay-iters 10", "--lr-decay-style constant"),
    ("--lr-warmup-fraction 0.1 --lr-warmup-iters 9", "--lr-warmup-fraction 0.1"),
    ("--apply-chat-template-kwargs {}", ""),
    ("--use-persistent-ckpt-worker --ckpt-step 4 --dp-replicate-size 2", ""),
    ("--miles-router-middleware-paths a.hub.radix_tree_middleware.RadixTreeMiddleware", ""),
    ("--update-weight-mode delta --delta-compression sparse --delta-dtype fp32 --delta-full-interval 30", ""),
    ("--rollout-num-gpus-per-node 8 --log-sft-entropy", ""),
    ("--lora-rank 4 --save-lora adapters", "--lora-rank 4"),
    ("--tis-clip 3 --tis-clip-low 0.5", ""),
    ("--reward-key r", ""),
    ("--no-offload-train --offload-rollout", ""),
    (f"{SGLANG} --colocate --device cpu --offload-rollout", f"{SGLANG} --colocate --device cpu"),
    ("--rollout-engine torch --rollout-num-gpus 8", ""),
    ("--rollout-engine torch --update-weight-disk-dir folder", ""),
    (f"{SGLANG} --update-weight-disk-dir folder --update-weight-copy-dir copy", SGLANG),
    (
        f"{SGLANG} --update-weight-transfer-mode disk --update-weight-copy-dir copy",
        f"{SGLANG} --update-weight-transfer-mode disk",
    ),
    ("--use-unbiased-kl", ""),
    ("--use-unbiased-kl --kl-loss-coef 0.1", ""),
    ("--use-unbiased-kl --use-kl-loss", "--use-kl-loss"),
    ("--mask-offpolicy-in-partial-rollout", ""),
    ("--advantage-estimator rloo --disable-rewards-normalization", "--advantage-estimator rloo"),
    ("--gpg-scale rewards --otb-zero-tail --pass-k 3 --pass-correct-above 0.5 --passk-best-std", ""),
    ("--critic-lambd 0.9 --vapo-alpha 0.1", ""),
    ("--rollout-engine torch --rollout-num-gpus-per-engine 4 --sglang-server-concurrency 3", ""),
    (f"{SGLANG} --torch-engine-max-batch-size 3", SGLANG),
    ("--train-backend fsdp --tensor-model-parallel-size 2 --sequence-parallel", "--train-backend fsdp"),
    ("--train-backend megatron --sequence-parallel", "--train-backend megatron"),
    ("--train-backend megatron --moe-router-load-balancing-type seq_aux_loss", "--train-backend megatron"),
    ("--train-backend megatron --mtp-num-layers 1", "--train-backend megatron"),
    ("--rollout-engine torch --sglang-cuda-graph-bs 1 2 --router-policy random", ""),
    (f"{SGLANG} --sglang-tp-size 4", SGLANG),
    (f"{SGLANG} --num-gpus-per-node 8", SGLANG),
    (f"{SGLANG} --router-policy random", SGLANG),
    ("--train-backend megatron --attention-backend flash --moe-permute-fusion", "--train-backend megatron"),
    (
        "--train-backend megatron --device cpu --optimizer-cpu-offload --use-precision-aware-optimizer",
        "--train-backend megatron --device cpu",
    ),
    ("--train-backend megatron --overlap-cpu-optimizer-d2h-h2d --exp-avg-dtype fp32", "--train-backend megatron"),
    ("--train-backend fsdp --optimizer-cpu-offload", "--train-backend fsdp"),
    ("--train-backend megatron --num-layers-per-virtual-pipeline-stage 2", "--train-backend megatron"),
    ("--train-backend megatron --recompute-method uniform --recompute-num-layers 1", "--train-backend megatron"),
    (
        "--train-backend megatron --recompute-granularity selective",
        "--train-backend megatron --recompute-granularity full",
    ),
    ("--train-backend megatron --moe-token-drop-policy probs --fp8-recipe delayed", "--train-backend megatron"),
    ("--train-backend fsdp --num-layers 4 --attention-backend flash --moe-router-dtype fp32", "--train-backend fsdp"),
    ("--debug-rollout-only --save x --save-interval 3 --max-restarts 2 --async-steps 1", "--debug-rollout-only"),
    (f"--debug-train-only {SAVED} --eval-prompt-data a b --eval-interval 2", f"--debug-train-only {SAVED}"),
    ("--use-dynamic-global-batch-size --global-batch-size 8", "--use-dynamic-global-batch-size"),
    ("--loss-type sft_loss --n-samples-per-prompt 1 --rm-type math", "--loss-type sft_loss --n-samples-per-prompt 1"),
    ("--train-backend megatron --decoder-last-pipeline-num-layers 3", "--train-backend megatron"),
    ("--lora-rank 0 --lora-alpha 32", ""),
    ("--buffer-filter-path my:pick", ""),
    ("--opd-kl-coef 0.5 --opd-teacher-load some/teacher", ""),
]


WHOLE = "--train-backend fsdp --actor-num-gpus-per-node 2 --context-parallel-size 2"


@pytest.mark.parametrize("kind", ["glm_moe_dsa", "nemotron_h"])
def test_layers_that_need_whole_sequences_share_none(accepted, tmp_path, kind):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3 | {"model_type": kind}))
    validated = accepted(f"--hf-checkpoint {tmp_path} {WHOLE}")
    assert validated.settings.parallel.context_parallel_size == 1
    assert any("whole sequences" in note.why for note in validated.accepted)


@pytest.mark.parametrize("granularity", ["full", "selective"])
def test_fsdp_recomputes_the_layers_that_megatron_would(accepted, granularity):
    validated = accepted(f"--train-backend fsdp --recompute-granularity {granularity} --recompute-method uniform")
    assert validated.settings.training.gradient_checkpointing
    assert any("--gradient-checkpointing" in note.why for note in validated.accepted)


def test_other_layers_share_sequences(accepted, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    assert accepted(f"--hf-checkpoint {tmp_path} {WHOLE}").settings.parallel.context_parallel_size == 2


@pytest.mark.parametrize(("flags", "the_rest"), CASES, ids=[flags for flags, _ in CASES])
def test_noted_and_without_effect(accepted, refusals, flags, the_rest, tmp_path, monkeypatch):
    (tmp_path / "saved_0.jsonl").touch()
    monkeypatch.chdir(tmp_path)
    validated = accepted(flags)
    assert validated.accepted
    assert validated.settings == accepted(the_rest).settings
    for message in refusals(f"{flags} --strict-flags"):
        assert "has no effect" in message and "drop --strict-flags" in message


def test_a_flag_of_another_that_has_no_effect_is_not_told_that_it_is_missing(accepted):
    notes = accepted("--debug-rollout-only --save folder --save-interval 2").accepted
    assert {note.written: note.why for note in notes}["--save-interval 2"] == "--save has no effect"


def test_the_function_is_the_reward_unless_both_are_weighed(accepted):
    assert accepted("--custom-rm-path my:reward").settings.reward.rm_type is None
    both = accepted("--rm-type math:1,custom:0.5 --custom-rm-path my:reward").settings.reward
    assert both.weights == {"math": 1.0, "custom": 0.5}


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_what_another_estimator_reads_is_noted_unless_another_flag_has_its_effect(accepted, refusals, estimator):
    flags = f"--advantage-estimator {estimator} --normalize-advantages"
    unread = [name for name in ESTIMATORS.reads if name not in ESTIMATORS[estimator].reads]
    for name in unread:
        default = getattr(LossArguments(), name)
        word = "" if isinstance(default, bool) else {"gpg_scale": "rewards", "pass_k": "3"}.get(name, "0.7")
        all_flags = f"{flags} {flag_name(name)} {word}"
        if name in ESTIMATORS[estimator].instead:
            assert any(ESTIMATORS[estimator].instead[name] in message for message in refusals(all_flags))
        else:
            (note,) = (note for note in accepted(all_flags).accepted if note.written.split()[0] == flag_name(name))
            assert all(reader in note.why for reader in ESTIMATORS.readers(name))


@pytest.mark.parametrize("mode", ["disk", "disk-delta"])
def test_the_folder_of_weight_files_is_kept_where_they_are_written(accepted, mode):
    flags = f"{SGLANG} --update-weight-transfer-mode {mode} --update-weight-disk-dir folder"
    assert accepted(flags).settings.sglang.update_weight_disk_dir == "folder"


def test_a_reward_is_named_also_in_a_list_that_is_wrong():
    assert RewardArguments(rm_type="math:1, remote_rm:0.5").names("remote_rm")
    assert RewardArguments(rm_type="nothing:x,remote_rm").names("remote_rm")
    assert not RewardArguments(rm_type="remote_rms").names("remote_rm")
    assert not RewardArguments().names("remote_rm")


# The flags that were errors only because they had no effect, by the command that they are added to.
WITHOUT_EFFECT = yaml.safe_load(Path(__file__).with_name("without_effect.yaml").read_text())


@pytest.fixture
def example(tmp_path, monkeypatch):
    """The folder that the commands of the file start in."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.jsonl").write_text('{"input": "a", "label": "b"}\n')
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    (tmp_path / "conversations.jsonl").write_text(json.dumps({"input": messages}) + "\n")
    for name in ("saved.jsonl", "file.yaml"):
        (tmp_path / name).touch()


@pytest.mark.parametrize("name", WITHOUT_EFFECT)
def test_what_has_no_effect_is_a_note_and_an_error_if_strict(example, name):
    command = shlex.split(WITHOUT_EFFECT[name]["command"])
    plain = judge(read_command(command)).settings
    for flags in WITHOUT_EFFECT[name]["flags"]:
        words = [*command, *shlex.split(flags)]
        validated = judge(read_command(words))
        noted = {note.written.split()[0] for note in validated.accepted if note.is_refused_if_strict}
        assert noted, flags
        if flags.split()[0] in noted:  # else it is the flag in effect, which leaves others without one
            assert validated.settings == plain, flags
        with pytest.raises(FlagError, match="has no effect"):
            judge(read_command([*words, "--strict-flags"]))


def test_every_condition_can_be_read_and_is_used():
    declared = {part for section in SECTIONS.values() for field in dataclasses.fields(section) for part in parts(field)}
    assert {*CONDITIONS} <= declared
    assert all(condition.why for part in declared for condition in read_needs(part))
    with pytest.raises(ValueError, match="neither a flag nor one of a trainer"):
        read_needs("--no-such-flag")


def parts(field: dataclasses.Field) -> list[str]:
    """The conditions of a flag, and each of their alternatives."""
    whole = field.metadata.get("needs", "").split(", ") if "needs" in field.metadata else []
    return [*whole, *(one for part in whole if part not in CONDITIONS for one in part.split(" or "))]


def test_a_flag_that_only_another_without_effect_would_make_useless_is_kept(accepted):
    """``--prompt-mix`` has no effect on conversations, so ``--prompt-data`` has one."""
    mix = "--loss-type sft_loss --n-samples-per-prompt 1 --prompt-mix a reasoning_gym:products"
    validated = accepted(mix, without="--rm-type")
    assert validated.settings.data.prompt_data and not validated.settings.data.prompt_mix


@pytest.mark.parametrize(
    "flags",
    [
        "--wandb-key s3cret",
        "--wandb-key s3cret --wandb-key other --use-wandb",
        '--train-env-vars {"A":"s3cret","B":1}',
        "--rollout-engine torch --sglang-api-key s3cret",
    ],
)
def test_no_secret_is_shown(accepted, flags):
    (note,) = accepted(flags).accepted
    assert "s3cret" not in note.written + note.why


@pytest.mark.parametrize("flags", rows(__file__, "test_what_would_change_the_result_is_refused"))
def test_what_would_change_the_result_is_refused(refusals, flags):
    (message,) = refusals(flags)
    assert message.split()[0].rstrip(":") == [word for word in flags.split() if word.startswith("--")][-1]


def test_the_same_flag_is_judged_by_the_run(accepted, refusals, tmp_path, monkeypatch):
    (tmp_path / "saved_0.jsonl").touch()
    monkeypatch.chdir(tmp_path)
    assert accepted(f"--disable-compute-advantages-and-returns --loss-type sft_loss {SAVED}", "--rm-type")
    assert refusals("--disable-compute-advantages-and-returns")
    assert accepted("--experts-shared-outer-loras")
    (message,) = refusals("--experts-shared-outer-loras --lora-rank 8 --train-backend fsdp")
    assert message.startswith("--experts-shared-outer-loras: ")


def test_a_converted_copy_of_the_model_is_the_model(accepted, refusals):
    kl = "--use-kl-loss --kl-loss-coef 0.1 --ref-load"
    assert accepted(f"{kl} ./copies/model_torch_dist").settings.model.ref_load is None
    assert accepted(f"{kl} other/model").settings.model.ref_load == "other/model"
    (message,) = refusals(f"{kl} ./copies/teacher_torch_dist")
    assert "which is not read here; give the Hugging Face folder that it was made from, or drop it" in message


def test_megatron_bridge_is_read_as_our_converter_where_that_is_the_same(accepted, refusals, monkeypatch, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3 | {"architectures": ["Qwen3ForCausalLM"]}))
    flags = f"--train-backend megatron --megatron-to-hf-mode bridge --hf-checkpoint {tmp_path}"
    for fault, further, mode in (("is missing", "", "raw"), (None, "", "bridge"), (None, "--lora-rank 8", "raw")):
        with monkeypatch.context() as patched:
            patched.setattr(normalize, "fault_of_bridge", lambda fault=fault: fault)
            validated = accepted(f"{flags} {further}", without="--hf-checkpoint")
        assert validated.settings.megatron.megatron_to_hf_mode == mode
        assert any("--megatron-to-hf-mode bridge" in note.written for note in validated.accepted) == (mode == "raw")
    (tmp_path / "config.json").write_text(json.dumps(QWEN3 | {"model_type": "mistral"}))
    errors = refusals(flags, without="--hf-checkpoint")
    assert any(message.startswith("--megatron-to-hf-mode bridge: needs megatron-bridge") for message in errors)
