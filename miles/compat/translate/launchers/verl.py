"""verl: Hydra YAML, and ``key=value`` overrides in a shell script."""

import math

from miles.base.flags import flag_name
from miles.compat.translate.launchers.base import Launcher
from miles.compat.translate.translation import (
    REST,
    Document,
    ForeignObjective,
    Reduction,
    Translation,
    apply,
    named_sets,
    over_longest,
    over_padded_width,
    same,
    sequence_mean,
    sequence_sum_mean,
    table_of,
    token_mean,
    token_sum,
    write_critic,
    write_estimator,
    write_images,
    write_kl_in_rewards,
    write_sets,
    write_steps,
    write_support,
    write_template,
    write_warmup,
)
from miles.config.components import ENGINES
from miles.objective.aggregation import Aggregation

ESTIMATORS, POLICY_LOSSES, KL_TYPES, OWN = table_of("verl").names.values()
ACTOR, ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
PROGRAMS = ("verl.trainer.main_ppo", "recipe.dapo.main_dapo", "recipe.dapo.src.main_dapo")
FILES = tuple(f"/{program.replace('.', '/')}.py" for program in PROGRAMS)
POLICY_LOSS = ACTOR + "policy_loss."
WHOLE = "all of the answer, before the mean of the group is subtracted"
FOLLOWS = "its mean follows loss_agg_mode there; a sample mean here"
CLIPPED = ("vanilla", "gspo", "bypass_mode", "clip_cov")  # policy losses with --eps-clip and --eps-clip-high
MEANS = ("token-mean", "seq-mean-token-mean")  # the modes in which a KL has the same mean here
# Policy losses with a mode that loss_agg_mode does not change, as in the release: sapo is hard-coded, geo_mean is the
# mean of sequences
OWN_MODE = {"sapo": "seq-mean-token-mean", "geo_mean": "seq-mean-token-mean"}

# loss_agg_mode -> mode, reduction, formula
MODES: dict[str, tuple[Aggregation, Reduction, str]] = {
    "token-mean": ("token_mean", token_mean, "1/T Σ m l"),
    "token-sum": ("constant", token_sum, "Σ m l"),
    "seq-mean-token-mean": ("sample_mean", sequence_mean, "1/B Σ_i 1/(M_i + 1e-8) Σ_t m l"),
    "seq-mean-token-sum": ("constant", sequence_sum_mean, "1/B Σ_i Σ_t m l"),
    "seq-mean-token-sum-norm": ("constant", over_longest(sequence_sum_mean), "1/(L B) Σ m l, L = loss_scale_factor"),
}


class Verl(Launcher):
    """verl's PPO trainer."""

    name = "verl"
    reads = ("yaml", "shell")

    def recognizes(self, document: Document) -> bool:
        """By the names of its configuration, or its module in a command."""
        names = ("actor_rollout_ref.", "algorithm.adv_estimator")
        return any(key.startswith(names) for key in document.settings) or any("verl." in w for w in document.words)

    def translate(self, translation: Translation) -> ForeignObjective | None:
        """Translate the settings of ``ppo_trainer.yaml``."""
        translation.take(["--config-path", "--config-name"])
        parts = (_program, _rows, _prompts, _logger, _step, _tokens, _end, _optimizer, _schedule, _adapter, _estimator)
        more = (_filter, _critic, _policy, _kl_in_loss, _kl_in_rewards, _evaluation, _engine, _correction, apply)
        for part in (*parts, *more, write_support):
            translation.attempt(part)
        return translation.attempt(_objective)


def _program(translation: Translation) -> None:
    """Name a program that is built on verl: its own losses, filters and settings are not read."""
    if translation.switch("distillation.enabled"):
        translation.fail("distillation.enabled", "distillation from a teacher is not translated (here --use-opd)")
    words = translation.document.words
    modules = [word for before, word in zip(words, words[1:], strict=False) if before == "-m"]
    scripts = [word for word in words if word.endswith(".py")]
    program = [*modules, *scripts, PROGRAMS[0]][0]
    if "one_step_off" in program:
        translation.carry(program, "--async-steps", 1, why="generates one step ahead of training there")
    elif program not in PROGRAMS and not f"/{program}".endswith(FILES):
        translation.miss(program, f"another program than {PROGRAMS[0]}: what it changes was not read")


