"""TRL: ``GRPOConfig`` as JSON, YAML, keyword arguments, or flags of a script."""

import math
import re
from dataclasses import replace

from miles.base.flags import flag_name
from miles.compat.translate.launchers.base import Launcher
from miles.compat.translate.translation import (
    Document,
    ForeignObjective,
    Reduction,
    Translation,
    apply,
    by_key,
    over_longest,
    parts_of,
    sequence_mean,
    sequence_sum_mean,
    table_of,
    token_mean,
    token_mean_of_generation,
    token_mean_of_micro_batches,
    write_images,
    write_no_warmup,
    write_support,
    write_template,
)
from miles.objective.aggregation import Aggregation

RECOGNIZED, SHAPES, OWN = table_of("trl").names.values()

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


class Trl(Launcher):
    """TRL's ``GRPOConfig``."""

    name = "trl"
    reads = ("json", "yaml", "python", "shell")

    def recognizes(self, document: Document) -> bool:
        """Python is TRL's; other files by the names of ``GRPOConfig``."""
        return document.kind == "python" or any(key in RECOGNIZED for key in document.settings)

    def translate(self, translation: Translation) -> ForeignObjective | None:
        """Translate ``GRPOConfig``."""
        settings = by_key(part for each in translation.document.settings.values() for part in parts_of(each))
        translation.document = replace(translation.document, settings=settings)
        translation.take(["--config", "--config-path"])
        parts = (_prompts, _reports, _step, _generation, _end, _sampling, _precision, _adapter, _schedule, _advantages)
        for part in (*parts, _policy, _own_loss, _delta, _kl, _top_entropy, _reference, _adaptive_entropy):
            translation.attempt(part)
        translation.attempt(_correction)
        translation.attempt(apply)
        translation.attempt(write_support)
        return translation.attempt(_objective)


def _prompts(translation: Translation) -> None:
    if not translation.has("dataset_prompt_column"):
        translation.carry("the column of prompts", "--input-key", "prompt")
    why = "a column image or images is found by its name there"
    write_images(translation, "the column of images", "images", translation.first("model", "model_name_or_path"), why)
    write_template(translation, "chat_template_kwargs")
    if "--multimodal-keys" in translation.words or translation.has("system_prompt") or translation.has("chat_template"):
        translation.carry("the rows", "--apply-chat-template")
    else:
        translation.carry("the rows", why="messages are rendered by the chat template there: add --apply-chat-template")


def _reports(translation: Translation) -> None:
    names = translation.raw("report_to")
    chosen = {*map(str, names if isinstance(names, list) else [names])}
    if {"wandb", "all"} & chosen:
        translation.carry("report_to", "--use-wandb")
    for name in sorted({"trackio", "swanlab"} & chosen):
        translation.carry("report_to", "--report-to", name)


def _processes(translation: Translation) -> int | None:
    """Return the number of trainer processes, if the file or its command states it."""
    words = " ".join(translation.document.words).replace("-", "_")
    names = ("num_processes", "nproc_per_node|num_gpus", "nnodes|num_nodes")
    matches = [re.search(rf"__(?:{name})[= ](\d+)", words) for name in names]
    whole, each, nodes = (int(match[1]) if match else None for match in matches)
    if whole or each:
        return whole or (each or 1) * (nodes or 1)
    return translation.count("num_processes") if translation.has("num_processes") else None


def _assumed(translation: Translation) -> int:
    """Return the number of processes, or else the smallest whose generation is a whole number of groups."""
    group, samples = translation.count("num_generations"), _of_process(translation)
    return _processes(translation) or group // math.gcd(group, samples)


def _of_process(translation: Translation) -> int:
    """Return the samples of a generation on one process."""
    steps = translation.count("steps_per_generation", translation.count("gradient_accumulation_steps"))
    return translation.count("per_device_train_batch_size") * steps


def _per_step(translation: Translation) -> int:
    """Return the samples of an optimizer step."""
    devices = translation.count("per_device_train_batch_size")
    return devices * translation.count("gradient_accumulation_steps") * _assumed(translation)


def _per_generation(translation: Translation) -> int:
    """Return the samples of a generation."""
    return translation.count("generation_batch_size", _of_process(translation) * _assumed(translation))


