"""OpenRLHF: the flags of ``openrlhf.cli.train_ppo_ray`` in a shell script, of releases with dots or underscores."""

import json
from dataclasses import replace
from functools import cache

from miles.compat.translate.launchers.base import Launcher
from miles.compat.translate.translation import (
    Document,
    ForeignObjective,
    Table,
    Translation,
    apply,
    named_sets,
    prompts_of,
    sequence_mean,
    sequence_mean_of_unmasked,
    table_of,
    token_mean,
    token_mean_of_micro_batches,
    write_critic,
    write_estimator,
    write_kl_in_rewards,
    write_no_warmup,
    write_sets,
    write_support,
)

ESTIMATORS: dict[str, str] = table_of("openrlhf").names["estimators"]
# What some estimators read alone: the flag, and those estimators
OF_ESTIMATORS: dict[str, tuple[str, list[str]]] = table_of("openrlhf").names["readers"]
MICRO_BATCHES = "the token mean of a micro-batch"


class OpenRlhf(Launcher):
    """OpenRLHF's PPO trainer on Ray."""

    name = "openrlhf"
    reads = ("shell",)

    def recognizes(self, document: Document) -> bool:
        """By its module in the command."""
        return any(word.startswith("openrlhf.") or "train_ppo_ray" in word for word in document.words)

    def translate(self, translation: Translation) -> ForeignObjective | None:
        """Translate the flags; those with underscores by their names since 0.11."""
        before = table_of("openrlhf_underscores").rows.keys() - table_of("openrlhf").rows.keys()
        if before & translation.document.settings.keys():
            translation.table = earlier()
            now = {key: row.now or key for key, row in table_of("openrlhf_underscores").rows.items()}
            renamed = {now.get(key, key): setting for key, setting in translation.document.settings.items()}
            translation.document = replace(translation.document, settings=renamed)
        program = "openrlhf.cli.train_ppo"  # without Ray
        if program in translation.document.words:
            translation.miss(program, "is a program of releases before 0.8.0, whose defaults were not read")
        parts = (_wandb, _images, _lengths, _tokens, _async, _estimator, _critic, _policy, _correction)
        more = (_kl, _prompts, _filter, _schedule, _evaluation, _engines, _order, _adapter, apply)
        for part in (*parts, *more, write_support):
            translation.attempt(part)
        return translation.attempt(_objective)


@cache
def earlier() -> Table:
    """Return the table of the releases with underscores, under the names with dots."""
    table, dotted = table_of("openrlhf_underscores"), table_of("openrlhf").rows
    rows = {
        row.now or key: replace(dotted[row.now], default=row.default) if row.now in dotted else row
        for key, row in table.rows.items()
    }
    return replace(table, rows=rows)


def _images(translation: Translation) -> None:
    number, column = "--data.max_images_per_prompt", "--data.image_key"
    if translation.number(number) > 0:
        translation.carry(column, "--multimodal-keys", json.dumps({"image": translation.text(column)}))
    translation.take([number, column])


def _has_dots(translation: Translation) -> bool:
    return translation.table is table_of("openrlhf")


def _wandb(translation: Translation) -> None:
    key = "--logger.wandb.key"
    if translation.has(key):
        setting = translation.document.settings[key]
        translation.document.settings[key] = replace(setting, value="(a key of W&B: export it as WANDB_API_KEY)")
        translation.carry(key, "--use-wandb")


def _lengths(translation: Translation) -> None:
    prompt, answer = "--prompt_max_len", "--generate_max_len"  # 0.9.0 has these, and no bound of their sum
    if not (translation.has(prompt) or translation.has(answer)):
        translation.carry("--data.max_len", "--rollout-max-context-len", translation.count("--data.max_len"))
    translation.take(["--data.max_len"])
    longest = "--rollout.max_new_tokens"
    if translation.has(longest):
        translation.carry(longest, "--rollout-max-response-len", translation.count(longest))
    elif not translation.has(answer):
        why = "whatever the prompt leaves of --data.max_len there, up to one token less here"
        translation.carry(longest, "--rollout-max-response-len", translation.count("--data.max_len") - 1, why=why)