def _logger(translation: Translation) -> None:
    names = translation.raw("trainer.logger")
    is_named = translation.has("trainer.logger") or translation.has("trainer.project_name")
    if is_named and "wandb" in (names if isinstance(names, list) else [names]):
        translation.carry("trainer.logger", "--use-wandb")


def _rows(translation: Translation) -> None:
    translation.carry("the rows", "--apply-chat-template", "--label-key", "reward_model.ground_truth")
    for part in ("prompt", "response"):
        of_data, key = f"data.max_{part}_length", ROLLOUT + f"{part}_length"  # the engine's, which follows the data's
        key = key if translation.has(key) else of_data
        translation.carry(key, f"--rollout-max-{part}-len", translation.count(key))
        translation.take([of_data])
    if translation.switch("data.filter_overlong_prompts"):
        translation.take(["data.truncation"])
    write_template(translation, "data.apply_chat_template_kwargs")
    images = translation.text("data.image_key")
    is_default = translation.document.kind == "yaml" and images == translation.table.row("data.image_key").default
    key = "the column of images" if is_default else "data.image_key"  # a whole file states the default too
    write_images(translation, key, images, "actor_rollout_ref.model.path")


def _prompts(translation: Translation) -> None:
    key = "data.train_files"
    if not translation.has(key):
        return
    files = translation.raw(key)
    write_sets(translation, key, files if isinstance(files, list) else [files])


def _evaluation(translation: Translation) -> None:
    frequency = translation.number("trainer.test_freq")
    files = "data.val_files"
    translation.take([files])
    if frequency <= 0 or not translation.has(files):
        translation.take(key for key in translation.table.rows if key.startswith(ROLLOUT + "val_kwargs."))
        return
    value = translation.raw(files)
    names = value if isinstance(value, list) else [value]
    translation.carry(files, "--eval-prompt-data", *named_sets("val", names))
    translation.carry("trainer.test_freq", "--eval-interval", frequency)
    if not translation.switch("trainer.val_before_train"):
        translation.carry("trainer.val_before_train", "--skip-eval-before-train")
    key, sampled = ROLLOUT + "val_kwargs.temperature", ROLLOUT + "val_kwargs.do_sample"
    temperature = translation.number(key)
    why = "applies without do_sample too, except in releases without agent loops"
    is_greedy = temperature and not translation.switch(sampled)
    translation.carry(key, "--eval-temperature", temperature, why=why if is_greedy else "")
    translation.take([sampled])


def _step(translation: Translation) -> None:
    group, prompts = translation.count(ROLLOUT + "n"), translation.count(ACTOR + "ppo_mini_batch_size")
    translation.carry(ACTOR + "ppo_mini_batch_size", "--global-batch-size", prompts * group)


def _tokens(translation: Translation) -> None:
    key, micro = ACTOR + "ppo_max_token_len_per_gpu", ACTOR + "ppo_micro_batch_size_per_gpu"
    if translation.switch(ACTOR + "use_dynamic_bsz"):
        words = ("--use-dynamic-batch-size", "--max-tokens-per-gpu", translation.count(key))
        translation.carry(ACTOR + "use_dynamic_bsz", *words)
    elif translation.has(micro):
        translation.carry(micro, "--micro-batch-size", translation.count(micro))


def _end(translation: Translation) -> None:
    steps, epochs = "trainer.total_training_steps", "trainer.total_epochs"
    if translation.has(steps):
        write_steps(translation, steps, epochs)
    else:
        translation.carry(epochs, "--num-epoch", translation.count(epochs))


def _optimizer(translation: Translation) -> None:
    earlier = ACTOR + "grad_clip"  # the one that FSDP reads; optim.clip_grad is its default, and Megatron's
    key = earlier if translation.has(earlier) and not _is_megatron(translation) else ACTOR + "optim.clip_grad"
    translation.carry(key, "--clip-grad", translation.number(key))