def _step(translation: Translation) -> None:
    key, samples = "per_device_train_batch_size", _per_step(translation)
    words = ("--global-batch-size", samples, "--micro-batch-size", translation.count(key))
    if _processes(translation):
        translation.carry(key, *words)
        translation.take(["num_processes"])
        return
    number = _assumed(translation)
    note = (
        f"{samples // number} samples of a step on each process: the file has no number of processes, and the flags "
        f"are for {number}. With P of them, multiply --global-batch-size by P / {number}, and --rollout-batch-size as "
        "well unless generation_batch_size is set"
    )
    translation.carry(key, *words, why=note, worst=1)


def _generation(translation: Translation) -> None:
    group, samples = translation.count("num_generations"), _per_generation(translation)
    sizes = ("generation_batch_size", "steps_per_generation")
    key = next(filter(translation.has, sizes), "gradient_accumulation_steps")
    if samples % group:
        why = f"{samples} samples of a generation are no whole number of groups of {group}"
        translation.carry(key, why=why + "; give --rollout-batch-size, the prompts of an iteration", worst=1)
    elif samples % _per_step(translation):
        step = _per_step(translation)
        why = f"{samples} samples of a generation are no whole number of steps of {step} there, which they must be here"
        translation.carry(key, "--rollout-batch-size", samples // group, why=why, worst=1)
    else:
        translation.carry(key, "--rollout-batch-size", samples // group)


def _steps_of_iteration(translation: Translation) -> int:
    """Return the optimizer steps with one generation."""
    once = max(_per_generation(translation) // _per_step(translation), 1)
    return once * translation.count("num_iterations")


def _end(translation: Translation) -> None:
    steps, epochs = translation.number("max_steps"), translation.number("num_train_epochs")
    if steps > 0:
        translation.carry("max_steps", "--num-rollout", math.ceil(steps / _steps_of_iteration(translation)))
    elif epochs == int(epochs):
        translation.carry("num_train_epochs", "--num-epoch", epochs)
    else:
        why = f"{epochs:g} passes over the prompts there, whole ones here; --num-rollout gives the number of iterations"
        translation.carry("num_train_epochs", "--num-epoch", math.ceil(epochs), why=why)


def _sampling(translation: Translation) -> None:
    top_k = translation.number("top_k")
    translation.carry("top_k", "--rollout-top-k", int(top_k) if top_k > 0 else -1)
    if translation.switch("use_vllm"):
        translation.carry("use_vllm", "--rollout-engine", "vllm")
        if translation.text("vllm_mode") == "colocate":
            translation.carry("vllm_mode", "--colocate")


def _precision(translation: Translation) -> None:
    if not translation.switch("fp16"):  # TRL's default is bf16 unless fp16 is asked for
        translation.carry("bf16", "--bf16" if translation.switch("bf16", True) else "--fp32")


def _adapter(translation: Translation) -> None:
    keys = ("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules")
    if translation.switch("use_peft"):
        words: list[object] = ["--lora-rank", translation.number("lora_r", 16)]
        words += ["--lora-alpha", translation.number("lora_alpha", 32)]
        words += ["--lora-dropout", translation.number("lora_dropout", 0.05)]
        modules = translation.raw("lora_target_modules")
        if modules and modules != "all-linear":
            names = modules if isinstance(modules, list) else [modules]
            words += ["--target-modules", *(str(name).strip(",") for name in names)]
        translation.carry("use_peft", *words)
        if not modules:
            why = "peft adapts the layers that it lists for the type of the model: these two for Llama, Qwen and Gemma"
            translation.carry("use_peft", "--target-modules", "q_proj", "v_proj", why=why)
        translation.take(["dtype", "torch_dtype"])  # adapters are in fp32 there too
    translation.take(keys)


def _schedule(translation: Translation) -> None:
    key, extra = "lr_scheduler_type", "lr_scheduler_kwargs."
    style = translation.text(key)
    if style not in SHAPES:
        translation.miss(key, f"{style}: the shapes here are {', '.join(sorted({*SHAPES.values()}))}")
        return
    rate = translation.number("learning_rate")
    least = translation.number(extra + "min_lr", rate * translation.number(extra + "min_lr_rate"))
    translation.carry(key, "--lr-decay-style", SHAPES[style], *(["--min-lr", f"{least:.12g}"] if least else []))
    steps, ratio = translation.number("warmup_steps"), translation.number("warmup_ratio")
    if style == "constant":
        write_no_warmup(translation, ["warmup_steps", "warmup_ratio"])
    elif steps >= 1:
        translation.carry("warmup_steps", "--lr-warmup-iters", int(steps))
    elif steps or ratio:  # a number below 1 is a share of all steps
        translation.carry("warmup_steps" if steps else "warmup_ratio", "--lr-warmup-fraction", steps or ratio)


def _advantages(translation: Translation) -> None:
    key = "scale_rewards"
    scale = translation.text(key).lower()
    several = translation.text("multi_objective_aggregation")
    if several not in ("sum_then_normalize", "normalize_then_sum"):
        translation.fail("multi_objective_aggregation", "must be sum_then_normalize or normalize_then_sum")
    if several == "normalize_then_sum":
        translation.carry("multi_objective_aggregation", "--advantage-estimator", "gdpo")
        translation.take([key])
    elif scale in ("none", "false"):
        translation.carry(key, "--advantage-estimator", "grpo", "--disable-grpo-std-normalization")
    elif scale in ("group", "true"):
        why = "divided by std + 1e-4 there and by std + 1e-6 here: 0.02 % less at a std of 0.5"
        translation.carry(key, "--advantage-estimator", "grpo", why=why)
    elif scale == "batch":
        why = "the std of one generation over all processes there, of the rewards of an iteration here"
        translation.carry(key, "--advantage-estimator", "grpo_batch_std", why=why)
    else:
        translation.fail(key, "must be group, batch or none")


def _policy(translation: Translation) -> None:
    loss, level = translation.text("loss_type"), translation.text("importance_sampling_level")
    if level not in ("token", "sequence"):
        translation.fail("importance_sampling_level", "must be token or sequence")
    low = translation.number("epsilon")
    high = translation.number("epsilon_high", low)
    if loss == "cispo":
        translation.carry("epsilon_high", "--policy-loss", "cispo", "--ratio-max", high)
    elif loss not in OWN:
        translation.carry("epsilon", "--eps-clip", low)
        translation.carry("epsilon_high", "--eps-clip-high", high)
        if level == "sequence":
            translation.carry("importance_sampling_level", "--policy-loss", "gspo")
    if level == "sequence" and loss in ("cispo", "sapo"):
        why = f"{loss} takes the ratio of the sequence there, of each token here"
        translation.carry("importance_sampling_level", why=why, worst=0)
    translation.take(["epsilon", "epsilon_high", "importance_sampling_level"])


def _own_loss(translation: Translation) -> None:
    loss = translation.text("loss_type")
    for name, flag in OWN.get(loss, {}).items():
        translation.carry(name, flag, translation.number(name))
    translation.take(name for settings in OWN.values() for name in settings)


def _delta(translation: Translation) -> None:
    if not translation.has("delta"):
        return
    delta = translation.number("delta")
    bound = 1 + translation.number("epsilon_high", translation.number("epsilon"))
    if delta > bound:
        translation.carry("delta", "--eps-clip-c", delta)
    else:
        why = f"at or below 1 + epsilon_high = {bound:g} it also cuts the ratios of positive advantages"
        translation.carry("delta", why=why, worst=0)


def _kl(translation: Translation) -> None:
    beta, switch = translation.number("beta"), "use_bias_correction_kl"
    if beta:
        words: list[object] = ["--use-kl-loss", "--kl-loss-coef", beta, "--kl-loss-type", "k3"]
        words += ["--use-unbiased-kl"] if translation.switch(switch) else []
        why = ""
        if "--use-unbiased-kl" in words and translation.text("importance_sampling_level") == "sequence":
            why = "the KL is weighted by the ratio of the sequence there, of each token here"
        elif translation.text("loss_type") in ("dr_grpo", "luspo", "bnpo"):
            why = "the mean of the KL follows loss_type there; a sample mean, or a token mean with token_mean, here"
        translation.carry("beta", *words, why=why, worst=1)
    translation.take([switch])


def _top_entropy(translation: Translation) -> None:
    key, flag = "top_entropy_quantile", "--top-entropy-quantile"
    share = translation.number(key)
    if 0 < share < 1:
        why = "chosen among the tokens of a micro-batch of all processes there, of the whole step here"
        translation.carry(key, flag, share, why=why)
    elif not 0 <= share <= 1:
        translation.fail(key, "must be between 0 and 1")
    elif share == 0:
        translation.miss(key, "keeps the most uncertain tokens of a micro-batch alone; the fraction here is above 0")
    translation.take([key])


def _reference(translation: Translation) -> None:
    switch, alpha, steps = "sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps"
    if translation.switch(switch) and translation.number("beta"):
        translation.carry(alpha, "--ref-mixup-alpha", translation.number(alpha))
        count, each = translation.count(steps), _steps_of_iteration(translation)
        why = f"counts optimizer steps there, iterations of {each} here" if count % each else ""
        translation.carry(steps, "--ref-update-interval", max(count // each, 1), why=why)
    translation.take([alpha, steps])


def _adaptive_entropy(translation: Translation) -> None:
    switch, target = "use_adaptive_entropy", "entropy_target"
    bounds = ("entropy_coef_delta", "entropy_coef_min", "entropy_coef_max")
    if translation.switch(switch):
        translation.carry(target, "--entropy-target", translation.number(target))
        for name in bounds:
            translation.carry(name, flag_name(name), translation.number(name))
    translation.take([target, *bounds])


def _correction(translation: Translation) -> None:
    start = "vllm_importance_sampling_"
    switch, mode, high, low, cap = (start + name for name in ("correction", "mode", "clip_max", "clip_min", "cap"))
    if translation.switch("use_vllm") and translation.switch(switch):
        level, _, kind = translation.text(mode).partition("_")
        if level not in ("token", "sequence") or kind not in ("mask", "truncate"):
            translation.fail(mode, "must be token_ or sequence_, then truncate or mask; correct the value")
        words = ["--use-tis", "--tis-level", level, "--tis-mode", "icepop" if kind == "mask" else "truncate"]
        translation.carry(mode, *words)
        bound = cap if translation.has(cap) else high  # the earlier name of the bound
        if translation.is_null(bound):
            translation.miss(bound, "the weight always has an upper bound here (--tis-clip)")
        else:
            translation.carry(bound, "--tis-clip", translation.number(bound))
        if translation.has(low):
            translation.carry(low, "--tis-clip-low", translation.number(low))
    translation.take([switch, mode, high, low, cap])


def _objective(translation: Translation) -> ForeignObjective:
    loss = translation.text("loss_type")
    if loss not in LOSSES:
        translation.fail("loss_type", f"is no loss of {translation.table.source}; it has {', '.join(LOSSES)}")
    mode, reduce, formula = LOSSES[loss]
    words = ["--loss-aggregation", mode]
    divisor = 8.0
    if loss == "dr_grpo":
        words += ["--loss-aggregation-divisor", str(translation.count("max_completion_length"))]
    if loss == "luspo":
        words += ["--loss-aggregation-divisor", "1"]
        divisor = 1.0
    depends = ""
    exact = loss != "bnpo"
    if loss == "bnpo":
        depends = "micro-batches and ranks: each divides by its own tokens"
    elif mode == "token_mean" and _per_generation(translation) != _per_step(translation):
        reduce, exact = token_mean_of_generation, False
        formula = "Σ m l / (T of the generation batch / its number of steps)"
        depends = "the other steps of the generation, if it has several: each divides by the average number of tokens"
    if loss in OWN:
        words = ["--policy-loss", loss, *words]
    why = "its ratio is clamped to e^20 there, and with use_vllm the weight of the engine is a part of it"
    translation.carry("loss_type", *words, why=why if loss == "vespo" else "")
    name, source = f"loss_type = {loss}", translation.table.source
    return ForeignObjective(name, formula, source, reduce, mode, tuple(words), divisor, depends, exact)


TRL = Trl()
