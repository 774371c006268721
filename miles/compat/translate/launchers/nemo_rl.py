"""NeMo-RL: YAML."""

from __future__ import annotations

import math

from miles.compat.translate.launchers.base import Launcher
from miles.compat.translate.objective import Objective, sequence_mean_of_unmasked, token_mean
from miles.compat.translate.translation import Document, Row, Translation, apply, write_kl_in_rewards

SOURCE = "NVIDIA-NeMo/RL 006907a, nemo_rl/algorithms/loss/loss_functions.py"

ENGINE = "the engine's own setting; give the matching --sglang- flag"
MEMORY = "memory and speed only"
OPTIMIZER = "policy.optimizer.kwargs."

ROWS = {
    "grpo.num_prompts_per_step": Row("--rollout-batch-size", kind="number"),
    "grpo.num_generations_per_prompt": Row("--n-samples-per-prompt", kind="number"),
    "grpo.max_num_steps": Row("--num-rollout", kind="number"),
    "grpo.val_period": Row("--eval-interval", "needs --eval-prompt-data", "number", neutral=(0,)),
    "grpo.seed": Row("--seed", kind="number"),
    "grpo.max_rollout_turns": Row(
        "", "turns are your own generation here (--custom-generate-function-path)", neutral=(1,)
    ),
    "grpo.overlong_filtering": Row("--mask-truncated-completions", kind="switch"),
    "grpo.use_leave_one_out_baseline": Row(
        "", "grpo's baseline is the mean of the whole group here", "switch", neutral=(False,)
    ),
    "grpo.async_grpo.enabled": Row("", "see --async-steps", "switch", neutral=(False,)),
    "grpo.async_grpo.max_trajectory_age_steps": Row("", "see --async-steps"),
    "policy.model_name": Row("--hf-checkpoint"),
    "policy.train_global_batch_size": Row("--global-batch-size", kind="number"),
    "policy.train_micro_batch_size": Row("--micro-batch-size", kind="number"),
    "policy.max_total_sequence_length": Row("--rollout-max-context-len", kind="number"),
    "policy.max_grad_norm": Row("--clip-grad", kind="number"),
    "policy.logprob_batch_size": Row("", MEMORY),
    "policy.dtensor_cfg.context_parallel_size": Row("--context-parallel-size", kind="number"),
    "policy.dtensor_cfg.cpu_offload": Row("", MEMORY),
    "policy.dtensor_cfg.activation_checkpointing": Row("--gradient-checkpointing", kind="switch"),
    "policy.generation.backend": Row("", "SGLang generates here (--rollout-engine sglang)"),
    "policy.generation.temperature": Row("--rollout-temperature", kind="number"),
    "policy.generation.top_p": Row("--rollout-top-p", kind="number"),
    "policy.generation.top_k": Row("--rollout-top-k", kind="number"),
    "policy.generation.colocated.enabled": Row("--colocate", kind="switch"),
    "policy.generation.vllm_cfg.tensor_parallel_size": Row("--rollout-num-gpus-per-engine", kind="number"),
    "policy.generation.vllm_cfg.gpu_memory_utilization": Row("", ENGINE),
    "policy.generation.vllm_cfg.enforce_eager": Row("", ENGINE),
    OPTIMIZER + "lr": Row("--lr", kind="number"),
    OPTIMIZER + "weight_decay": Row("--weight-decay", kind="number"),
    OPTIMIZER + "eps": Row("--adam-eps", kind="number"),
    OPTIMIZER + "foreach": Row("", MEMORY),
    OPTIMIZER + "fused": Row("", MEMORY),
    "policy.optimizer.name": Row("", "AdamW is the optimizer here", neutral=("torch.optim.AdamW",)),
    "loss_fn.ratio_clip_min": Row("--eps-clip", kind="number", default=0.2),
    "loss_fn.ratio_clip_max": Row("--eps-clip-high", kind="number", default=0.2),
    "loss_fn.ratio_clip_c": Row("--eps-clip-c", kind="number"),
    "loss_fn.use_on_policy_kl_approximation": Row(
        "", "the KL is not weighted by the ratio here", "switch", neutral=(False,)
    ),
    "loss_fn.disable_ppo_ratio": Row("", "the ratio is always part of the policy loss", "switch", neutral=(False,)),
    "loss_fn.positive_example_nll_weight": Row("", "no such term here", "number", neutral=(0,)),
    "checkpointing.checkpoint_dir": Row("--save"),
    "checkpointing.save_period": Row("--save-interval", kind="number", needs="--save"),
    "logger.log_dir": Row("--output-dir"),
    "logger.wandb_enabled": Row("--use-wandb", kind="switch"),
    "logger.wandb.project": Row("--wandb-project", needs="--use-wandb"),
    "cluster.gpus_per_node": Row("--actor-num-gpus-per-node", kind="number"),
    "cluster.num_nodes": Row("--actor-num-nodes", kind="number"),
    "data.shuffle": Row("--rollout-shuffle", kind="switch"),
    "data.dataset_name": Row("", "give --prompt-data"),
}