def _schedule(translation: Translation) -> None:
    optim, is_megatron = ACTOR + "optim.", _is_megatron(translation)
    names = ("lr_decay_style",) if is_megatron else ("warmup_style", "lr_scheduler_type")
    key = next((optim + name for name in names if translation.has(optim + name)), optim + names[-1])
    style = translation.text(key)
    if style not in ("constant", "cosine", *(["linear"] if is_megatron else [])):
        translation.miss(key, f"{style}: the shapes here are constant, linear, cosine")
        return
    translation.carry(key, "--lr-decay-style", style)
    ratio, least, end = (optim + name for name in ("min_lr_ratio", "min_lr", "lr_decay_steps"))
    if style != "constant" and is_megatron:
        translation.carry(least, "--min-lr", translation.number(least))
        if translation.has(end):
            translation.carry(end, "--lr-decay-iters", translation.count(end) * _steps_of_iteration(translation))
    elif style != "constant":
        translation.carry(ratio, "--min-lr", f"{translation.number(optim + 'lr') * translation.number(ratio):.12g}")
    steps, share = optim + "lr_warmup_steps", optim + "lr_warmup_steps_ratio"
    if translation.number(steps) > 0:
        write_warmup(translation, steps, translation.number(steps), _steps_of_iteration(translation))
    elif translation.number(share):
        translation.carry(share, "--lr-warmup-fraction", translation.number(share))
    translation.take([ratio, least, end] if is_megatron else [ratio])


def _steps_of_iteration(translation: Translation) -> int:
    """Return the optimizer steps of an iteration, which the schedules count there."""
    steps = translation.count("data.train_batch_size") // translation.count(ACTOR + "ppo_mini_batch_size")
    return max(steps, 1) * translation.count(ACTOR + "ppo_epochs")


def _is_megatron(translation: Translation) -> bool:
    name = translation.document.settings.get("--config-name")
    words = translation.text("model_engine"), translation.text(ACTOR + "strategy"), name.value if name else ""
    return any("megatron" in str(word) for word in words)


def _adapter(translation: Translation) -> None:
    """Translate the adapter of the Megatron backend; the other one's settings are rows of the table."""
    model, start = "actor_rollout_ref.model.", "actor_rollout_ref.model.lora."
    if translation.number(start + "rank"):
        names = "rank", "alpha", "dropout"
        words = [word for name in names for word in (f"--lora-{name}", translation.number(start + name))]
        translation.carry(start + "rank", *words)
        translation.take([start + "alpha", start + "dropout", model + "lora_rank", model + "lora_alpha"])
    else:
        translation.take(key for key in translation.table.rows if key.startswith(start))
        if not translation.number(model + "lora_rank"):
            translation.take(model + name for name in ("lora_alpha", "target_modules", "exclude_modules"))


def _estimator(translation: Translation) -> None:
    key = "algorithm.adv_estimator"
    name = translation.text(key)
    if name not in ESTIMATORS:
        translation.fail(
            key,
            f"is no estimator of verl 0.9.1, which has {', '.join(ESTIMATORS)}; write yours with "
            "--custom-advantage-function-path",
        )
    write_estimator(translation, key, *ESTIMATORS[name].split())
    key = "algorithm.norm_adv_by_std_in_grpo"
    if name in ("grpo", "grpo_vectorized", "grpo_passk") and not translation.switch(key):
        translation.carry(key, "--disable-grpo-std-normalization")
    translation.take([key])
    for key, flag, readers in (
        ("algorithm.gamma", "--gamma", ("gae", "reinforce_plus_plus")),
        ("algorithm.lam", "--lambd", ("gae",)),
    ):
        if name in readers:
            translation.carry(key, flag, translation.number(key))
        translation.take([key])


