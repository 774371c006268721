"""Flags of related launchers that are no setting here, apart from those of Megatron and SGLang."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miles.compat.launch.foreign import by_flag, noted, refused
from miles.compat.launch.multi_turn import MULTI_TURN_FLAGS
from miles.config.notes import FILES, MEMORY, REPORTING, SAME, SPEED
from miles.config.settings import Settings


def _has_no_advantages(settings: Settings, given: Mapping[str, Any]) -> bool:
    return not settings.loss.type.uses_advantages


def _samples_teacher_tokens(settings: Settings, given: Mapping[str, Any]) -> bool:
    return str(given.get("--opd-log-prob-top-k", "0")) == "0"


def _evaluates_the_same_key(settings: Settings, given: Mapping[str, Any]) -> bool:
    return str(given["--eval-reward-key"]) == settings.reward.reward_key


def _shares_gpus(settings: Settings, given: Mapping[str, Any]) -> bool:
    return settings.cluster.colocate


def _keeps_tokens(settings: Settings, given: Mapping[str, Any]) -> bool:
    paths = [path for flag in _MIDDLEWARE for path in given.get(flag.split()[0], ())]
    return all(path.rpartition(".")[2] == "RadixTreeMiddleware" for path in paths)


def _has_adapter(settings: Settings, given: Mapping[str, Any]) -> bool:
    return settings.lora.trains_adapter


def _has_no_adapter(settings: Settings, given: Mapping[str, Any]) -> bool:
    return not settings.lora.trains_adapter


CKPT_STEP = "--ckpt-step"  # normalize.py reads it together with --load
_MIDDLEWARE = ("--slime-router-middleware-paths V...", "--miles-router-middleware-paths V...")
_PLUMBING = [
    *noted(
        SPEED,
        "weights are sent in chunks of a size of their own",
        "--update-weight-buffer-size V",
        "--update-weights-bucket-size V",
        "--update-weight-encoding V",
    ),
    *noted(SPEED, "packed tokens need no padding", "--data-pad-size-multiplier V"),
    *noted(SPEED, "log-probs are scored in the micro-batches of the step", "--log-probs-max-tokens-per-gpu V"),
    *noted(
        SPEED,
        "the backend chooses its attention",
        "--attn-implementation V",
        "--allgather-cp",
        "--dsa-attention-backend V",
    ),
    *noted(
        MEMORY,
        "the trainer keeps what it has on its device, or in host memory with --offload-train",
        "--train-memory-margin-bytes V",
        "--offload-train-disk-dir V",
        "--offload-train-target V",
        "--rematerialize-param-from-master-weight",
        "--fsdp-cpu-offload",
        "--fsdp-cpu-backend V",
        "--fsdp-state-dict-cpu-offload",
        "--disable-weights-backuper",
    ),
    *noted(SAME, "the prompts and their position belong to the run and its checkpoints", "--rollout-global-dataset"),
    *noted(
        SAME,
        "requests go through sglang-router, with two or more engines",
        "--use-miles-router",
        "--use-slime-router",
    ),
    *refused(
        "functions between the run and its engines are not called",
        "drop it; --custom-generate-function-path names a function that generates",
        *_MIDDLEWARE,
        accepted_if=_keeps_tokens,
        accepted_why="token ids of earlier turns are kept without it",
    ),
    *noted(
        SPEED,
        "every engine receives all weights",
        "--update-weight-mode V",
        "--delta-compression V",
        "--delta-full-interval V",
    ),
    *noted(SAME, "engines receive the weights themselves, which is more exact", "--delta-dtype V"),
    *noted(SPEED, "every weight is divided over all ranks", "--dp-replicate-size V"),
    *noted(SAME, "Ray knows the devices of each node", "--rollout-num-gpus-per-node V"),
    *noted(SAME, "engines see and return token ids", "--rollout-skip-special-tokens"),
    *noted(SAME, "a server's health is checked from when it is ready", "--rollout-health-check-first-wait V"),
    *refused(
        "memory is released where trainer and engines share GPUs",
        "add --colocate, or drop it",
        "--offload",
        accepted_if=_shares_gpus,
        accepted_why="--colocate does it",
    ),
    *noted(SAME, "gloo on CPU, nccl on CUDA", "--distributed-backend V"),
]
_REPORTING = [
    *noted(
        REPORTING,
        "use --save-debug-rollout-data for samples, and --output-dir for metrics",
        "--dump-details V",
        "--save-debug-train-data V",
        "--log-reward-category V",
        "--log-multi-turn",
        "--log-correct-samples",
    ),
    *noted(REPORTING, "metrics are in --output-dir", "--use-miles-dashboard"),
    *noted(
        REPORTING,
        "TensorBoard files are in --output-dir",
        "--use-tensorboard",
        "--tb-project-name V",
        "--tb-experiment-name V",
    ),
    *noted(
        REPORTING,
        "every metric has the optimizer step as its step",
        "--wandb-always-use-train-step",
    ),
    *noted(
        REPORTING,
        "a profile has all of an iteration",
        "--profile-target V...",
    ),
    *noted(
        REPORTING,
        "allocations are not recorded",
        "--record-memory-history",
        "--memory-snapshot-path V",
        "--memory-snapshot-dir V",
    ),
]
_DATA = [
    *noted(
        SAME,
        "the chat template says which tokens each message of a conversation has (--sft-roles)",
        "--loss-mask-type V",
    ),
    *refused(
        "images and audio are not trained on in this version",
        "drop it, and train on the text columns",
        "--multimodal-keys V",
    ),
]
_ROLLOUT = [
    *noted(
        SPEED,
        "engines of the run evaluate, with the weights of the iteration",
        "--eval-num-gpus V",
        "--eval-num-gpus-per-engine V",
        "--eval-hf-dir V",
        "--eval-keep-snapshots V",
    ),
    *refused(
        "the reward of evaluation has the key of --reward-key",
        "give it as --reward-key, or score with --eval-function-path",
        "--eval-reward-key V",
        accepted_if=_evaluates_the_same_key,
        accepted_why="it is that of --reward-key",
    ),
    *refused(
        "an agent is a program or an environment here, and not a function",
        "use --agent-command or --environment (docs/agents.md)",
        "--custom-agent-function-path V",
    ),
    *noted(SAME, "the calls of an agent are recorded as tokens, with any model", "--tito-model V"),
    *refused(
        "the chat template is that of the tokenizer in --hf-checkpoint",
        "drop it, or save the template in that folder as chat_template.jinja",
        "--chat-template-path V",
    ),
    *refused(
        "weights are sent after every iteration",
        "drop it; with --async-steps N, answers come from weights of up to N iterations before",
        "--update-weights-interval V",
        neutral=("1",),
    ),
    *noted(
        SAME,
        "the reward function is called with all samples of a group at once (with --reward-error value or drop, failed "
        "samples are left out, and after an error each sample is scored alone)",
        "--group-rm",
    ),
]
_HOOKS = [
    *refused(
        "models are built from --hf-checkpoint",
        "drop it; --train-backend fsdp builds every model that transformers has",
        "--custom-model-provider-path V",
        "--custom-megatron-init-path V",
        "--custom-megatron-before-log-prob-hook-path V",
        "--custom-megatron-before-train-step-hook-path V",
    ),
]
_OBJECTIVE = [
    *refused(
        "the KL to the teacher is estimated from the sampled tokens",
        "drop it",
        "--opd-log-prob-top-k V",
        neutral=("0",),
    ),
    *refused(
        "the KL to the teacher is estimated from the sampled tokens",
        "drop it",
        "--opd-reward-weight-mode V",
        "--opd-top-k-strategy V",
        accepted_if=_samples_teacher_tokens,
        accepted_why="without --opd-log-prob-top-k",
    ),
    *refused(
        "advantages are part of the policy loss",
        "drop it, or use --loss-type sft_loss",
        "--disable-compute-advantages-and-returns",
        accepted_if=_has_no_advantages,
        accepted_why="this --loss-type has no advantages",
    ),
]
_ADAPTERS = [
    *refused(
        "an adapter is trained with --lora-rank",
        "add --lora-rank N, or drop it",
        "--use-lora",
        accepted_if=_has_adapter,
        accepted_why="--lora-rank says it",
    ),
    *refused(
        "--target-modules names the layers that have an adapter",
        "give --target-modules all-linear, the layers of attention and dense MLPs",
        "--lora-target-preset V",
    ),
    *refused("adapters have the optimizer of the run", "give it as --lr", "--lora-learning-rate V"),
    *refused("adapters have the optimizer of the run", "give it as --weight-decay", "--lora-weight-decay V"),
    *noted(FILES, "each checkpoint in --save has the adapter in peft's format", "--save-lora V"),
    *noted(MEMORY, "engines receive the weights with the adapter added to them", "--lora-base-cpu-backup"),
    *refused(
        "a run starts with a new adapter",
        "add the adapter to its model with peft (merge_and_unload), and give that model as --hf-checkpoint",
        "--lora-adapter-path V",
        "--lora-load V",
    ),
    *refused(
        "the weights of experts get no adapter in this version",
        "drop it",
        "--experts-shared-outer-loras",
        accepted_if=_has_no_adapter,
        accepted_why="without --lora-rank",
    ),
]
_CHECKPOINTS = [
    *refused("the newest checkpoint of a folder is loaded", "give the whole number of a checkpoint", CKPT_STEP + " V"),
    *noted(FILES, "a checkpoint always holds all that its run needs to resume", "--no-save-optim", "--no-save-rng"),
    *noted(
        FILES,
        "checkpoints are written by the run itself",
        "--ckpt-format V",
        "--dist-ckpt-strictness V",
        "--use-persistent-ckpt-worker",
    ),
]

LAUNCHER_FLAGS = by_flag(
    [*MULTI_TURN_FLAGS, *_PLUMBING, *_REPORTING, *_DATA, *_ROLLOUT, *_HOOKS, *_OBJECTIVE, *_ADAPTERS, *_CHECKPOINTS]
)
