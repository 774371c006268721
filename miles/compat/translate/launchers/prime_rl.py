"""prime-rl: TOML."""

import re
from dataclasses import replace

from miles.compat.translate.launchers.base import Launcher
from miles.compat.translate.translation import (
    Document,
    ForeignObjective,
    Setting,
    Translation,
    apply,
    by_key,
    parts_of,
    token_mean,
    token_mean_of_ranks,
    write_support,
)

OLD_SOURCE = "prime-rl d5106a4, src/prime_rl/trainer/rl/train.py"
LOSS = "trainer.loss."
EPS = LOSS + "eps"  # of releases whose default is ipo, without kl_tau
SINCE = "since September 2026 the default is ipo with eps 0.3 and kl_tau 0: give them if the run is of such a release"
_OF_ONE_PROCESS = re.compile(r"(optim|loss|scheduler|sampling|batch_size|group_size|rollouts_per_example)(\.|$)")
REPLAYED = ("orchestrator.train.sampling.top_p", "orchestrator.train.sampling.top_k")
STEPS = ("max_steps", "trainer.max_steps", "orchestrator.max_steps")


class PrimeRl(Launcher):
    """prime-rl's ``rl`` entry point."""

    name = "prime-rl"
    reads = ("toml",)

    def recognizes(self, document: Document) -> bool:
        """By the tables of its processes."""
        return any(key.startswith(("orchestrator.", "trainer.")) for key in document.settings)

    def translate(self, translation: Translation) -> ForeignObjective | None:
        """Translate the settings of ``packages/prime-rl-configs``; later names too."""
        settings = {_earlier_name(key): each for key, each in translation.document.settings.items()}
        for key in filter(_OF_ONE_PROCESS.match, settings):
            rule = "is a setting of one process alone; give the file with the tables trainer and orchestrator"
            translation.fail(key, rule)
        settings |= _of_environments(translation.document, settings)
        translation.document = replace(translation.document, settings=settings)
        parts = (_model, _batch, _lengths, _sampling, _async, _advantages, _loss, _optimizer, _schedule, _adapter)
        for part in (*parts, _order, apply):
            translation.attempt(part)
        if not any(map(translation.has, REPLAYED)):  # with these the trainer keeps the tokens that the engine kept
            translation.attempt(write_support)
        return translation.attempt(_objective)


def _earlier_name(key: str) -> str:
    """Return the name of August 2026 of a setting that has another one since."""
    name = re.sub(r"^orchestrator\.train\.(?=group_size$|algo\.)", "orchestrator.", key)
    return {"orchestrator.train.source": "orchestrator.train.env", EPS: LOSS + "ipo_threshold"}.get(name, name)


OVERRIDDEN = ("group_size", "rollouts_per_example", "sampling", "algo", "algorithms")


def _of_environments(document: Document, settings: dict[str, Setting]) -> dict[str, Setting]:
    """Return what the environments override, as settings of all of them.

    Raises:
        InputError: The environments differ in one of these, which all environments of a run share here.
    """
    overrides = list[Setting]()
    for key in filter(settings.__contains__, ("orchestrator.train.env", "orchestrator.env")):
        several = settings[key].value if isinstance(settings[key].value, list) else []
        for name in OVERRIDDEN:
            values = [each.get(name) for each in several if isinstance(each, dict)]
            if any(value != values[0] for value in values):
                document.fail(settings[key].line, f"{key}: each environment has its own {name}, all have one here")
            if values and values[0] is not None:
                start = "orchestrator.train." if name == "sampling" else "orchestrator."
                overrides += parts_of(Setting(start + name, values[0], settings[key].line))
    return by_key(overrides)


def _model(translation: Translation) -> None:
    key = translation.first("model.name", "trainer.model.name", "orchestrator.model.name")
    if translation.has(key):
        translation.carry(key, "--hf-checkpoint", translation.text(key))
    translation.take(["model.name", "trainer.model.name", "orchestrator.model.name"])
    if translation.has("wandb.project"):
        translation.carry("wandb.project", "--use-wandb", "--wandb-project", translation.text("wandb.project"))
    key = translation.first(*STEPS)
    if translation.has(key):
        translation.carry(key, "--num-rollout", translation.count(key))
    translation.take(STEPS)