def _critic(translation: Translation) -> None:
    if translation.text("algorithm.adv_estimator") == "gae":
        alone = "trainer.critic_warmup"  # the policy is trained from the iteration of this number, the first being 1
        if translation.number(alone) > 1:
            translation.carry(alone, "--num-critic-only-steps", translation.number(alone) - 1)
        translation.take([alone])
        model = "critic.model.path"
        if translation.has(model) and translation.raw(model) == translation.raw("actor_rollout_ref.model.path"):
            translation.take([model])
        elif translation.has(model):
            translation.miss(model, "the critic starts from the policy's model here")
        settings, rows = translation.document.settings, translation.table.rows
        for name in ("ppo_mini_batch_size", "ppo_epochs", "shuffle", "loss_agg_mode", "loss_scale_factor"):
            value = settings[ACTOR + name].value if ACTOR + name in settings else rows[ACTOR + name].default
            if "critic." + name in settings and same(settings["critic." + name].value, value):
                translation.take(["critic." + name])
        names = ("lr_scheduler_type", "weight_decay", "betas", "clip_grad")
        write_critic(translation, ACTOR, "critic.", ("grad_clip", *(f"optim.{name}" for name in names)))
        policy, critic = (
            translation.number(f"{start}optim.lr") * translation.number(f"{start}optim.min_lr_ratio")
            for start in (ACTOR, "critic.")
        )
        if policy != critic:
            translation.carry("critic.optim.min_lr_ratio", why=f"ends at {critic:g} there, at --min-lr here")
    else:
        keys = [*translation.document.settings, *translation.table.rows]
        translation.take(key for key in keys if key.startswith(("critic.", "trainer.critic_warmup")))


def _filter(translation: Translation) -> None:
    keys = [f"algorithm.filter_groups.{name}" for name in ("enable", "metric", "max_num_gen_batches")]
    if translation.switch(keys[0]):
        path = "miles.rollout.filters:check_reward_nonzero_std"
        metric = translation.text(keys[1])
        why = f"groups whose {metric} is equal are dropped there, groups of equal rewards here"
        translation.carry(keys[0], "--dynamic-sampling-filter-path", path, why=why)
    translation.take(keys)


def _policy(translation: Translation) -> None:
    key = POLICY_LOSS + "loss_mode"
    mode = translation.text(key)
    if mode not in POLICY_LOSSES:
        translation.fail(
            key,
            f"is no policy loss of verl 0.9.1, which has {', '.join(POLICY_LOSSES)}; write "
            "yours with --custom-policy-loss-function-path",
        )
    low, high = (_clip(translation, end) for end in ("low", "high"))
    ends = ACTOR + "clip_ratio_low", ACTOR + "clip_ratio_high"
    bound = translation.number(ACTOR + "clip_ratio_c")
    words: list[object] = [*POLICY_LOSSES[mode].split()]
    if mode == "cispo":
        words = ["--policy-loss", "cispo", "--ratio-max", f"{1 + high:.12g}", "--ratio-min", f"{max(1 - low, 0):.12g}"]
    elif mode in ("dppo_tv", "dppo_kl"):
        words = ["--policy-loss", mode, flag_name(f"{mode}_delta"), high, "--dppo-ratio-max", bound]
    elif mode == "sapo":
        words += ["--sapo-tau-pos", translation.number(ACTOR + "tau_pos")]
        words += ["--sapo-tau-neg", translation.number(ACTOR + "tau_neg")]
    elif mode == "geo_mean":
        words = ["--policy-loss", "geo_mean", "--geo-mean-log-clip", high]
    elif mode in ("vanilla", "bypass_mode", "clip_cov"):
        words = [*words[: words.index("--eps-clip-c")], "--eps-clip-c", bound] if "--eps-clip-c" in words else words
    for name, flag in OWN.get(mode, {}).items():
        if translation.raw(POLICY_LOSS + name) is not None:
            words += [flag, translation.number(POLICY_LOSS + name)]
    translation.carry(key, *words)
    if mode in CLIPPED:
        translation.carry(ends[0], "--eps-clip", low)
        translation.carry(ends[1], "--eps-clip-high", high)
    elif mode in ("dppo_tv", "dppo_kl", "geo_mean") and low != high:
        why = (
            f"the threshold is {low:g} for falling and {high:g} for rising probabilities there, {high:g} for both here"
        )
        translation.carry(ends[0], why=why, worst=0)
    if mode == "geo_mean":
        why = "the loss is the mean of each micro-batch, added up there: as many times ours as a rank has micro-batches"
        translation.carry(key, *words, why=why, worst=0)
    if translation.has(ACTOR + "clip_ratio") and translation.raw(ACTOR + "clip_ratio") not in (low, high):
        translation.miss(ACTOR + "clip_ratio", "has no effect there: clip_ratio_low and clip_ratio_high have values")
    translation.take([*ends, ACTOR + "clip_ratio", ACTOR + "clip_ratio_c", ACTOR + "tau_pos", ACTOR + "tau_neg"])
    translation.take(POLICY_LOSS + name for names in OWN.values() for name in names)


