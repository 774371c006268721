"""Arguments of Megatron's own training program, which launch scripts give and which are no setting here.

None of them chooses the backend: scripts that give them have others that do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miles.compat.launch.foreign import by_flag, noted, refused
from miles.config.abilities import reads_megatron_flags
from miles.config.checkpoint import first_iteration
from miles.config.notes import FILES, MEMORY, NO_EFFECT, REPORTING, SAME, SPEED
from miles.config.settings import Settings


def _loads_nothing(settings: Settings, given: Mapping[str, Any]) -> bool:
    return settings.checkpoint.load is None


def _has_checkpoint(settings: Settings, given: Mapping[str, Any]) -> bool:
    return settings.checkpoint.load is None or first_iteration(settings.checkpoint) not in (None, 0)


def _divides_weights(settings: Settings, given: Mapping[str, Any]) -> bool:
    return not reads_megatron_flags(settings)


def _is_weight_decay(flag: str, settings: Settings, given: Mapping[str, Any]) -> bool:
    try:
        return float(given[flag]) == settings.optimizer.weight_decay
    except ValueError:
        return False


def _starts_at_weight_decay(settings: Settings, given: Mapping[str, Any]) -> bool:
    return _is_weight_decay("--start-weight-decay", settings, given)


def _ends_at_weight_decay(settings: Settings, given: Mapping[str, Any]) -> bool:
    return _is_weight_decay("--end-weight-decay", settings, given)


_ONE_WEIGHT_DECAY = ("weight decay is the same in every step", "give it as --weight-decay")
_IS_WEIGHT_DECAY = "it is that of --weight-decay"
_SCHEDULE = [
    *noted(
        SAME,
        "the schedule is that of the command, and continues at the step of the checkpoint",
        "--override-opt_param-scheduler",
        "--override-opt-param-scheduler",
    ),
    *refused(
        "the schedule is that of the command, also after a checkpoint",
        "drop it, and give the schedule of the run that wrote the checkpoint",
        "--use-checkpoint-opt_param-scheduler",
        "--use-checkpoint-opt-param-scheduler",
        accepted_if=_loads_nothing,
        accepted_why="without --load",
    ),
    *refused(
        "the warm-up is counted in optimizer steps",
        "give it as --lr-warmup-iters: these samples over those of a step (--global-batch-size)",
        "--lr-warmup-samples V",
        neutral=("0",),
    ),
    *refused("the warm-up begins at 0", "drop it", "--lr-warmup-init V", neutral=("0", "0.0")),
    *refused(
        "the decay is counted in optimizer steps",
        "give it as --lr-decay-iters: these samples over those of a step (--global-batch-size)",
        "--lr-decay-samples V",
    ),
    *noted(
        NO_EFFECT,
        "--lr-decay-style WSD, which is not part of this version, reads it",
        "--lr-wsd-decay-style V",
        "--lr-wsd-decay-iters V",
        "--lr-wsd-decay-samples V",
    ),
    *refused(
        *_ONE_WEIGHT_DECAY,
        "--start-weight-decay V",
        accepted_if=_starts_at_weight_decay,
        accepted_why=_IS_WEIGHT_DECAY,
    ),
    *refused(
        *_ONE_WEIGHT_DECAY, "--end-weight-decay V", accepted_if=_ends_at_weight_decay, accepted_why=_IS_WEIGHT_DECAY
    ),
    *refused(*_ONE_WEIGHT_DECAY, "--weight-decay-incr-style V", neutral=("constant",)),
    *refused("only matrices have weight decay", "drop it", "--no-weight-decay-cond-type V"),
    *noted(NO_EFFECT, "the optimizer is AdamW, which has no such setting", "--muon-split-qkv", "--muon-no-split-qkv"),
]
_LENGTH = [
    *noted(
        NO_EFFECT,
        "a run ends after --num-rollout iterations, here and in launchers that are built on Megatron",
        "--train-iters V",
        "--train-samples V",
    ),
    *refused(
        "a run ends after --num-rollout iterations",
        "give it as --num-rollout, and the whole schedule as --lr-decay-iters",
        "--exit-interval V",
    ),
    *refused(
        "a run has no limit of its own on its time",
        "drop it, and end the run with SIGTERM, which saves a checkpoint: timeout --signal TERM 8h python train.py …",
        "--exit-duration-in-mins V",
    ),
    *noted(SAME, "SIGTERM saves a checkpoint and ends the run", "--exit-signal-handler"),
    *refused(
        "every step has the same number of trajectories",
        "drop it, and give --global-batch-size",
        "--rampup-batch-size V...",
    ),
    *noted(NO_EFFECT, "the batch does not grow during a run", "--decrease-batch-size-if-needed"),
    *refused("every iteration is trained on", "drop it", "--iterations-to-skip V..."),
    *refused("a run trains", "use --debug-rollout-only, which generates and trains nothing", "--skip-train"),
    *noted(SPEED, "ranks wait for each other in every step", "--train-sync-interval V"),
]
_DATA = [
    *noted(
        NO_EFFECT,
        "a run draws its prompts from --prompt-data, here and in launchers that are built on Megatron",
        "--data-path V...",
        "--split V",
        "--train-data-path V...",
        "--valid-data-path V...",
        "--test-data-path V...",
        "--data-args-path V",
        "--per-split-data-args-path V",
        "--data-cache-path V",
        "--no-mmap-bin-files",
        "--mock-data",
        "--encoder-seq-length V",
        "--decoder-seq-length V",
        "--retriever-seq-length V",
        "--sample-rate V",
        "--mask-prob V",
        "--short-seq-prob V",
        "--num-workers V",
        "--num-dataset-builder-threads V",
        "--object-storage-cache-path V",
        "--mid-level-dataset-surplus V",
        "--s3-cache-path V",
        "--dataloader-type V",
        "--dataloader-fast-cache-load",
        "--full-validation",
        "--multiple-validation-sets",
        "--eod-mask-loss",
    ),
    *noted(
        NO_EFFECT,
        "evaluation samples all prompts of --eval-prompt-data",
        "--eval-iters V",
        "--eval-micro-batch-size V",
        "--eval-global-batch-size V",
    ),
    *noted(SAME, "samples that are packed do not see each other", "--reset-position-ids", "--reset-attention-mask"),
    *noted(
        SAME,
        "the tokenizer is that of --hf-checkpoint",
        "--vocab-file V",
        "--merge-file V",
        "--vocab-extra-ids V",
        "--legacy-tokenizer",
        "--tokenizer-metadata V",
        "--tiktoken-pattern V",
        "--tiktoken-num-special-tokens V",
        "--tiktoken-special-tokens V...",
        "--tokenizer-sentencepiece-legacy",
        "--use-tokenizer-model-from-checkpoint-args",
        "--no-use-tokenizer-model-from-checkpoint-args",
    ),
    *noted(
        NO_EFFECT,
        "code in the folder of a model is not run: models that transformers has need none",
        "--trust-remote-code",
    ),
    *refused(
        "settings in Megatron's own file are not read",
        "give them as flags, or settings of ours with --config FILE",
        "--yaml-cfg V",
    ),
    *refused(
        "supervised fine-tuning is a loss here",
        "use --loss-type sft_loss, which trains on the conversations of --prompt-data",
        "--sft",
        "--sft-tokenizer-prompt-format V",
    ),
]
_REPORTS = [
    *noted(
        REPORTING,
        "TensorBoard files, with the metrics of every step, are in --output-dir",
        "--tensorboard-dir V",
        "--tensorboard-log-interval V",
        "--tensorboard-queue-size V",
        "--log-timers-to-tensorboard",
        "--log-batch-size-to-tensorboard",
        "--log-world-size-to-tensorboard",
        "--log-memory-to-tensorboard",
        "--log-validation-ppl-to-tensorboard",
        "--no-log-loss-scale-to-tensorboard",
        "--no-log-learnig-rate-to-tensorboard",
        "--no-log-learning-rate-to-tensorboard",
    ),
    *noted(
        REPORTING,
        "--wandb-team, --wandb-group and --wandb-dir say where W&B has the run",
        "--wandb-entity V",
        "--wandb-exp-name V",
        "--wandb-save-dir V",
    ),
    *noted(
        REPORTING,
        "metrics are in --output-dir",
        "--log-params-norm",
        "--log-progress",
        "--log-device-memory-used",
        "--log-memory-interval V",
        "--log-energy",
        "--log-straggler",
        "--disable-straggler-on-startup",
        "--straggler-ctrlr-port V",
        "--straggler-minmax-count V",
        "--timing-log-option V",
        "--logging-level V",
        "--save-wgrads-interval V",
        "--save-dgrads-interval V",
        "--dump-param-to-param-group-map V",
        "--run-workload-inspector-server",
        "--enable-one-logger",
        "--no-one-logger",
        "--one-logger-project V",
        "--one-logger-run-name V",
        "--one-logger-async",
        "--app-tag-run-name V",
        "--app-tag-run-version V",
    ),
    *noted(
        REPORTING,
        "a loss or a gradient that is not finite stops the run",
        "--check-for-spiky-loss",
        "--check-weight-hash-across-dp-replicas-interval V",
        "--rerun-mode V",
        "--error-injection-rate V",
        "--error-injection-type V",
        "--result-rejected-tracker-filename V",
    ),
]
_CHECKPOINTS = [
    *noted(
        FILES,
        "checkpoints are written by the run itself, in one format",
        "--use-dist-ckpt",
        "--auto-detect-ckpt-format",
        "--dist-ckpt-format V",
        "--dist-ckpt-save-pre-mcore-014",
        "--dist-ckpt-optim-fully-reshardable",
        "--distrib-optim-fully-reshardable-mem-efficient",
        "--ckpt-fully-parallel-save",
        "--no-ckpt-fully-parallel-save",
        "--ckpt-fully-parallel-load",
        "--ckpt-assume-constant-structure",
        "--load-model-opt-format",
        "--no-strict-fsdp-dtensor-load",
        "--replication",
        "--replication-jump V",
        "--replication-factor V",
    ),
    *noted(
        FILES,
        "--save-interval says when checkpoints are written, and --save-keep-last how many stay",
        "--non-persistent-save-interval V",
        "--non-persistent-ckpt-type V",
        "--non-persistent-global-ckpt-dir V",
        "--non-persistent-local-ckpt-dir V",
        "--non-persistent-local-ckpt-algo V",
    ),
    *noted(
        SAME,
        "the model has the shape of --hf-checkpoint, and a checkpoint is read under any layout of the ranks",
        "--use-checkpoint-args",
        "--use-mp-args-from-checkpoint-args",
    ),
    *noted(SAME, "a checkpoint has the fp32 master weights, and they are loaded", "--load-main-params-from-ckpt"),
    *refused(
        "if --load has no checkpoint, the run starts from --hf-checkpoint",
        "check the folder before the run, and drop it",
        "--exit-on-missing-checkpoint",
        accepted_if=_has_checkpoint,
        accepted_why="--load has a checkpoint, or is not given",
    ),
    *refused(
        "initial weights are those of --hf-checkpoint",
        "give it as --hf-checkpoint, or a checkpoint of a run as --load with --finetune",
        "--pretrained-checkpoint V",
    ),
    *refused(
        "a run converts no checkpoints",
        "drop it; miles export writes a checkpoint of a run in the format of Hugging Face",
        "--ckpt-convert-format V",
        "--ckpt-convert-save V",
        "--ckpt-convert-update-legacy-dist-opt-format",
    ),
    *noted(
        NO_EFFECT,
        "give --max-restarts N to restart the run from its last checkpoint if a process fails",
        "--adlr-autoresume",
        "--adlr-autoresume-interval V",
        "--enable-ft-package",
        "--calc-ft-timeouts",
        "--ft-num-warmup-iters V",
        "--inprocess-restart",
    ),
]
_LAYOUT = [
    *noted(
        SPEED,
        "the backend chooses its kernels and transfers",
        "--tp-comm-overlap-cfg V",
        "--disable-tp-comm-overlap-ag",
        "--disable-tp-comm-overlap-rs",
        "--disable-tp-comm-bulk-dgrad",
        "--disable-tp-comm-bulk-wgrad",
        "--disable-tp-comm-split-ag",
        "--disable-tp-comm-split-rs",
        "--no-overlap-p2p-communication",
        "--no-align-grad-reduce",
        "--no-align-param-gather",
        "--no-scatter-gather-tensors-in-pipeline",
        "--ddp-num-buckets V",
        "--ddp-bucket-size V",
        "--ddp-pad-buckets-for-high-nccl-busbw",
        "--use-nccl-ub",
        "--use-sharp",
        "--sharp-enabled-group V",
        "--nccl-communicator-config-path V",
        "--high-priority-stream-groups V...",
        "--disable-gloo-process-groups",
        "--lazy-mpu-init V",
        "--local-rank V",
        "--use-tp-pp-dp-mapping",
        "--no-manual-gc-eval",
        "--use-cuda-graph",
        "--te-rng-tracker",
    ),
    *noted(
        SAME,
        "gradients are summed over the ranks, and the loss says over what they are averaged",
        "--ddp-average-in-collective",
    ),
    *noted(
        MEMORY,
        "--recompute-granularity full recomputes whole layers",
        "--recompute-activations",
        "--checkpoint-activations",
    ),
    *refused(
        "Megatron divides the optimizer's state, and not the weights",
        "drop it, or give --train-backend fsdp",
        "--use-torch-fsdp2",
        "--torch-fsdp2-no-reshard-after-forward",
        "--enable-full-sharding-in-hsdp",
        accepted_if=_divides_weights,
        accepted_why="--train-backend fsdp divides every weight over all ranks",
    ),
    *refused(
        "the model is a decoder",
        "drop it, and give --num-layers and the sizes of the decoder",
        "--encoder-num-layers V",
        "--decoder-num-layers V",
        "--pipeline-model-parallel-split-rank V",
    ),
    *refused(
        "the model is a decoder",
        "drop it",
        "--encoder-tensor-model-parallel-size V",
        "--encoder-pipeline-model-parallel-size V",
        neutral=("0",),
    ),
]
_MODEL = [
    *noted(
        NO_EFFECT,
        "every weight is read from --hf-checkpoint",
        "--init-method-xavier-uniform",
        "--data-parallel-random-init",
    ),
    *noted(
        NO_EFFECT,
        "no decoder has such a layer",
        "--bert-no-binary-head",
        "--relative-attention-num-buckets V",
        "--relative-attention-max-distance V",
    ),
    *refused(
        "the rotary embedding is that of --hf-checkpoint",
        "drop it, or give rope_scaling in that config",
        "--rotary-seq-len-interpolation-factor V",
        neutral=("1",),
    ),
    *refused(
        "layers are those of --hf-checkpoint, in megatron-core",
        "drop it",
        "--use-legacy-models",
        "--openai-gelu",
        "--quick-geglu",
        "--moe-use-upcycling",
        "--moe-router-force-biased V",
        "--heterogeneous-layers-config-path V",
        "--heterogeneous-layers-config-encoded-json V",
    ),
    *refused(
        "logits and their log-probs are fp32, and layers in low precision were not compared with an oracle",
        "drop it: the run computes in bf16 with fp32 master weights, or in fp32",
        "--fp16-lm-cross-entropy",
        "--kitchen-config-file V",
        "--kitchen-recipe-number V",
        "--modelopt-enabled",
    ),
]

TRAINING_FLAGS = by_flag([*_SCHEDULE, *_LENGTH, *_DATA, *_REPORTS, *_CHECKPOINTS, *_LAYOUT, *_MODEL])
