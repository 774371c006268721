"""TRL: ``GRPOConfig`` as JSON, YAML or keyword arguments."""

from __future__ import annotations

import math

from miles.compat.translate.launchers.base import Launcher
from miles.compat.translate.objective import (
    Objective,
    Reduction,
    over_longest,
    sequence_mean,
    sequence_sum_mean,
    token_mean,
    token_mean_of_generation,
    token_mean_of_micro_batches,
)
from miles.compat.translate.translation import Document, Row, Translation, apply
from miles.objective.aggregation import Aggregation

SOURCE = "TRL 1.16.0, trl/trainer/grpo_trainer.py"
KL_FOLLOWS = "The KL term is added to the token losses there and follows loss_type; here it is always a sample mean."

_VLLM = "the engine's own setting; give the matching --sglang- flag"

ROWS = {
    "model_name_or_path": Row("--hf-checkpoint"),
    "model": Row("--hf-checkpoint"),
    "reward_funcs": Row("", "give the reward with --rm-type, or a function with --custom-rm-path"),
    "train_dataset": Row("", "give the prompts with --prompt-data"),
    "eval_dataset": Row("", "give the prompts with --eval-prompt-data"),
    "max_prompt_length": Row("--rollout-max-prompt-len", "longer prompts are cut there, left out here", "number"),
    "dataset_name": Row(
        "--prompt-data", "a name of the Hub is written hf:NAME here, and the columns are flags", "prompts"
    ),
    "learning_rate": Row("--lr", kind="number", default=1e-6),
    "weight_decay": Row("--weight-decay", kind="number", default=0.0),
    "adam_beta1": Row("--adam-beta1", kind="number"),
    "adam_beta2": Row("--adam-beta2", kind="number"),
    "adam_epsilon": Row("--adam-eps", kind="number"),
    "max_grad_norm": Row("--clip-grad", kind="number"),
    "warmup_steps": Row("--lr-warmup-iters", kind="number"),
    "warmup_ratio": Row("--lr-warmup-fraction", kind="number"),
    "num_generations": Row("--n-samples-per-prompt", kind="number", default=8),
    "max_completion_length": Row("--rollout-max-response-len", kind="number", default=512),
    "temperature": Row("--rollout-temperature", kind="number"),
    "top_p": Row("--rollout-top-p", kind="number"),
    "seed": Row("--seed", "--rollout-seed is separate here: it orders the prompts and seeds the sampling"),
    "gradient_checkpointing": Row("--gradient-checkpointing", kind="switch"),
    "output_dir": Row("--output-dir", "metrics and report only; checkpoints go to --save"),
    "save_steps": Row("--save-interval", "counts optimizer steps there, iterations here", needs="--save"),
    "eval_steps": Row("--eval-interval", "counts optimizer steps there, iterations here; needs --eval-prompt-data"),
    "vllm_tensor_parallel_size": Row("--rollout-num-gpus-per-engine", kind="number"),
    "fp16": Row(why="this version computes in bf16 or fp32", kind="switch", neutral=(False,)),
    "min_p": Row("--rollout-min-p", kind="number"),
    "repetition_penalty": Row(why="no such sampling here", neutral=(1, 1.0)),
    "reward_weights": Row(why="weights are written with the names here: --rm-type a:1,b:0.2"),
    "multi_objective_aggregation": Row(
        why="normalize_then_sum is --advantage-estimator gdpo here", neutral=("sum_then_normalize",)
    ),
    "mask_truncated_completions": Row("--mask-truncated-completions", kind="switch"),
    "num_iterations": Row("--ppo-epochs", kind="number", neutral=(1,)),
    "off_policy_mask_threshold": Row(why="the nearest is --use-opsm with --opsm-delta, whose bound is another one"),
    "entropy_coef": Row("--entropy-coef", "a mean that follows TRL's own rule there, a sample mean here", "number"),
    "vllm_gpu_memory_utilization": Row("", _VLLM),
    "vllm_max_model_length": Row("--rollout-max-context-len", kind="number"),
    "logging_steps": Row("", "every step is logged here"),
    "use_liger_kernel": Row("", "speed only: whole logits never exist here", "switch", neutral=(False,)),
    "save_total_limit": Row("", "give --save-keep-last with --save"),
    "save_strategy": Row("", "use --save and --save-interval"),
    "eval_strategy": Row("", "use --eval-prompt-data and --eval-interval"),
    "log_completions": Row("", "the report shows --report-samples answers of each iteration"),
    "remove_unused_columns": Row("", "columns are named by --input-key, --label-key and --metadata-key"),
}