def _clip(translation: Translation, end: str) -> float:
    """Return a bound: ``clip_ratio`` counts only where ``clip_ratio_low`` or ``_high`` is null."""
    key = f"{ACTOR}clip_ratio_{end}"
    return translation.number(ACTOR + "clip_ratio" if translation.is_null(key) else key)


def _kl_in_loss(translation: Translation) -> None:
    switch, weight, kind = (ACTOR + name for name in ("use_kl_loss", "kl_loss_coef", "kl_loss_type"))
    if translation.switch(switch):
        name = translation.text(kind)
        if name not in KL_TYPES:
            translation.fail(kind, f"is no estimator of the KL here; the kinds are {', '.join(KL_TYPES)}")
        words = ("--use-kl-loss", "--kl-loss-coef", translation.number(weight), "--kl-loss-type", KL_TYPES[name])
        _follow(translation, switch, *words)
    translation.take([weight, kind])
    entropy = ACTOR + "entropy_coeff"
    if translation.number(entropy):
        _follow(translation, entropy, "--entropy-coef", translation.number(entropy))


def _follow(translation: Translation, key: str, *words: object) -> None:
    mode = translation.text(ACTOR + "loss_agg_mode")
    is_same = mode == _mode(translation) and mode in MEANS
    translation.carry(key, *words, why="" if is_same else FOLLOWS, worst=1)


def _kl_in_rewards(translation: Translation) -> None:
    switch, weight, penalty = "algorithm.use_kl_in_reward", "algorithm.kl_ctrl.kl_coef", "algorithm.kl_penalty"
    control, target, horizon = (f"algorithm.kl_ctrl.{name}" for name in ("type", "target_kl", "horizon"))
    if translation.switch(switch):
        name = translation.text(penalty)
        if name not in KL_TYPES:
            translation.fail(penalty, f"is no estimator of the KL here; the kinds are {', '.join(KL_TYPES)}")
        there = WHOLE if translation.text("algorithm.adv_estimator") == "reinforce_plus_plus_baseline" else REST
        written = write_kl_in_rewards(translation, weight, translation.number(weight), KL_TYPES[name], there)
        if written and "--use-kl-loss" in translation.words and _mode(translation) not in MEANS:
            translation.carry(switch, why="its sum over an answer's tokens is weighted there, its mean here", worst=1)
        if translation.text(control) not in ("fixed", "adaptive"):
            translation.fail(control, "must be fixed or adaptive")
        if written and translation.text(control) == "adaptive":
            translation.carry(target, "--kl-target", translation.number(target))
            translation.carry(horizon, "--kl-horizon", translation.number(horizon))
    translation.take([weight, penalty, control, target, horizon])


def _engine(translation: Translation) -> None:
    engine = translation.text(ROLLOUT + "name")
    translation.carry(ROLLOUT + "name", "--rollout-engine", engine if engine in ENGINES else "sglang")
    nodes = "trainer.n_gpus_per_node"
    if _is_megatron(translation):  # whose ways to share the model are for that many
        translation.carry(ACTOR + "strategy", "--train-backend", "megatron")
        translation.carry(nodes, "--actor-num-gpus-per-node", translation.count(nodes))
    if translation.switch("actor_rollout_ref.hybrid_engine", True):
        translation.carry("actor_rollout_ref.hybrid_engine", "--colocate")


def _correction(translation: Translation) -> None:
    start = "algorithm.rollout_correction."
    weights, rejects = start + "rollout_is", start + "rollout_rs"
    bound, edges = weights + "_threshold", rejects + "_threshold"
    if translation.switch(start + "bypass_mode"):
        translation.carry(start + "bypass_mode", "--use-rollout-logprobs")
        for key in filter(translation.has, (weights, rejects)):
            translation.miss(key, "has no effect in bypass_mode; releases before 0.9 reject there too")
        translation.take([bound, edges])
        return
    if translation.has(weights):
        level = translation.text(weights)
        if level not in ("token", "sequence"):
            translation.fail(weights, "must be token or sequence")
        translation.carry(weights, "--use-tis", "--tis-level", level)
        low, high = _bounds(translation, bound)
        words = ["--tis-mode", "icepop", "--tis-clip-low", low] if low is not None else []
        translation.carry(bound, *words, "--tis-clip", high)
    if translation.has(rejects):
        _rejection(translation, rejects, edges if translation.has(edges) else bound)
        translation.take([edges])