class NemoRl(Launcher):
    """NeMo-RL's GRPO."""

    name = "nemo-rl"
    version = "NVIDIA-NeMo/RL 00294d9 (settings), 006907a (loss)"
    reads = ("yaml",)

    def recognizes(self, document: Document) -> bool:
        """By the tables of its GRPO configuration."""
        return any(key.startswith(("grpo.", "loss_fn.")) for key in document.settings)

    def translate(self, translation: Translation) -> Objective:
        """Translate a configuration of GRPO."""
        apply(ROWS, translation)
        key = "grpo.normalize_rewards"
        if translation.has(key) and not translation.switch(key):
            translation.carry(key, "--disable-grpo-std-normalization")
        elif translation.has(key):
            translation.carry(key)
        if betas := translation.pair(OPTIMIZER + "betas"):
            translation.carry(OPTIMIZER + "betas", "--adam-beta1", betas[0], "--adam-beta2", betas[1])
        if translation.has("policy.precision"):
            precisions = {"bfloat16": "--bf16", "float32": "--fp32"}
            if flag := precisions.get(translation.text("policy.precision")):
                translation.carry("policy.precision", flag)
            else:
                translation.miss("policy.precision", "this version computes in bf16 or fp32")
        _lengths(translation)
        _kl(translation)
        _correction(translation)
        return _objective(translation)


def _lengths(translation: Translation) -> None:
    context = translation.number("policy.max_total_sequence_length", 0) or math.inf
    ends = "a sequence has a token of the prompt and one of the response at least"
    flags = {
        "policy.generation.max_new_tokens": ("--rollout-max-response-len", ""),
        "data.max_input_seq_length": ("--rollout-max-prompt-len", "longer prompts are dropped here"),
    }
    for key, (flag, why) in flags.items():
        if not translation.number(key, 0):
            continue
        longest = translation.count(key, 1)
        if longest >= context:
            translation.differ(key, ends, flag, int(context) - 1)
        elif why:
            translation.differ(key, why, flag, longest)
        else:
            translation.carry(key, flag, longest)


def _kl(translation: Translation) -> None:
    weight, kind = "loss_fn.reference_policy_kl_penalty", "loss_fn.reference_policy_kl_type"
    coefficient = translation.number(weight, 0.01)
    if not coefficient:
        translation.carry(weight)
    elif translation.switch("loss_fn.use_kl_in_reward"):
        write_kl_in_rewards(translation, weight, coefficient)
        translation.carry("loss_fn.use_kl_in_reward", "--kl-loss-type", translation.text(kind, "k3"))
    else:
        why = "its mean follows token_level_loss there, a sample mean here; its inputs are clamped there"
        translation.differ(weight, why, "--use-kl-loss", "--kl-loss-coef", coefficient)
        translation.carry(kind, "--kl-loss-type", translation.text(kind, "k3"))


def _correction(translation: Translation) -> None:
    key, kind = "loss_fn.use_importance_sampling_correction", "loss_fn.truncated_importance_sampling_type"
    high, low = (f"loss_fn.truncated_importance_sampling_ratio{end}" for end in ("", "_min"))
    modes = {"tis": "truncate", "icepop": "icepop"}
    if translation.has(key) and not translation.switch(key):
        translation.carry(key)
    elif translation.has(key) and translation.text(kind) in modes:
        translation.carry(key, "--use-tis", "--tis-mode", modes[translation.text(kind)])
        if translation.has(high):
            translation.carry(high, "--tis-clip", translation.number(high, 2.0))
        if translation.has(low):
            translation.carry(low, "--tis-clip-low", translation.number(low, 0.0))
    elif translation.has(key):
        translation.miss(key, "the weight is always bounded here (--use-tis with --tis-mode and --tis-clip)")


def _objective(translation: Translation) -> Objective:
    key = "loss_fn.token_level_loss"
    if translation.has("loss_fn.sequence_level_importance_ratios"):
        if translation.switch("loss_fn.sequence_level_importance_ratios"):
            translation.carry("loss_fn.sequence_level_importance_ratios", "--policy-loss", "gspo")
        else:
            translation.carry("loss_fn.sequence_level_importance_ratios")
    if translation.switch(key, True):
        translation.carry(key, "--loss-aggregation", "token_mean")
        words = ("--loss-aggregation", "token_mean")
        return Objective(f"{key} = true", "Σ m l / (T + 1e-8)", SOURCE, token_mean, "token_mean", words)
    depends = "samples that sample_mask drops: they are left out of B'"
    translation.differ(key, f"depends on {depends}", "--loss-aggregation", "sample_mean")
    return Objective(
        f"{key} = false",
        "1/B' Σ_i 1/(M_i + 1e-8) Σ_t m l, B' = samples that sample_mask keeps",
        SOURCE,
        sequence_mean_of_unmasked,
        "sample_mean",
        ("--loss-aggregation", "sample_mean"),
        depends=depends,
        exact=False,
        remarks=("In the uneven batch the sample without loss tokens is taken for one that sample_mask drops.",),
    )


NEMO_RL = NemoRl()