def _tokens(translation: Translation) -> None:
    dynamic, tokens, micro = "--train.dynamic_batch_enable", "--train.max_tokens_per_gpu", "--train.micro_batch_size"
    if translation.switch(dynamic):
        translation.carry(dynamic, "--use-dynamic-batch-size", "--max-tokens-per-gpu", translation.count(tokens))
    else:
        translation.carry(micro, "--micro-batch-size", translation.count(micro))


def _async(translation: Translation) -> None:
    key, queue = "--train.async_enable", "--train.async_queue_size"
    if translation.switch(key):
        translation.carry(key, "--async-steps", translation.count(queue, 1))
    together, trained = "--rollout.vllm_generate_batch_size", translation.count("--rollout.batch_size")
    if translation.has(together) and translation.count(together) > trained:
        why = f"answers are generated for {translation.count(together)} prompts at once there, for {trained} here"
        translation.carry(together, why=f"{why}: the later ones are of weights some iterations old")
    translation.take([queue, together])


def _adapter(translation: Translation) -> None:
    if not translation.number("--ds.lora.rank"):
        translation.take(f"--ds.lora.{name}" for name in ("alpha", "dropout", "target_modules"))


def _order(translation: Translation) -> None:
    translation.carry("the order of the prompts", "--rollout-shuffle")


def _estimator(translation: Translation) -> None:
    key = "--algo.advantage.estimator"
    name = translation.text(key)
    if name not in ESTIMATORS:
        translation.fail(key, "is no estimator here; write yours with --custom-advantage-function-path")
    whitens = "--normalize-advantages" in ESTIMATORS[name].split()
    write_estimator(translation, key, "--advantage-estimator", *ESTIMATORS[name].split())
    plain = "--algo.advantage.no_std_norm"
    if translation.switch(plain) and whitens:
        translation.miss(plain, "whitening divides by the std here, and subtracts the mean alone there")
    translation.take([plain])
    for key, (flag, readers) in OF_ESTIMATORS.items():
        if name in readers:
            translation.carry(key, flag, translation.number(key))
    if name != "gae":
        translation.take(key for key in translation.table.rows if key.startswith("--critic."))
    translation.take(OF_ESTIMATORS)


def _critic(translation: Translation) -> None:
    if translation.text("--algo.advantage.estimator") != "gae":
        return
    alone = "--critic.freezing_steps"  # the last iteration without the policy, the first being 0
    if translation.number(alone) >= 0:
        translation.carry(alone, "--num-critic-only-steps", translation.number(alone) + 1)
    model, scorer = "--critic.model_name_or_path", "--reward.model_name_or_path"
    if translation.has(scorer) and not (translation.has(model) or translation.has("--reward.remote_url")):
        translation.carry(model, why="the critic starts from the reward model there, from the policy's model here")
    start = "--critic." if _has_dots(translation) else "--actor."  # which earlier releases have for both
    style = translation.text(start + "lr_scheduler", "cosine_with_min_lr")
    warm, least = translation.number(start + "lr_warmup_ratio"), translation.number(start + "min_lr_ratio", 0.1)
    why = []
    if warm and style != "constant":
        why.append(f"reached after {warm:g} of the steps there, at once here without --critic-lr-warmup-iters")
    if style == "cosine_with_min_lr":
        why.append(f"ends at {least:g} times this there, at --min-lr here")
    if why:
        translation.carry("--critic.adam.lr", why="; ".join(why))
    names = ("lr_scheduler", "max_norm", "adam.betas", "adam.eps", "adam.weight_decay")
    write_critic(translation, "--actor.", "--critic.", names)
    translation.take([start + "lr_warmup_ratio", start + "min_lr_ratio"] if _has_dots(translation) else [])


def _policy(translation: Translation) -> None:
    key, low, bounds = "--actor.policy_loss_type", "--actor.eps_clip", "--actor.eps_clip_low_high"
    name = translation.text(key)
    if name not in ("ppo", "gspo"):
        translation.fail(key, "is no policy loss of OpenRLHF; it has ppo and gspo")
    translation.carry(key, "--policy-loss", name)
    clip = translation.number(low)
    ends = translation.pair(bounds) or [clip, clip]
    translation.carry(bounds if translation.has(bounds) else low, "--eps-clip", ends[0], "--eps-clip-high", ends[1])
    translation.take([low])


