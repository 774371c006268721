"""NeMo-RL: YAML, and ``key=value`` overrides in a shell script."""

import math
import re
from dataclasses import replace

from miles.compat.translate.launchers.base import Launcher
from miles.compat.translate.translation import (
    OWN,
    REST,
    Document,
    ForeignObjective,
    Translation,
    apply,
    sequence_mean_of_unmasked,
    token_mean,
    write_critic,
    write_estimator,
    write_images,
    write_kl_in_rewards,
    write_steps,
    write_template,
    write_warmup,
)

OPTIMIZER = "policy.optimizer.kwargs."
MEGATRON = "policy.megatron_cfg."
ENDLESS = 1_000_000  # the default of max_num_steps


class NemoRl(Launcher):
    """NeMo-RL's GRPO and PPO."""

    name = "nemo-rl"
    reads = ("yaml", "shell")

    def recognizes(self, document: Document) -> bool:
        """By the tables of its configuration."""
        return any(key.startswith(("grpo.", "ppo.", "loss_fn.")) for key in document.settings)

    def translate(self, translation: Translation) -> ForeignObjective | None:
        """Translate a configuration of GRPO, or of PPO: the block ``ppo`` has the names of ``grpo``."""
        settings = translation.document.settings
        translation.take(["--config"])
        if any(key.startswith("ppo.") for key in settings):
            start = "grpo.adv_estimator.name"
            renamed = {re.sub(r"^ppo\.", "grpo.", key): each for key, each in settings.items()}
            renamed.setdefault(start, replace(next(iter(settings.values())), key="ppo", value="gae", line=None))
            translation.document = replace(translation.document, settings=renamed)
        parts = (_end, _estimator, _critic, _filter, _async, _lengths, _tokens, _images, _precision, _optimizer)
        for part in (*parts, _schedule, _adapter, _policy, _kl, _correction, _engines, apply):
            translation.attempt(part)
        return translation.attempt(_objective)


def _end(translation: Translation) -> None:
    key, epochs = "grpo.max_num_steps", "grpo.max_num_epochs"
    steps = translation.count(key)
    if steps >= ENDLESS:
        translation.carry(epochs, "--num-epoch", translation.count(epochs))
    else:
        write_steps(translation, key, epochs)


def _estimator(translation: Translation) -> None:
    start = "grpo.adv_estimator."
    key = start + "name"
    name = translation.text(key)
    switches = ("normalize_rewards", "use_leave_one_out_baseline")
    keys = [start + switch if translation.has(start + switch) else f"grpo.{switch}" for switch in switches]
    if name in ("grpo", "gdpo"):
        group = translation.count("grpo.num_generations_per_prompt")
        by_std, leaves_one_out = (translation.switch(each) for each in keys)
        is_rloo = name == "grpo" and leaves_one_out and not by_std
        words = ["--advantage-estimator", "rloo" if is_rloo else name]
        if leaves_one_out and not is_rloo and group > 1:
            why = (
                "mean and std of the group leave out the sample's own reward there, so the only right answer has no std"
            )
            translation.carry(keys[1], *words, why=why, worst=1)
        elif name == "gdpo" and not by_std:
            why = "only the mean is subtracted there, and each reward is also divided by its std here"
            translation.carry(keys[0], *words, why=why)
        else:
            words += [] if by_std or leaves_one_out else ["--disable-grpo-std-normalization"]
            translation.carry(key, *words)
    elif name == "reinforce_plus_plus":
        ending = "_baseline" if translation.switch(start + "minus_baseline") else ""
        write_estimator(translation, key, "--advantage-estimator", name + ending, "--normalize-advantages")
    elif name == "gae":
        adaptive = translation.number(start + "length_adaptive_alpha")
        words = ["--advantage-estimator", "vapo" if adaptive else "ppo"]
        words += ["--normalize-advantages"] if translation.switch(start + "normalize_advantages") else []
        write_estimator(translation, key, *words, "--gamma", translation.number(start + "gae_gamma"))
        whole = translation.number(start + "gae_lambda")
        value, policy = (translation.number(f"{start}gae_lambda_{end}", whole) for end in ("value", "policy"))
        if adaptive:
            translation.carry(start + "length_adaptive_alpha", "--vapo-alpha", adaptive, "--critic-lambd", value)
        else:
            extra = ["--critic-lambd", value] if value != policy else []
            translation.carry(start + "gae_lambda", "--lambd", policy, *extra)
    else:
        translation.fail(key, "is no estimator here; write yours with --custom-advantage-function-path")
    names = ("minus_baseline", "gae_lambda", "gae_gamma", "normalize_advantages", "length_adaptive_alpha")
    translation.take([*keys, *(start + each for each in (*switches, *names, "gae_lambda_value", "gae_lambda_policy"))])
    translation.take([f"grpo.{each}" for each in switches])