def _batch(translation: Translation) -> None:
    groups = ("orchestrator.group_size", "orchestrator.rollouts_per_example")
    group, key = translation.first(*groups), "orchestrator.batch_size"
    size = translation.count(group)
    translation.carry(group, "--n-samples-per-prompt", size)
    if not translation.has("orchestrator.token_batch_size"):
        batch = translation.count(key)
        if batch % size:
            translation.fail(key, f"is no whole number of groups of {size}, which the iterations here have")
        translation.carry(key, "--global-batch-size", batch, "--rollout-batch-size", batch // size)
    translation.take(groups)


def _lengths(translation: Translation) -> None:
    keys = ("orchestrator.seq_len", "seq_len")
    key = translation.first(*keys)
    context = translation.count(key, 2048)
    translation.carry(key, "--rollout-max-context-len", context)
    names = [
        f"orchestrator.{start}sampling.{name}"
        for start in ("train.", "")
        for name in ("max_completion_tokens", "max_tokens")
    ]
    longest = translation.first(*names)
    if translation.has(longest):
        translation.carry(longest, "--rollout-max-response-len", min(translation.count(longest), context - 1))
    else:
        why = "whatever the prompt leaves of seq_len there, up to one token less here"
        translation.carry(key, "--rollout-max-response-len", context - 1, why=why)
    packed = "trainer.model.seq_len"
    tokens = translation.count(packed if translation.has(packed) else key, context)
    translation.carry(packed, "--use-dynamic-batch-size", "--max-tokens-per-gpu", tokens)
    translation.take([*keys, *names])


def _sampling(translation: Translation) -> None:
    keys = ("orchestrator.train.sampling.temperature", "orchestrator.sampling.temperature")
    key = translation.first(*keys)
    translation.carry(key, "--rollout-temperature", translation.number(key))
    translation.take(keys)


def _async(translation: Translation) -> None:
    levels = ("max_async_level", "orchestrator.max_async_level", "trainer.max_async_level")
    key, most = translation.first(*levels), "orchestrator.max_off_policy_steps"
    if translation.has(key) and translation.number(key) > 0:
        translation.carry(key, "--async-steps", translation.count(key))
    elif not translation.has(key):
        age = int(translation.number(most))
        why = f"answers of weights up to {age} steps old are trained on there; with --async-steps N up to N here"
        translation.carry(most, why=why, worst=1)
    translation.take([*levels, most])


def _advantages(translation: Translation) -> None:
    key = translation.first("orchestrator.algo.type", "orchestrator.advantage.type")
    name = "grpo" if translation.text(key, "grpo") == "default" else translation.text(key, "grpo")
    if name == "max_rl":
        translation.carry(key, "--advantage-estimator", "maxrl")
    elif name == "grpo":
        translation.carry(key, "--advantage-estimator", "grpo", "--disable-grpo-std-normalization")
    else:
        translation.fail(key, "is no estimator here; write yours with --custom-advantage-function-path")
    translation.take(["orchestrator.advantage.type"])


def _order(translation: Translation) -> None:
    filters, constant = "orchestrator.post_batch_filters", "orchestrator.constant_trainer_batch_size"
    others = ("--dynamic-sampling-filter-path", "miles.rollout.filters:check_reward_nonzero_std")
    if translation.has(constant) or _is_later(translation):
        words = others if translation.switch(constant, True) else ("--drop-zero-std-groups",)
        translation.carry(constant, *words)
    elif not translation.has(filters):
        why = "rollouts of advantage 0 are not trained on and not counted there (post_batch_filters); "
        why += f"since September 2026 others are generated in their place: {others[0]}"
        translation.carry(filters, "--drop-zero-std-groups", why=why)
    translation.carry("the order and the template of the prompts", "--rollout-shuffle", "--apply-chat-template")


def _is_later(translation: Translation) -> bool:
    """Return whether the file is one of a release since September 2026, by the name of the threshold of ipo."""
    threshold = translation.document.settings.get(LOSS + "ipo_threshold")
    return threshold is not None and threshold.key == EPS


def _loss(translation: Translation) -> None:
    is_later, is_stated = _is_later(translation), translation.has(LOSS + "type")
    kind = "ipo" if is_later and not is_stated else translation.text(LOSS + "type")
    if kind not in ("default", "ipo"):
        translation.fail(
            LOSS + "type", "the losses here are default and ipo; give yours with --custom-policy-loss-function-path"
        )
    ends = ("ipo_threshold",) * 2 if kind == "ipo" else ("dppo_mask_low", "dppo_mask_high")
    low, high = (translation.number(LOSS + end) for end in ends)
    words = ("--policy-loss", "dppo_tv", "--dppo-tv-delta", high, "--use-rollout-logprobs")
    if kind == "ipo":
        why = "drops a token beyond the threshold in both directions there, in that of its advantage here"
        translation.carry(LOSS + ends[0], *words, why=why, worst=0)
    elif low != high:
        why = (
            f"the threshold is {low:g} for falling and {high:g} for rising probabilities there, {high:g} for both here"
        )
        translation.carry(LOSS + ends[0], *words, why=why, worst=0)
    elif is_stated or any(translation.has(LOSS + end) for end in ends):
        translation.carry(LOSS + ends[1], *words)
    else:
        translation.carry(LOSS + "type", *words, why=SINCE, worst=0)
    tau = LOSS + "kl_tau"
    weight = 0.0 if is_later and not translation.has(tau) else translation.number(tau)
    if weight:
        why = f"{weight:g} times the squared log-ratio of trainer and engine is a term of the loss there, and not here"
        translation.carry(tau, why=why, worst=0)
    if (scale := translation.number(LOSS + "adv_tau")) != 1:
        translation.carry(LOSS + "adv_tau", why=f"advantages are multiplied by {scale:g} there", worst=0)
    names = ("type", "dppo_mask_low", "dppo_mask_high", "ipo_threshold", "kl_tau", "adv_tau")
    translation.take(LOSS + name for name in names)


def _optimizer(translation: Translation) -> None:
    key = "trainer.optim.type"
    if translation.text(key) != "adamw":
        translation.miss(key, "AdamW is the optimizer here (--optimizer)")


def _schedule(translation: Translation) -> None:
    start = "trainer.scheduler."
    style = translation.text(start + "type")
    if style not in ("constant", "linear", "cosine"):
        translation.fail(start + "type", "the shapes here are constant, linear, cosine")
    rise, fall, least = (translation.number(start + name) for name in ("warmup_steps", "decay_steps", "min_lr"))
    words: list[object] = [] if style == "constant" else ["--lr-warmup-iters", rise]
    if style == "linear" and rise + fall != translation.number(translation.first(*STEPS)):
        why = f"constant after the warm-up, and falls to {least:g} over the last {fall:g} steps there"
        translation.carry(start + "type", "--lr-decay-style", "constant", *words, why=why, worst=1)
    else:
        words += [] if style == "constant" else ["--min-lr", least]
        translation.carry(start + "type", "--lr-decay-style", style, *words)
    translation.take(start + name for name in ("warmup_steps", "decay_steps", "min_lr"))


def _adapter(translation: Translation) -> None:
    names = [f"trainer.model.lora.{name}" for name in ("rank", "alpha", "dropout")]
    if any(key.startswith("trainer.model.lora") for key in translation.document.settings):
        flags = ("--lora-rank", "--lora-alpha", "--lora-dropout")
        for key, flag in zip(names, flags, strict=True):
            translation.carry(key, flag, translation.number(key))
    translation.take(names)


def _objective(translation: Translation) -> ForeignObjective:
    key, source = LOSS + "ratio_type", translation.table.source
    mean = "orchestrator.algo.loss_aggregation"
    means = {"prompt": "prompt_mean", "token": "token_mean"}
    if translation.text(mean) not in means:
        translation.fail(mean, "must be token or prompt")
    words = ("--loss-aggregation", means[translation.text(mean)])
    if not translation.has(key):
        translation.carry(mean, *words)
        formula = "1/T Σ m l" if words[1] == "token_mean" else "1/P Σ_g 1/M_g Σ m l"
        return ForeignObjective("every RL loss", formula, source, token_mean, "token_mean", words)
    if translation.text(key) != "token":
        translation.fail(
            key, "divides by the packed micro-batches, which are not in the file: not evaluated; drop the key"
        )
    translation.carry(key, *words)
    formula, depends = "mean over ranks of (Σ m l / Σ m) of each", "ranks: each divides by its own tokens"
    return ForeignObjective(
        f"{key} = token", formula, OLD_SOURCE, token_mean_of_ranks, "token_mean", words, depends=depends, exact=False
    )


PRIME_RL = PrimeRl()