def _correction(translation: Translation) -> None:
    start = "--algo.advantage.is_correction_"
    level, mode, gate, bounds = (start + name for name in ("level", "mode", "gating", "threshold"))
    # Of releases with underscores.
    enables = ("--enable_vllm_is_correction", "--vllm_enable_is_correction")
    type_before, bounds_before, icepop = "--vllm_is_correction_type", "--vllm_is_truncated_threshold", "--use_icepop"
    kind = "off"
    if _has_dots(translation):
        if translation.text(level) != "off" and translation.text(gate) != "ratio":
            translation.fail(gate, "a gate on a divergence is not computed here; use ratio, or --use-rs by hand")
        kinds = {"off": "off", "seq": "seq-mask-tis", "token": "icepop"}
        if translation.text(level) not in kinds or translation.text(mode) not in ("mask", "clip"):
            translation.fail(level, "must be off, token or seq, with the mode mask or clip")
        kind = kinds[translation.text(level)]
        kind = "tis" if kind == "icepop" and translation.text(mode) == "clip" else kind
    elif translation.switch(translation.first(*enables)):
        kind = translation.text(type_before)
        bounds = bounds_before
        kind = "icepop" if translation.switch(icepop) else kind  # of earlier releases
    key = level if _has_dots(translation) else translation.first(*enables)
    if kind != "off" and translation.text("--actor.policy_loss_type") == "gspo":
        translation.carry(key, "--use-rollout-logprobs")  # its ratio is that to the engine, and there are no weights
    elif kind != "off":
        ends = translation.raw(bounds)
        ends = ends if isinstance(ends, list) else [ends]
        ends = [0, *ends] if len(ends) == 1 else ends
        if len(ends) != 2:
            translation.fail(bounds, "must be an upper bound, or a lower and an upper one")
        cut = "truncate" if kind == "tis" else "icepop"
        words: list[object] = ["--use-tis", "--tis-level", "token", "--tis-mode", cut]
        words += ["--tis-clip-low", ends[0], "--tis-clip", ends[1]]
        if kind == "seq-mask-tis":
            words = ["--use-tis", "--tis-level", "token", "--tis-clip", 1e6, "--use-rs", "--rs-level", "geometric"]
            words += ["--rs-lower-bound", ends[0], "--rs-upper-bound", ends[1]]
        translation.carry(key, *words)
    translation.take([level, mode, gate, bounds, *enables, type_before, bounds_before, icepop])


def _kl(translation: Translation) -> None:
    weight, kind, in_loss, unbiased = (
        f"--algo.kl.{name}" for name in ("init_coef", "estimator", "use_loss", "unbiased_gradient")
    )
    coefficient, name = translation.number(weight), translation.text(kind)
    is_written = coefficient != 0
    k3_before = "--use_kl_estimator_k3"  # of releases with underscores
    name = "k3" if translation.switch(k3_before) else name
    if coefficient and translation.switch(in_loss):
        words: list[object] = ["--use-kl-loss", "--kl-loss-coef", coefficient, "--kl-loss-type", name]
        words += ["--use-unbiased-kl"] if translation.switch(unbiased) else []
        why = "the mean of the KL is over the tokens there, over the samples here"
        translation.carry(weight, *words, why=why if _takes_sequence_mean(translation) else "", worst=1)
    elif coefficient:
        is_written = write_kl_in_rewards(translation, weight, coefficient, name)
    if is_written and translation.has("--algo.kl.target"):
        translation.carry("--algo.kl.target", "--kl-target", translation.number("--algo.kl.target"))
        translation.carry("--algo.kl.horizon", "--kl-horizon", translation.number("--algo.kl.horizon"))
    translation.take([weight, kind, in_loss, unbiased, k3_before, "--algo.kl.target", "--algo.kl.horizon"])


def _filter(translation: Translation) -> None:
    key, bounds = "--algo.dynamic_filtering_enable", "--algo.dynamic_filtering_range"
    if translation.switch(key):
        ends = translation.pair(bounds)
        why = f"groups whose mean score is outside {ends} are dropped there, groups of equal rewards here"
        path = "miles.rollout.filters:check_reward_nonzero_std"
        translation.carry(key, "--dynamic-sampling-filter-path", path, why=why)
    translation.take([bounds])