_OF_ADAM = tuple(f"optimizer.kwargs.{name}" for name in ("weight_decay", "betas", "eps"))
_OF_CRITIC = tuple(f"value.{name}" for name in ("max_grad_norm", *_OF_ADAM, "model_name", "train_global_batch_size"))


def _critic(translation: Translation) -> None:
    if translation.text("grpo.adv_estimator.name") == "gae":
        is_megatron = translation.switch("value.megatron_cfg.enabled")
        key = "value.megatron_cfg.optimizer.lr" if is_megatron else "value.optimizer.kwargs.lr"
        if translation.has(key):
            translation.carry(key, "--critic-lr", translation.number(key))
        clip = "value_loss_fn.cliprange"
        if translation.has(clip):
            translation.carry(clip, "--value-clip", translation.number(clip))
        names = [key.removeprefix("value.") for key in _OF_CRITIC if translation.has(key)]
        write_critic(translation, "policy.", "value.", names)
    else:
        translation.take(["value.scheduler", *_OF_CRITIC])
    translation.take(["value.megatron_cfg.optimizer.lr", "value.optimizer.kwargs.lr", "value_loss_fn.cliprange"])
    passes = "grpo.critic_ppo_epochs"
    if translation.has(passes) and translation.number(passes) == translation.number("grpo.ppo_epochs"):
        translation.take([passes])


def _filter(translation: Translation) -> None:
    key = "grpo.use_dynamic_sampling"
    if translation.switch(key):
        words = ["--dynamic-sampling-filter-path", "miles.rollout.filters:check_reward_nonzero_std"]
        more = translation.number("grpo.batch_multiplier")
        if more > 1:
            prompts = math.ceil(translation.count("grpo.num_prompts_per_step") * more)
            words += ["--over-sampling-batch-size", str(prompts)]
        translation.carry(key, *words)
    translation.take(["grpo.dynamic_sampling_max_gen_batches", "grpo.batch_multiplier"])


def _async(translation: Translation) -> None:
    for start in ("grpo.async_grpo.", "grpo.async_ppo."):
        if translation.switch(start + "enabled", False):
            age = start + "max_trajectory_age_steps"
            translation.carry(start + "enabled", "--async-steps", translation.count(age, 1))
        else:
            translation.take([start + "in_flight_weight_updates"])
        translation.take([start + "enabled", start + "max_trajectory_age_steps"])


def _lengths(translation: Translation) -> None:
    context = "policy.max_total_sequence_length"
    bounds = {"policy.generation.max_new_tokens": "--rollout-max-response-len"}
    bounds["data.max_input_seq_length"] = "--rollout-max-prompt-len"
    most = translation.number(context) or math.inf
    if most < math.inf:
        translation.carry(context, "--rollout-max-context-len", most)
    for key, flag in bounds.items():
        if translation.has(key):  # a sequence has a token of the prompt and one of the response at least
            words = flag, min(translation.count(key), most - 1)
            why = "longer prompts stay in the batch without a loss there, dropped here"
            translation.carry(key, *words, why=why if key.startswith("data.") else "")


def _tokens(translation: Translation) -> None:
    for key in ("policy.dynamic_batching.", "policy.sequence_packing."):
        if translation.switch(key + "enabled") and translation.has(key + "train_mb_tokens"):
            tokens = translation.count(key + "train_mb_tokens")
            translation.carry(key + "enabled", "--use-dynamic-batch-size", "--max-tokens-per-gpu", tokens)
            return
    key = "policy.train_micro_batch_size"
    if translation.has(key):
        translation.carry(key, "--micro-batch-size", translation.count(key))