# loss_type -> mode, reduction, formula
LOSSES: dict[str, tuple[Aggregation, Reduction, str]] = {
    "dapo": ("token_mean", token_mean, "1/T Σ m l"),
    "cispo": ("token_mean", token_mean, "1/T Σ m l"),
    "vespo": ("token_mean", token_mean, "1/T Σ m l"),
    "grpo": ("sample_mean", sequence_mean, "1/B Σ_i 1/max(M_i, 1) Σ_t m l"),
    "sapo": ("sample_mean", sequence_mean, "1/B Σ_i 1/max(M_i, 1) Σ_t m l"),
    "dr_grpo": ("constant", over_longest(sequence_sum_mean), "1/(L B) Σ m l, L = max_completion_length"),
    "bnpo": ("token_mean", token_mean_of_micro_batches, "mean over ranks and micro-batches of (Σ m l / Σ m) of each"),
    "luspo": ("constant", sequence_sum_mean, "1/B Σ_i Σ_t m l"),
}
OWN_TOKEN_LOSS = {
    "sapo": {"sapo_temperature_pos": "--sapo-tau-pos", "sapo_temperature_neg": "--sapo-tau-neg"},
    "vespo": {
        "vespo_k_pos": "--vespo-power-pos",
        "vespo_lambda_pos": "--vespo-decay-pos",
        "vespo_k_neg": "--vespo-power-neg",
        "vespo_lambda_neg": "--vespo-decay-neg",
    },
}


class Trl(Launcher):
    """TRL's ``GRPOConfig``."""

    name = "trl"
    version = "TRL 1.16.0"
    reads = ("json", "yaml", "python")

    def recognizes(self, document: Document) -> bool:
        """Python is TRL's; other files by the names of ``GRPOConfig``."""
        known = {*ROWS, "loss_type", "beta", "epsilon", "per_device_train_batch_size", "scale_rewards"}
        return document.kind == "python" or bool(known & document.settings.keys())

    def translate(self, translation: Translation) -> Objective:
        """Translate ``GRPOConfig``."""
        apply(ROWS, translation)
        translation.carry("the column of prompts", "--input-key", "prompt")
        _reports(translation)
        _batch(translation)
        _sampling(translation)
        _schedule(translation)
        _policy(translation)
        _correction(translation)
        return _objective(translation)


def _reports(translation: Translation) -> None:
    key, names = "report_to", translation.raw("report_to", [])
    if {"wandb", "all"} & {*(names if isinstance(names, list) else [names])}:
        translation.differ(key, "TensorBoard and the report are always written", "--use-wandb")
    elif translation.has(key):
        translation.miss(key, "TensorBoard and the report are always written")