def _schedule(translation: Translation) -> None:
    key, least, warm = "--actor.lr_scheduler", "--actor.min_lr_ratio", "--actor.lr_warmup_ratio"
    name = translation.text(key, "cosine_with_min_lr")
    if name == "cosine_with_min_lr":
        rate = translation.number("--actor.adam.lr") * translation.number(least, 0.1)
        translation.carry(key, "--lr-decay-style", "cosine", "--min-lr", f"{rate:.12g}")
    elif name.removesuffix("_with_warmup") in ("constant", "linear", "cosine"):
        translation.carry(key, "--lr-decay-style", name.removesuffix("_with_warmup"))
    else:
        translation.miss(key, f"{name}: the shapes here are constant, cosine, linear")
    if name == "constant":
        write_no_warmup(translation, [warm])
    else:
        translation.carry(warm, "--lr-warmup-fraction", translation.number(warm))
    translation.take([least])


def _prompts(translation: Translation) -> None:
    key, shares = "--data.prompt_dataset", "--data.prompt_probs"
    names = translation.text(key).split(",")
    if len(names) > 1:
        weights = translation.text(shares).split(",") if translation.has(shares) else []
        write_sets(translation, key, [prompts_of(translation, key, name.strip()) for name in names], weights)
        translation.take([shares])


def _evaluation(translation: Translation) -> None:
    steps, files = "--eval.steps", "--eval.dataset"
    if translation.number(steps) > 0 and translation.has(files):
        names = [prompts_of(translation, files, name.strip()) for name in translation.text(files).split(",")]
        translation.carry(files, "--eval-prompt-data", *named_sets("eval", names))
        translation.carry(steps, "--eval-interval", translation.number(steps), "--skip-eval-before-train")
    else:
        translation.take(key for key in translation.table.rows if key.startswith("--eval."))
    translation.take([steps, files])


def _engines(translation: Translation) -> None:
    key, colocate = "--vllm.num_engines", "--train.colocate_all"
    if translation.switch(colocate) and not translation.switch("--train.async_enable"):
        translation.carry(colocate, "--colocate")
    elif translation.has(key):
        devices = translation.count(key) * translation.count("--vllm.tensor_parallel_size")
        translation.carry(key, "--rollout-num-gpus", devices)


def _takes_sequence_mean(translation: Translation) -> bool:
    """Return whether the policy loss is a mean of sequence means, as gspo's is whatever the flag states."""
    mode = translation.text("--actor.loss_agg_mode", "token-mean")
    return translation.text("--actor.policy_loss_type") == "gspo" or mode == "seq-mean-token-mean"


def _objective(translation: Translation) -> ForeignObjective:
    key = "--actor.loss_agg_mode"
    source, name = translation.table.source, translation.text(key, "token-mean")
    if name not in ("token-mean", "seq-mean-token-mean"):
        translation.fail(key, f"is no mode of {source}; it has token-mean, seq-mean-token-mean")
    if _takes_sequence_mean(translation):
        words = ("--loss-aggregation", "sample_mean")
        key = "--actor.policy_loss_type" if translation.text("--actor.policy_loss_type") == "gspo" else key
        translation.carry(key, *words)
        depends = "fully masked samples: they are left out of B'"
        formula = "1/B' Σ_i 1/(M_i + 1e-8) Σ_t m l, B' = samples with a loss token"
        reduction = sequence_mean_of_unmasked if _has_dots(translation) else sequence_mean
        return ForeignObjective(key, formula, source, reduction, "sample_mean", words, depends=depends, exact=False)
    words = ("--loss-aggregation", "token_mean")
    if _has_dots(translation):
        translation.carry(key, *words)
        return ForeignObjective(f"{key} {name}", "1/T Σ m l", source, token_mean, "token_mean", words)
    translation.carry(MICRO_BATCHES, *words)
    depends = "micro-batches and ranks: each divides by its own tokens"
    if translation.switch("--train.dynamic_batch_enable"):
        depends += ", and a dynamic one weighs by its samples"
    formula = "mean over ranks and micro-batches of (Σ m l / Σ m) of each"
    reduction = token_mean_of_micro_batches
    return ForeignObjective(
        MICRO_BATCHES, formula, source, reduction, "token_mean", words, depends=depends, exact=False
    )


OPENRLHF = OpenRlhf()