LEVELS = {"token_k1": "token", "seq_sum_k1": "sequence", "seq_mean_k1": "geometric"}
LEVELS |= {"token": "token", "sequence": "sequence", "geometric": "geometric"}  # of earlier releases


def _rejection(translation: Translation, key: str, bound: str) -> None:
    """Translate the rejection of tokens or sequences. The names that end in k1 bound engine over trainer."""
    name = translation.text(key)
    low, high = _bounds(translation, bound)
    if name not in LEVELS:
        translation.fail(key, f"the kinds of rejection here are {', '.join(LEVELS)}")
    low = 1 / high if low is None else low
    low, high = (1 / high, 1 / low) if name.endswith("k1") else (low, high)
    words = ["--use-rs", "--rs-level", LEVELS[name]]
    words += ["--rs-lower-bound", f"{low:.12g}", "--rs-upper-bound", f"{high:.12g}"]
    why = "rejected tokens leave the mean's divisor there, and are counted here"
    divides_by_tokens = translation.text(ACTOR + "loss_agg_mode") == "token-mean" or LEVELS[name] == "token"
    translation.carry(key, *words, why=why if divides_by_tokens else "", worst=0)


def _bounds(translation: Translation, key: str) -> tuple[float | None, float]:
    """Return the lower bound, if there is one, and the upper bound of a threshold such as 0.5_2.0."""
    low, _, high = translation.text(key).rpartition("_")
    try:
        ends = float(low or high), float(high)
    except ValueError:
        ends = 0.0, 0.0
    if not all(0 < end < math.inf for end in ends):
        translation.fail(key, "must be a number above 0, or two with _ between them")
    return ends[0] if low else None, ends[1]


def _mode(translation: Translation) -> str:
    """Return the mode of the policy loss: some losses have their own, whatever ``loss_agg_mode`` is."""
    name = translation.text(ACTOR + "loss_agg_mode")
    return OWN_MODE.get(translation.text(POLICY_LOSS + "loss_mode"), name)


def _objective(translation: Translation) -> ForeignObjective:
    key, factor = ACTOR + "loss_agg_mode", ACTOR + "loss_scale_factor"
    name = _mode(translation)
    if name not in MODES:
        translation.fail(key, f"is no mode of {translation.table.source}; it has {', '.join(MODES)}")
    mode, reduce, formula = MODES[name]
    words = ["--loss-aggregation", mode]
    depends = ""
    exact = True
    divisor: float | None = 8.0
    if name == "token-sum":
        divisor = None
        n = translation.count(ACTOR + "ppo_mini_batch_size") * translation.count(ROLLOUT + "n")
        words += ["--loss-aggregation-divisor", repr(1 / n)]
    elif name == "seq-mean-token-sum":
        words += ["--loss-aggregation-divisor", "1"]
        divisor = 1.0
    elif name == "seq-mean-token-sum-norm" and translation.has(factor):
        words += ["--loss-aggregation-divisor", str(translation.raw(factor))]
        translation.number(factor)
    elif name == "seq-mean-token-sum-norm":
        words += ["--loss-aggregation-divisor", str(translation.count("data.max_response_length"))]
        reduce, exact = over_padded_width, False
        formula = "1/B Σ_micro-batches 1/W Σ m l, W = padded width of the micro-batch's responses"
        depends = "padding and micro-batches, because loss_scale_factor is not set"
    translation.take([factor])
    why = "verl 0.6.1 and earlier take the mean of the sequences under gspo: --loss-aggregation sample_mean for them"
    depends_on_release = translation.text(POLICY_LOSS + "loss_mode") == "gspo" and name != "seq-mean-token-mean"
    translation.carry(key, *words, why=why if depends_on_release else "")
    setting, source = f"{key} = {name}", translation.table.source
    return ForeignObjective(setting, formula, source, reduce, mode, tuple(words), divisor, depends, exact)


VERL = Verl()