def _batch(translation: Translation) -> None:
    group = translation.count("num_generations", 8)
    per_device = translation.count("per_device_train_batch_size", 8)
    accumulation = translation.count("gradient_accumulation_steps", 1)
    note = (
        f"{per_device} · {accumulation} samples on each process make a step; the number of processes is not in the "
        "file, and the flags are for one: multiply --global-batch-size by it, and --rollout-batch-size as well unless "
        "generation_batch_size is set"
    )
    per_generation = translation.count("steps_per_generation", accumulation)
    generation = translation.count("generation_batch_size", per_device * per_generation)
    translation.differ(
        "per_device_train_batch_size",
        note,
        *("--global-batch-size", per_device * accumulation, "--micro-batch-size", per_device),
    )
    key = next(
        (k for k in ("generation_batch_size", "steps_per_generation") if translation.has(k)),
        "gradient_accumulation_steps",
    )
    if generation % group:
        why = (
            f"{generation} samples of a generation are no whole number of groups of {group}: other processes add to it"
        )
        translation.differ(key, why + "; give --rollout-batch-size, the prompts of an iteration")
    else:
        why = "samples there, prompts here: divided by num_generations"
        translation.differ(key, why, "--rollout-batch-size", generation // group)


def _sampling(translation: Translation) -> None:
    top_k = translation.number("top_k", 0)
    if translation.has("top_k"):
        translation.carry("top_k", "--rollout-top-k", int(top_k) if top_k > 0 else -1)
    if translation.has("use_vllm") and translation.switch("use_vllm"):
        translation.differ("use_vllm", "SGLang generates here", "--rollout-engine", "sglang")
    elif translation.has("use_vllm"):
        translation.carry("use_vllm")
    if translation.text("vllm_mode") == "colocate":
        translation.carry("vllm_mode", "--colocate")
    elif translation.has("vllm_mode"):
        translation.miss("vllm_mode", "engines have devices of their own here without --colocate")
    translation.take(["max_steps", "num_train_epochs"])
    if translation.has("max_steps") and translation.number("max_steps", -1) > 0:
        why = "optimizer steps there, iterations here; they are equal with one step for each generation"
        translation.differ("max_steps", why, "--num-rollout", translation.number("max_steps", 1))
        if translation.has("num_train_epochs"):
            translation.miss("num_train_epochs", "max_steps takes precedence")
    else:
        epochs = translation.number("num_train_epochs", 3)
        if epochs == int(epochs):
            translation.carry("num_train_epochs", "--num-epoch", epochs)
        else:
            why = "whole passes over the prompts here; --num-rollout gives the number of iterations"
            translation.differ("num_train_epochs", why, "--num-epoch", math.ceil(epochs))


def _schedule(translation: Translation) -> None:
    names = {"linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant"}
    style = translation.text("lr_scheduler_type", "linear")
    if style in names:
        translation.carry("lr_scheduler_type", "--lr-decay-style", names[style])
    else:
        translation.miss("lr_scheduler_type", f"the shapes here are {', '.join(sorted({*names.values()}))}")


def _policy(translation: Translation) -> None:
    if translation.has("bf16"):
        translation.carry("bf16", "--bf16" if translation.switch("bf16") else "--fp32")
    scale = translation.text("scale_rewards", "group").lower()
    if scale in ("none", "false"):
        translation.carry("scale_rewards", "--advantage-estimator", "grpo", "--disable-grpo-std-normalization")
    elif scale in ("group", "true"):
        why = "A = (r - mean) / (std + 1e-4) there, 1e-6 here"
        translation.differ("scale_rewards", why, "--advantage-estimator", "grpo")
    else:
        why = "the std of the whole batch there, of the group here; --custom-advantage-function-path can compute it"
        translation.differ("scale_rewards", why, "--advantage-estimator", "grpo")
    loss, level = translation.text("loss_type", "dapo"), translation.text("importance_sampling_level", "token")
    low = translation.number("epsilon", 0.2)
    high = translation.number("epsilon_high", low)
    if loss == "cispo":
        translation.carry("epsilon_high", "--policy-loss", "cispo", "--ratio-max", high)
        if translation.has("epsilon"):
            translation.miss("epsilon", "cispo has no lower bound")
    elif loss not in OWN_TOKEN_LOSS:
        if translation.has("epsilon"):
            translation.carry("epsilon", "--eps-clip", low)
        if translation.has("epsilon_high"):
            translation.carry("epsilon_high", "--eps-clip-high", high)
    elif translation.has("epsilon") or translation.has("epsilon_high"):
        translation.miss(
            "epsilon" if translation.has("epsilon") else "epsilon_high", f"belongs to the token loss of {loss}"
        )
    _own_loss(translation, loss)
    if level == "sequence" and loss not in OWN_TOKEN_LOSS:
        translation.carry("importance_sampling_level", "--policy-loss", "gspo")
    elif translation.has("importance_sampling_level"):
        translation.carry("importance_sampling_level")
    _delta(translation, 1 + high)
    if translation.number("beta", 0.0):
        why = "added to the token losses there, so it follows loss_type; a sample mean here"
        beta = translation.number("beta", 0.0)
        translation.differ("beta", why, "--use-kl-loss", "--kl-loss-coef", beta, "--kl-loss-type", "k3")
    elif translation.has("beta"):
        translation.carry("beta")
    _kl_correction(translation, level)
    _top_entropy(translation)
    _reference(translation)
    _adaptive_entropy(translation)


def _own_loss(translation: Translation, loss: str) -> None:
    flags = {name: flag for settings in OWN_TOKEN_LOSS.values() for name, flag in settings.items()}
    for name in filter(translation.has, flags):
        if name in OWN_TOKEN_LOSS.get(loss, {}):
            translation.carry(name, flags[name], translation.number(name, 1.0))
        else:
            translation.miss(name, f"belongs to another loss_type than {loss}")


def _kl_correction(translation: Translation, level: str) -> None:
    switch, flag = "use_bias_correction_kl", "--use-unbiased-kl"
    if not translation.switch(switch):
        if translation.has(switch):
            translation.carry(switch)
    elif not translation.number("beta", 0.0):
        translation.miss(switch, "without beta it has no effect")
    elif level == "sequence":
        translation.differ(switch, "weights the KL by the ratio of the sequence there, of each token here", flag)
    else:
        translation.carry(switch, flag)


def _top_entropy(translation: Translation) -> None:
    key, flag = "top_entropy_quantile", "--top-entropy-quantile"
    share = translation.number(key, 1.0)
    if share == 1:
        if translation.has(key):
            translation.carry(key)
    elif share > 0:
        why = "chosen among the tokens of a micro-batch of all processes there, of the whole step here"
        translation.differ(key, why, flag, share)
    else:
        translation.miss(key, "keeps the most uncertain tokens of a micro-batch alone; the fraction here is above 0")


def _reference(translation: Translation) -> None:
    switch, alpha, steps = "sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps"
    if translation.switch(switch) and translation.number("beta", 0.0):
        translation.carry(switch)
        translation.carry(alpha, "--ref-mixup-alpha", translation.number(alpha, 0.6))
        why = "counts optimizer steps there, iterations here"
        translation.differ(steps, why, "--ref-update-interval", int(translation.number(steps, 512)))
        return
    for name in filter(translation.has, (switch, alpha, steps)):
        translation.miss(name, "without sync_ref_model and beta it has no effect")


def _adaptive_entropy(translation: Translation) -> None:
    switch, target = "use_adaptive_entropy", "entropy_target"
    bounds = {"entropy_coef_delta": 0.005, "entropy_coef_min": 0.0, "entropy_coef_max": 1.0}
    if translation.switch(switch):
        translation.carry(switch)
        why = "compared with a mean over tokens there, over samples here"
        translation.differ(target, why, "--entropy-target", translation.number(target, 0.2))
        for name in filter(translation.has, bounds):
            flag = "--" + name.replace("_", "-")
            translation.carry(name, flag, translation.number(name, bounds[name]))
        return
    for name in filter(translation.has, (switch, target, *bounds)):
        translation.miss(name, "without use_adaptive_entropy it has no effect")


def _delta(translation: Translation, bound: float) -> None:
    if not translation.has("delta"):
        return
    delta = translation.number("delta", 0.0)
    if delta > bound:
        translation.carry("delta", "--eps-clip-c", delta)
    else:
        translation.miss(
            "delta", f"at or below 1 + epsilon_high = {bound:g} it also cuts the ratios of positive advantages"
        )


def _correction(translation: Translation) -> None:
    keys = ("mode", "clip_max", "clip_min")
    names = [f"vllm_importance_sampling_{key}" for key in keys]
    translation.take([*names, "vllm_importance_sampling_correction"])
    if not translation.has("use_vllm") or not translation.switch("use_vllm"):
        keys_of_engine = ("vllm_importance_sampling_correction", *names)
        translation.miss_given(keys_of_engine, "without use_vllm it has no effect")
        return
    if not translation.switch("vllm_importance_sampling_correction", True):
        translation.carry("vllm_importance_sampling_correction")
        return
    mode = translation.text(names[0], "sequence_mask")
    level, _, kind = mode.partition("_")
    if level not in ("token", "sequence") or kind not in ("mask", "truncate"):
        translation.fail(names[0], "must be token_ or sequence_, then truncate or mask; correct the value")
    words: list[object] = ["--use-tis", "--tis-level", level, "--tis-mode", "icepop" if kind == "mask" else "truncate"]
    translation.carry(names[0], *words)
    explicit_none = names[1] in translation.document.settings and not translation.has(names[1])
    if explicit_none:
        translation.miss(names[1], "the weight always has an upper bound here (--tis-clip)")
    else:
        translation.carry(names[1], "--tis-clip", translation.number(names[1], 3.0))
    if translation.has(names[2]):
        translation.carry(names[2], "--tis-clip-low", translation.number(names[2], 0.0))


def _objective(translation: Translation) -> Objective:
    loss = translation.text("loss_type", "dapo")
    if loss not in LOSSES:
        translation.fail("loss_type", f"is no loss of {SOURCE}; it has {', '.join(LOSSES)}")
    mode, reduce, formula = LOSSES[loss]
    words = ["--loss-aggregation", mode]
    divisor = 8.0
    if loss == "dr_grpo":
        words += ["--loss-aggregation-divisor", str(translation.count("max_completion_length", 512))]
    if loss == "luspo":
        words += ["--loss-aggregation-divisor", "1"]
        divisor = 1.0
    accumulation = translation.count("gradient_accumulation_steps", 1)
    per_device = translation.count("per_device_train_batch_size", 8)
    per_generation = translation.count("steps_per_generation", accumulation)
    samples = translation.count("generation_batch_size", per_device * per_generation)
    several = per_generation != accumulation or samples != per_device * accumulation
    depends, exact, remarks = "", loss != "bnpo", []
    if loss == "bnpo":
        depends = (
            "micro-batches and ranks: each divides by its own tokens. With one sample in each it is loss_type grpo"
        )
    elif mode == "token_mean" and several:
        reduce, exact = token_mean_of_generation, False
        formula = "Σ m l / (T of the generation batch / its number of steps)"
        depends = "the other steps of the generation, if it has several: each divides by the average number of tokens"
    if loss in OWN_TOKEN_LOSS:
        words = ["--policy-loss", loss, *words]
    if loss == "vespo":
        why = "its ratio is clamped to e^20 there, and with use_vllm the weight of the engine is a part of it"
        translation.differ("loss_type", why, *words)
    elif exact:
        translation.carry("loss_type", *words)
    else:
        translation.differ("loss_type", f"depends on {depends}", *words)
    if translation.number("beta", 0.0):
        remarks.append(KL_FOLLOWS)
    return Objective(
        f"loss_type = {loss}",
        formula,
        SOURCE,
        reduce,
        mode,
        tuple(words),
        divisor,
        depends,
        exact=exact,
        remarks=tuple(remarks),
    )


TRL = Trl()