def _images(translation: Translation) -> None:
    template = translation.document.settings.get("policy.tokenizer.chat_template")
    if template is None or template.value is not None:
        translation.carry("the rows", "--apply-chat-template")
        write_template(translation, "policy.tokenizer.chat_template_kwargs")
    why = "images come with the set there: name their column"
    write_images(translation, "the column of images", "images", "policy.model_name", why)


def _precision(translation: Translation) -> None:
    key = "policy.precision"
    precisions = {"bfloat16": "--bf16", "float32": "--fp32"}
    if translation.has(key):
        name = translation.text(key)
        if name not in precisions:
            translation.fail(key, "the precisions here are bfloat16 and float32")
        translation.carry(key, precisions[name])


def _optimizer(translation: Translation) -> None:
    betas = OPTIMIZER + "betas"
    if translation.switch(MEGATRON + "enabled"):
        start = MEGATRON + "optimizer."
        names = {"lr": "--lr", "weight_decay": "--weight-decay", "adam_eps": "--adam-eps"}
        names |= {"clip_grad": "--clip-grad", "adam_beta1": "--adam-beta1", "adam_beta2": "--adam-beta2"}
        if translation.has(start + "clip_grad"):
            translation.idle(["policy.max_grad_norm"], "optimizer.clip_grad takes precedence")
    else:
        start, names = OPTIMIZER, {"lr": "--lr", "weight_decay": "--weight-decay", "eps": "--adam-eps"}
        if pair := translation.pair(betas):
            translation.carry(betas, "--adam-beta1", pair[0], "--adam-beta2", pair[1])
    for name, flag in names.items():
        if translation.has(start + name):
            translation.carry(start + name, flag, translation.number(start + name))
    # The optimizer of the other backend has no effect.
    every = ("lr", "weight_decay", "eps", "betas", "adam_eps", "adam_beta1", "adam_beta2", "min_lr", "clip_grad")
    translation.take(prefix + name for prefix in (OPTIMIZER, MEGATRON + "optimizer.") for name in every)


def _schedule(translation: Translation) -> None:
    key, start = "policy.scheduler", MEGATRON + "scheduler."
    shape, decay, warmup, warmup_start = (
        start + name for name in ("lr_decay_style", "lr_decay_iters", "lr_warmup_iters", "lr_warmup_init")
    )
    if translation.switch(MEGATRON + "enabled"):
        style = translation.text(shape, "constant").lower()
        if style not in ("constant", "linear", "cosine"):
            translation.fail(shape, "the shapes here are constant, linear, cosine")
        steps = _steps_of_iteration(translation)
        words: list[object] = ["--lr-decay-style", style]
        if style != "constant":
            words += ["--min-lr", translation.number(MEGATRON + "optimizer.min_lr")]
            if translation.has(decay):
                words += ["--lr-decay-iters", int(translation.number(decay)) * steps]
        warm = translation.number(warmup)
        translation.carry(shape, *words)
        if warm:
            write_warmup(translation, warmup, warm, steps)
        if warm and (first := translation.number(warmup_start)):
            translation.carry(warmup_start, why=f"the warm-up begins at {first:g} there, at 0 here")
    elif not translation.has(key) and not translation.has(key + ".name"):
        translation.carry(key, "--lr-decay-style", "constant")
    else:
        _torch_schedule(translation, key)
    translation.take([key, shape, decay, warmup, warmup_start])


