"""Flags that related launchers have added lately: parts started on their own, stores, checks of their own, sessions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miles.compat.launch.foreign import by_flag, noted, refused
from miles.compat.launch.paths import is_fully_async
from miles.config.notes import FILES, MEMORY, REPORTING, SAME, SPEED
from miles.config.settings import Settings


def _flushes_cache(settings: Settings, given: Mapping[str, Any]) -> bool:
    return not settings.sglang.keeps_cache


def _trains_what_generated(settings: Settings, given: Mapping[str, Any]) -> bool:
    rollout = settings.rollout
    path = rollout.rollout_function_path
    ahead = rollout.async_steps or rollout.fully_async or (path and is_fully_async("rollout_function_path", path))
    return not ahead and not rollout.partial_rollout


def _samples_teacher_tokens(settings: Settings, given: Mapping[str, Any]) -> bool:
    return str(given.get("--opd-log-prob-top-k", "0")) == "0"


_PARTS = [
    *refused(
        "Ray places the processes of a run",
        "drop it, and start the run with ray start and ray job submit",
        "--cluster-backend V",
        "--worker-comm-backend V",
        neutral=("ray",),
    ),
    *refused(
        "one command starts all parts of a run",
        "drop it; engines that run already are given with --rollout-external and --rollout-external-engine-addrs",
        "--deploy-component V",
        neutral=("all",),
    ),
    *refused(
        "one command starts all parts of a run",
        "drop it; engines that run already are given with --rollout-external and --rollout-external-engine-addrs",
        "--deploy-instance-id V",
        "--init-expected-num-cells V",
        "--trainer-controller-addrs V...",
        "--inference-controller-addr V",
        "--custom-inference-engine-provider-path V",
        "--rollout-external-router-pd",
    ),
    *refused("the ranks of a run train together", "drop it", "--indep-dp"),
    *refused(
        "a run trains one policy",
        "drop it, and start a run for each policy or adapter",
        "--megatron-config V",
        "--multi-lora",
        "--multi-lora-dir V",
        "--multi-lora-api-port V",
        "--multi-lora-idle-poll-s V",
        "--engine-host-lora-budget-bytes V",
        "--tinker-backend",
        "--tinker-frontend",
        "--tinker-server-host V",
        "--tinker-server-port V",
        "--tinker-base-model V",
        "--tinker-checkpoint-root V",
        *(f"--{no}tinker-train-{part}" for no in ("", "no-") for part in ("attn", "mlp", "unembed")),
    ),
    *refused(
        "a run trains one policy",
        "drop it, and start a run for each policy or adapter",
        "--multi-lora-n-adapters V",
        neutral=("0",),
    ),
    *noted(SPEED, "Ray's object store passes the samples on", "--object-store-backend V"),
    *noted(
        SPEED,
        "Ray's object store passes the samples on",
        "--mooncake-store-init-kwargs V",
        "--mooncake-replica-num V",
        "--delay-split-train-data-by-dp",
    ),
    *noted(SPEED, "requests are sent by the rollout process, or by --num-rollout-workers", "--use-distributed-post"),
    *noted(SAME, "the run places its rollout process itself", "--pin-rollout-manager-to-head"),
]
_FAILURES = [
    *refused(
        "--use-fault-tolerance restarts engines",
        "drop it; with --max-restarts N the run restarts from its checkpoint if a trainer rank fails",
        "--ft-components V...",
        neutral=("rollout",),
    ),
    *noted(
        SAME,
        "--use-fault-tolerance checks and restarts engines without a server of its own",
        "--control-server-port V",
        "--api-server-host V",
        "--api-server-port V",
        "--mini-ft-controller-enable",
        "--no-mini-ft-controller-enable",
        "--mini-ft-controller-poll-interval V",
        "--mini-ft-controller-resume-delay V",
        "--rollout-health-check-failure-threshold V",
    ),
    *refused(
        "a run injects no failures into itself",
        "drop it",
        "--ci-ft-test-actions V",
        "--ci-ft-test-actions-path V",
        "--ci-inject-missing-prefetched-batch-bug",
    ),
    *noted(
        SAME,
        "--worker-timeout says when a trainer rank counts as lost",
        "--trainer-heartbeat-checker-interval V",
        "--trainer-heartbeat-checker-timeout V",
        "--trainer-heartbeat-checker-first-wait V",
        "--trainer-heartbeat-checker-failure-threshold V",
    ),
]
_MEMORY_AND_SPEED = [
    *noted(
        MEMORY,
        "the trainer keeps what it has on its device, or in host memory with --offload-train",
        "--clear-quantized-weight-workspaces-on-offload",
        "--no-clear-quantized-weight-workspaces-on-offload",
        "--stream-optimizer-state-to-disk",
        "--offload-train-disk-chunk-mb V",
        "--colocate-memory-peak-device V",
        "--check-rematerialize-param-from-master-weight",
        "--recompute-loss-function",
        "--low-memory-resume",
    ),
    *noted(MEMORY, "engines release both, weights and cache", "--offload-rollout-level V..."),
    *refused(
        "the optimizer's moments are fp32",
        "drop it",
        "--stream-optimizer-state-moment-dtype V",
        neutral=("fp32",),
    ),
    *noted(SPEED, "the backend chooses its kernels", "--linear-attention-backend V", "--miles-dsa-topk-backend V"),
    *noted(SPEED, "micro-batches are filled by tokens, and --balance-data evens out ranks", "--balance-by-flops"),
    *noted(
        SPEED,
        "weights and what has changed in them are sent in a form of miles' own",
        "--update-weight-delta-encoding V",
        "--update-weight-delta-checksum V",
        "--p2p-transfer-num-workers V",
        "--p2p-transfer-timeout V",
    ),
    *noted(FILES, "--update-weight-copy-dir names the folder of the copy", "--update-weight-local-checkpoint-dir V"),
    *noted(SAME, "weights are never quantized", "--extra-high-precision-layers-hf V..."),
    *noted(SAME, "weights are never quantized", "--extra-high-precision-layers-megatron V..."),
]
_GENERATION = [
    *refused(
        "samples come from the engines of the run",
        "drop it; --rollout-function-path names a function that gets them from elsewhere",
        "--rollout-buffer-url V",
        "--fetch-trajectory-retry-times V",
        "--min-batch-collection-ratio V",
        "--rollout-task-type V",
        "--disable-rollout-global-dataset",
    ),
    *refused(
        "a run trains on what it generates, or on samples that were saved, and mixes them in no iteration",
        "drop it, or give --load-debug-rollout-data",
        "--ci-inject-rollout-data-path V",
        "--ci-inject-rollout-data-start-rollout-id V",
        "--ci-inject-rollout-data-min-match-ratio V",
    ),
    *refused(
        "every engine prefills and decodes",
        "drop it",
        "--prefill-num-servers V",
        neutral=("0",),
    ),
    *refused(
        "an iteration is trained on as a whole",
        "drop it, or give --use-dynamic-global-batch-size",
        "--disable-rollout-trim-samples",
    ),
    *refused(
        "rows of evaluation have the tools of --tool-key",
        "give it as --tool-key",
        "--eval-tool-key V",
    ),
    *refused(
        "samples of up to --async-steps weight versions ago are trained on",
        "give it as --async-steps, with --fully-async",
        "--max-weight-staleness V",
    ),
    *refused(
        "a group that is too old is dropped",
        "drop it, or give --stale-samples mask to train on its new tokens",
        "--async-unused-samples-handler V",
        neutral=("drop",),
    ),
    *refused(
        "the groups that wait are kept by the run itself",
        "use --buffer-filter-path, which picks those that an iteration takes",
        "--custom-async-data-buffer-path V",
    ),
    *noted(
        SPEED,
        "as many groups are generated at a time as --over-sampling-batch-size and --async-steps say",
        "--async-max-concurrent-samples V",
        "--async-data-buffer-capacity-factor V",
        "--rollout-submission-granularity V",
    ),
    *refused(
        "with --pause-generation-mode in_place an engine keeps what old weights have computed",
        "drop it, or give --pause-generation-mode retract",
        "--namespaced-radix-cache",
        accepted_if=_flushes_cache,
        accepted_why="engines forget what old weights have computed",
    ),
    *noted(SAME, "prefixes are shared by all requests", "--no-namespaced-radix-cache"),
    *refused(
        "kernels of the engine and the trainer differ",
        "drop it; --use-tis corrects for the difference, and --get-mismatch-metrics shows it",
        "--true-on-policy-mode",
    ),
    *refused(
        "the engine reports the log-probs with which it sampled",
        "drop it; the trainer scores samples again, unless --use-rollout-logprobs is given",
        "--recompute-logprobs-via-prefill",
    ),
    *refused("indices of sparse attention are not replayed", "drop it", "--use-indexer-replay"),
    *refused("indices of sparse attention are not replayed", "drop it", "--use-rollout-indexer-replay"),
    *refused(
        "a server of sessions is part of --agent-command and --environment",
        "use one of them (docs/agents.md)",
        "--session-message-matcher V",
        "--session-sample-picker-path V",
        "--session-sample-postprocessor-path V",
    ),
    *noted(SAME, "the calls of an agent are recorded as tokens, with any model", "--use-session-server V?"),
    *noted(
        SAME,
        "the calls of an agent are recorded beside the rollout process",
        "--session-server-workers V",
        "--session-server-ip V",
        "--session-server-external-host V",
        "--session-server-port V",
    ),
    *refused(
        "an evaluation has the limits of its answers only",
        "give --eval-max-response-len, or a length limit in the data",
        "--eval-max-prompt-len V",
        "--eval-max-context-len V",
        "--eval-min-new-tokens V",
    ),
    *noted(SPEED, "an evaluation is finished before training continues", "--eval-max-in-flight V"),
    *noted(SPEED, "an evaluation is finished before training continues", "--eval-overflow-policy V"),
]
_TRAINING = [
    *refused(
        "the critic shares the ranks of the policy",
        "drop it",
        "--critic-num-nodes V",
        "--critic-num-gpus-per-node V",
    ),
    *refused(
        "a critic starts from --hf-checkpoint, and is part of the run's checkpoints",
        "drop it; --load continues with the critic of that run",
        "--critic-load V",
    ),
    *noted(FILES, "the critic is part of each checkpoint in --save", "--critic-save V"),
    *refused(
        "p_old is what the trainer's weights give before the step, and not those that generated",
        "drop it, or give --use-rollout-logprobs: p_old is then what the engine gave",
        "--keep-old-actor",
        accepted_if=_trains_what_generated,
        accepted_why="the weights that generated are those of the trainer before the step",
    ),
    *noted(SAME, "vocabularies are padded as the ranks need it", "--padded-vocab-size V"),
    *refused(
        "an adapter is that of --lora-rank, --lora-alpha and --lora-dropout",
        "drop it",
        "--lora-type V",
        neutral=("lora",),
    ),
    *noted(
        SPEED,
        "engines receive the weights with the adapter added to them",
        "--lora-sync-from-tensor",
        "--no-sglang-lora-use-virtual-experts",
    ),
    *refused("engines receive the weights with the adapter added to them", "drop it", "--lora-train-only"),
    *noted(SAME, "an adapter starts as peft starts it", "--lora-A-init-method V", "--lora-B-init-method V"),
    *refused(
        "an iteration has whole steps",
        "give --use-dynamic-global-batch-size, one step of what there is",
        "--allow-partial-train-step",
    ),
    *refused("the optimizer keeps its state", "drop it", "--reset-optimizer-states"),
    *refused(
        "all weights are trained, or an adapter with --lora-rank",
        "drop it",
        "--freeze-indexer",
        "--debug-disable-optimizer",
    ),
    *refused("engines get the weights after every iteration", "drop it", "--debug-skip-weight-update"),
    *noted(SPEED, "a step whose ratios are 1 is not scored before it", "--skip-actor-forward-only"),
    *refused(
        "a folder names one checkpoint",
        "give the folder of that checkpoint as --ref-load or --opd-teacher-load",
        "--ref-ckpt-step V",
        "--opd-teacher-ckpt-step V",
    ),
    *refused(
        "a run continues after the checkpoint that it loads",
        "drop it; --finetune starts at iteration 0",
        "--start-rollout-id V",
        neutral=("0",),
    ),
    *refused(
        "a run ends after --num-rollout iterations",
        "give it as --num-rollout, and the whole schedule as --lr-decay-iters",
        "--debug-exit-after-rollout V",
    ),
    *refused(
        "the KL to the teacher is estimated from the sampled tokens",
        "drop it",
        "--opd-topk-per-position",
        accepted_if=_samples_teacher_tokens,
        accepted_why="without --opd-log-prob-top-k",
    ),
    *refused(
        "a run has one teacher, whose KL is added to the advantages",
        "drop it, and give --use-opd with --opd-type and the teacher (docs/recipes.md)",
        "--use-mopd",
        "--mopd-alpha V",
        "--mopd-eps-low V",
        "--mopd-eps-high V",
        "--mopd-sampling-logprobs-key V",
        "--mopd-teachers V",
        "--mopd-teacher-loads V",
    ),
    *refused(
        "nothing of yours runs after a checkpoint or after weights were written",
        "drop it; --notify-url reports the end of a run",
        "--custom-megatron-post-save-hook-path V",
        "--custom-update-weight-post-write-path V",
    ),
    *refused(
        "all samples of the file are trained on",
        "drop it, or save fewer",
        "--load-debug-rollout-data-subsample V",
    ),
    *noted(FILES, "SIGTERM saves a checkpoint and ends the run", "--save-trigger-sentinel V"),
]
_REPORTS = [
    *noted(
        REPORTING,
        "these check the other launcher in tests of its own",
        "--ci-test",
        "--ci-disable-config-snapshot",
        "--config-snapshot-name V",
        "--ci-disable-kl-checker",
        "--ci-disable-logprobs-checker",
        "--ci-disable-weight-update-checker",
        "--ci-metric-checker-key V",
        "--ci-metric-checker-threshold V",
        "--ci-metric-checker-expect-num V",
        "--ci-assert-prefill-lag-max V",
        "--ci-tito-special-token-count-threshold V",
        "--ci-save-grad-norm V",
        "--ci-load-grad-norm V",
        "--ci-save-model-hash",
        "--ci-check-model-hash",
    ),
    *noted(SPEED, "proxies are those of the environment, HTTP_PROXY", "--http-proxy V"),
    *noted(
        REPORTING,
        "metrics are in --output-dir",
        "--dashboard-flush-interval V",
        "--dashboard-gpu-sample-interval V",
        "--dashboard-sglang-scrape-interval V",
        "--dashboard-sglang-scrape-mode V",
        "--dashboard-sglang-metrics V",
        "--dashboard-forward-prometheus",
    ),
    *noted(REPORTING, "run.json has an identity of the run", "--run-uuid V"),
    *noted(REPORTING, "arithmetic per second is part of --rehearse", "--mfu-peak-tflops V"),
    *noted(REPORTING, "--loss-type sft_loss logs its loss", "--log-sft-entropy"),
    *noted(REPORTING, "every step logs train/entropy_loss", "--use-rollout-entropy", "--observe-training-entropy"),
    *noted(
        REPORTING,
        "metrics are in --output-dir, and with --use-mlflow or --prometheus-port there",
        "--mlflow-experiment-name V",
        "--mlflow-run-name V",
        "--mlflow-run-id V",
        "--use-prometheus",
        "--prometheus-run-name V",
    ),
    *noted(
        REPORTING,
        "use --save-debug-rollout-data for samples, and --output-dir for metrics",
        "--save-debug-trajectory-data V",
        "--save-debug-event-data V",
        "--save-local-weight-checksum",
        "--memory-snapshot-num-steps V",
        "--memory-recorder V",
        "--dumper-enable",
        "--dumper-dir V",
        "--dumper-inference V...",
        "--dumper-fwd-only V...",
        "--dumper-fwd-bwd V...",
        "--dumper-source-patcher-config-inference V",
        "--dumper-source-patcher-config-train V",
        "--env-report V",
        "--env-report-interval-seconds V",
    ),
    *noted(
        REPORTING,
        "the checks of a run are --loss-canary and --check-weight-update-equal, which stop it",
        "--check-weight-update-selector V",
        "--check-weight-update-skip-list V...",
        "--check-weight-update-allow-quant-error",
        "--check-lora-weight-equal",
        "--enable-event-analyzer",
        "--enable-sample-ownership-checker",
        "--enable-witness",
        "--witness-buffer-size V",
        "--debug-unified-grad-fused-logprob",
        "--debug-deterministic-collective",
    ),
    *noted(
        SAME,
        "requests go through sglang-router, with two or more engines",
        "--miles-router-timeout V",
        "--miles-router-max-connections V",
        "--miles-router-health-check-failure-threshold V",
    ),
]

NEWER_FLAGS = by_flag([*_PARTS, *_FAILURES, *_MEMORY_AND_SPEED, *_GENERATION, *_TRAINING, *_REPORTS])