def _steps_of_iteration(translation: Translation) -> int:
    """Return the optimizer steps of an iteration, which the schedules count there."""
    samples = translation.count("grpo.num_prompts_per_step") * translation.count("grpo.num_generations_per_prompt")
    passes = translation.count("grpo.ppo_epochs")
    return max(samples // translation.count("policy.train_global_batch_size"), 1) * passes


_NUMBERS = ("start_factor", "end_factor", "total_iters", "factor", "eta_min", "T_max")


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _torch_schedule(translation: Translation, key: str) -> None:
    """Translate a chain of PyTorch's schedulers: a linear warm-up, then a constant or a cosine."""
    stages = translation.raw(key, [])
    steps = _steps_of_iteration(translation)
    if not isinstance(stages, list):
        translation.fail(key, "must be a list of PyTorch's schedulers")
    if translation.has(key + ".name"):
        prefix = key + ".kwargs."
        names = [name for name in translation.document.settings if name.startswith(prefix)]
        arguments = {name[len(prefix) :]: translation.raw(name) for name in names}
        stages = [{"name": translation.text(key + ".name"), "kwargs": arguments}]
    words: list[object] = []
    shape, why, warm = "constant", "", 0
    for stage in stages:
        name = str(stage.get("name", "")).rpartition(".")[2] if isinstance(stage, dict) else "?"
        kwargs = stage.get("kwargs") or {} if isinstance(stage, dict) else {}
        if not isinstance(kwargs, dict) or not all(_is_finite(kwargs.get(number, 0)) for number in _NUMBERS):
            translation.fail(key, f"the kwargs of {name or 'a scheduler'} must be finite numbers")
        if name == "LinearLR" and kwargs.get("end_factor", 1.0) == 1.0:
            warm = int(kwargs.get("total_iters", 5))
            words += ["--lr-warmup-iters", warm * steps]
            first = kwargs.get("start_factor", 1 / 3)
            why = f"the warm-up begins at {first:.3g} of the learning rate there, at 0 here"
            why += f", and counts iterations of {steps} optimizer steps" if steps > 1 else ""
        elif name == "CosineAnnealingLR":
            shape = "cosine"
            whole = warm + int(kwargs.get("T_max", 0))  # here the decay includes the warm-up
            words += ["--min-lr", kwargs.get("eta_min", 0), "--lr-decay-iters", whole * steps]
        elif name not in ("ConstantLR", "") or (name == "ConstantLR" and kwargs.get("factor", 1.0) != 1.0):
            translation.miss(key, f"{name}: the shapes here are constant, linear, cosine, after a linear warm-up")
            return
    written = key if translation.has(key) else key + ".name"
    translation.carry(written, "--lr-decay-style", shape, *words, why=why)


def _adapter(translation: Translation) -> None:
    starts = ("policy.dtensor_cfg.lora_cfg.", MEGATRON + "peft.")
    start = starts[1] if translation.switch(MEGATRON + "enabled") else starts[0]
    if translation.switch(start + "enabled"):
        words: list[object] = ["--lora-rank", translation.number(start + "dim", 8)]
        words += ["--lora-alpha", translation.number(start + "alpha", 32)]
        words += ["--lora-dropout", translation.number(start + "dropout", 0)]
        modules = translation.raw(start + "target_modules")
        if modules:
            words += ["--target-modules", *(modules if isinstance(modules, list) else [modules])]
        translation.carry(start + "enabled", *words)
    names = ("enabled", "dim", "alpha", "dropout", "target_modules", "match_all_linear")
    translation.take(each + name for each in starts for name in names)


def _policy(translation: Translation) -> None:
    ends = "loss_fn.ratio_clip_min", "loss_fn.ratio_clip_max"
    low, high = map(translation.number, ends)
    if translation.switch("loss_fn.use_cispo"):
        words = ("--policy-loss", "cispo", "--ratio-max", f"{1 + high:.12g}", "--ratio-min", f"{max(1 - low, 0):.12g}")
        translation.carry("loss_fn.use_cispo", *words)
    else:
        if translation.switch("loss_fn.sequence_level_importance_ratios"):
            translation.carry("loss_fn.sequence_level_importance_ratios", "--policy-loss", "gspo")
        translation.carry(ends[0], "--eps-clip", low)
        translation.carry(ends[1], "--eps-clip-high", high)
        dual = "loss_fn.ratio_clip_c"
        if translation.has(dual):
            translation.carry(dual, "--eps-clip-c", translation.number(dual))
    translation.take(ends)
    key = "loss_fn.positive_example_nll_weight"
    if weight := translation.number(key):
        translation.miss(
            key, f"{weight:g} times the negative log-likelihood of correct answers is a term of the loss there"
        )


def _kl(translation: Translation) -> None:
    weight, kind = "loss_fn.reference_policy_kl_penalty", "loss_fn.reference_policy_kl_type"
    clamps = {"inputs": "loss_fn.kl_input_clamp_value", "values": "loss_fn.kl_output_clamp_value"}
    coefficient, name = translation.number(weight), translation.text(kind)
    by_engine = "loss_fn.use_on_policy_kl_approximation"
    estimator = translation.text("grpo.adv_estimator.name")
    if coefficient and translation.switch("loss_fn.use_kl_in_reward"):
        if estimator in ("grpo", "gdpo"):
            translation.idle([weight], f"no part of the loss with use_kl_in_reward, and {estimator} does not read it")
        else:
            there = OWN if estimator == "reinforce_plus_plus" else REST
            write_kl_in_rewards(translation, weight, coefficient, name, there)
    elif coefficient:
        ratio = "the ratio to the engine" if translation.switch(by_engine) else "1"
        why = f"weighted by {ratio} there, by the ratio to the old policy here; before PR 2506 (May 2026) that weight "
        why += "has no gradient there: drop --use-unbiased-kl for such a release"
        for part, key in clamps.items():
            why += "" if translation.is_null(key) else f"; its {part} are clamped to {translation.number(key):g} there"
        words = ("--use-kl-loss", "--kl-loss-coef", coefficient, "--kl-loss-type", name, "--use-unbiased-kl")
        translation.carry(weight, *words, why=why)
    translation.take([kind, "loss_fn.use_kl_in_reward", by_engine, *clamps.values()])


def _correction(translation: Translation) -> None:
    key, kind = "loss_fn.use_importance_sampling_correction", "loss_fn.truncated_importance_sampling_type"
    high, low = (f"loss_fn.truncated_importance_sampling_ratio{end}" for end in ("", "_min"))
    if translation.switch(key):
        name = translation.text(kind, "tis") if translation.has(high) else "none"  # which has no effect alone
        if name not in ("none", "tis", "icepop", "seq-mask-tis"):
            translation.fail(kind, "must be tis, icepop or seq-mask-tis")
        top, bottom = translation.number(high, 1e6), translation.number(low)
        level = "sequence" if translation.switch("loss_fn.sequence_level_importance_ratios") else "token"
        mode = "icepop" if name == "icepop" else "truncate"
        words: list[object] = ["--use-tis", "--tis-level", level, "--tis-mode", mode]
        if name == "seq-mask-tis":
            words += ["--tis-clip", 1e6, "--use-rs", "--rs-level", "geometric"]
            words += ["--rs-lower-bound", bottom, "--rs-upper-bound", top]
        else:
            words += ["--tis-clip", top, *(["--tis-clip-low", bottom] if bottom and name != "none" else [])]
        translation.carry(key, *words)
    translation.take([kind, high, low])


def _engines(translation: Translation) -> None:
    if translation.switch(MEGATRON + "enabled"):
        translation.carry(MEGATRON + "enabled", "--train-backend", "megatron")
        translation.take(["policy.dtensor_cfg.context_parallel_size"])
    else:  # what the other backend would do
        names = {*translation.document.settings, *translation.table.rows}
        translation.take(key for key in names if key.startswith(MEGATRON))


def _objective(translation: Translation) -> ForeignObjective:
    key, source = "loss_fn.token_level_loss", translation.table.source
    if translation.switch(key):
        words = ("--loss-aggregation", "token_mean")
        translation.carry(key, *words)
        return ForeignObjective(f"{key} = true", "Σ m l / (T + 1e-8)", source, token_mean, "token_mean", words)
    words = ("--loss-aggregation", "sample_mean")
    translation.carry(key, *words)
    return ForeignObjective(
        f"{key} = false",
        "1/B' Σ_i 1/(M_i + 1e-8) Σ_t m l, B' = samples that sample_mask keeps",
        source,
        sequence_mean_of_unmasked,
        "sample_mean",
        words,
        depends="samples that sample_mask drops: they are left out of B'",
        exact=False,
    )


NEMO_RL = NemoRl()
