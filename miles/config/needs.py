"""Set flags without effect to their defaults, each with a note: what ``needs=`` of ``flag()`` declares.

``needs`` is a list of conditions with commas between them. A condition names flags, ``--use-kl-loss``, the values that
one must have, ``--reward-error stop|drop``, or the flags that must not be set, ``no --colocate``; alternatives are
separated by ``or``. A flag counts as set if it differs from its default. What flags cannot express has a name in
``CONDITIONS``, such as ``a critic``. Parts that a flag chooses (estimators, policy losses, rewards) list the flags that
they read: a flag of the others has no effect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import cache, partial

from miles.base.flags import changed, flag_name
from miles.config.lora import counts_experts
from miles.config.model import has_vision_tower, readable_config
from miles.config.notes import MEMORY, NO_EFFECT, OTHER_PART, REPORTING, SAME, Note, note_on
from miles.config.parallel import same_budget
from miles.config.servers.passed_on import VLLM
from miles.config.settings import SECTIONS, Settings, section_of
from miles.models.packing import why_not_shared
from miles.objective.canary import mass_is_known
from miles.objective.chosen import build_objective
from miles.objective.estimators import ESTIMATORS
from miles.objective.policy_losses import POLICY_LOSSES
from miles.tasks.environments.chosen import read_choice
from miles.tasks.rewards.built_in import REWARDS
from miles.tasks.rewards.settings import CUSTOM


@dataclass(frozen=True)
class Condition:
    """Say when a flag has an effect.

    Attributes:
        holds: Whether it has one in this run.
        why: Why it has none, if the condition does not hold.
        heading: The heading of the note.
        comes_last: Whether it is a ``no --flag``: judged last, as that flag may be set to its default first.
        flag: The flag that must be set, if that is the whole condition.
    """

    holds: Callable[[Settings], bool]
    why: str
    heading: str = NO_EFFECT
    comes_last: bool = False
    flag: str | None = None


def _shares_sequences(s: Settings) -> bool:
    """Return whether FSDP's layers of this model can share a sequence; true if its config is not here."""
    if s.backend.reads_megatron_flags or s.parallel.context_parallel_size == 1:
        return True
    config = readable_config(s.model)
    return config is None or why_not_shared(config) is None


def _bounds_turns(s: Settings) -> bool:
    try:
        choice = read_choice(s.rollout.environment or "")
    except ValueError:
        return True  # the validator reports it
    return choice is None or choice[0].bounds_turns


def _compares_groups(s: Settings) -> bool:
    """Return whether a group of equal rewards has advantages of 0."""
    objective = build_objective(s.loss)
    return objective.normalizes_rewards and not objective.estimator.reads_score_norms


def _has_ratio(s: Settings) -> bool:
    """Return whether the objective reads old log-probs."""
    loss = s.loss
    if not loss.type.uses_advantages:
        return False
    if loss.kl_coef != 0 or loss.use_opd:
        return True
    if not loss.type.trains_policy:
        return False
    reads_ratio = build_objective(loss).policy_loss.reads_ratio or loss.use_opsm or loss.use_unbiased_kl
    return not loss.type.uses_policy_loss or reads_ratio


_GENERATED = "this run reads what it trains on, and generates nothing"
_SERVERS = "SGLang's, and another engine generates"

# What flags need that no flag states in one word.
CONDITIONS = {
    "a trainer": Condition(lambda s: s.trains, "with --debug-rollout-only, which trains and saves nothing"),
    "generated samples": Condition(lambda s: not s.reads_samples, _GENERATED),
    "generation": Condition(lambda s: s.generates, "by a run that generates nothing, for training or evaluation"),
    "prompts to draw": Condition(
        lambda s: not s.rollout.loads_samples, "with --load-debug-rollout-data no prompts are drawn"
    ),
    "remote storage": Condition(lambda s: bool(s.checkpoint.urls), "no folder is in remote storage"),
    "answers": Condition(lambda s: not s.reads_conversations, "conversations are trained on unchanged"),
    "conversations": Condition(lambda s: s.reads_conversations, "without --loss-type sft_loss on conversations"),
    "scored answers": Condition(
        lambda s: not s.reads_conversations or s.evaluation.has_sets, "conversations are trained on unchanged"
    ),
    "advantages": Condition(lambda s: s.loss.type.uses_advantages, "with a --loss-type that reads no rewards"),
    "a policy loss": Condition(lambda s: s.loss.type.uses_policy_loss, "with a --loss-type that has no policy loss"),
    "a policy that learns": Condition(lambda s: s.loss.type.trains_policy, "with --loss-type value_loss"),
    "weights that are known": Condition(
        lambda s: mass_is_known(s.loss), "the sum of the tokens' weights is not known beforehand"
    ),
    "a ratio": Condition(_has_ratio, "no ratio is part of the objective"),
    "compared groups": Condition(_compares_groups, "equal rewards may have an advantage"),
    "a reference": Condition(
        lambda s: s.loss.needs_reference,
        "no reference is read without --use-kl-loss or --kl-coef; initial weights come from --hf-checkpoint",
    ),
    "a KL": Condition(lambda s: s.loss.needs_reference, "without --use-kl-loss or --kl-coef"),
    "a KL in the loss": Condition(lambda s: s.loss.adds_kl, "no KL is part of the loss"),
    "a loaded teacher": Condition(
        lambda s: s.loss.teacher_is_loaded, "without --use-opd, or with the teacher's servers"
    ),
    "served teachers": Condition(lambda s: s.loss.teacher_is_served, "without the teacher's servers"),
    "several teachers": Condition(lambda s: len(s.loss.opd_teacher_urls or ()) > 1, "there is one teacher"),
    "a critic": Condition(
        lambda s: s.loss.type.uses_advantages and s.loss.has_critic, "--advantage-estimator has no critic"
    ),
    "an evaluation set": Condition(lambda s: s.evaluation.has_sets, "without an evaluation set"),
    "a chat template": Condition(
        lambda s: s.data.apply_chat_template or s.reads_conversations, "without --apply-chat-template"
    ),
    "a model that reads images": Condition(
        lambda s: has_vision_tower(s.model, if_absent=True), "the model of --hf-checkpoint reads no images"
    ),
    "a custom reward": Condition(lambda s: s.reward.custom_rm_path is not None, "built-in rewards are plain numbers"),
    "a built-in reward": Condition(
        lambda s: s.reward.custom_rm_path is None or s.reward.names(CUSTOM), "--custom-rm-path is the reward"
    ),
    "calls of your reward": Condition(
        lambda s: s.reward.rm_type is None or s.reward.names(CUSTOM), "built-in rewards bound their calls"
    ),
    "fewer tokens to sample from": Condition(
        lambda s: s.reads_samples or s.rollout.truncates_sampling,
        "without --rollout-top-p, --rollout-top-k or --rollout-min-p",
    ),
    "a use of spare prompts": Condition(
        lambda s: (
            s.rollout.dynamic_sampling_filter_path is not None
            or s.rollout.partial_rollout
            or s.rollout.over_sampling_early_stop
        ),
        "no filter drops groups, so no further prompts are submitted",
    ),
    "turns to bound": Condition(_bounds_turns, "the environment's library bounds the turns"),
    "servers": Condition(lambda s: s.engine.has_servers, _SERVERS, OTHER_PART),
    "servers of vLLM": Condition(
        lambda s: VLLM in s.engine.prefixes, "vLLM's, and another engine generates", OTHER_PART
    ),
    "servers or deltas": Condition(lambda s: s.engine.has_servers or s.sends_deltas, _SERVERS, OTHER_PART),
    "engines on several devices": Condition(
        lambda s: s.engine.has_servers, "the torch engine runs on one device", OTHER_PART
    ),
    "files of weights": Condition(
        lambda s: s.sglang.writes_weights, "weights reach the engines without files: see --update-weight-transfer-mode"
    ),
    "engines larger than a node": Condition(
        lambda s: not s.cluster.colocate and s.sglang.rollout_num_gpus_per_engine > s.sglang.per_node(s.cluster),
        "no engine is larger than a node, or it has the trainer's devices; Ray knows the devices of each node",
        SAME,
    ),
    "shared devices": Condition(
        lambda s: s.cluster.colocate and s.engine.has_servers and not s.sglang.rollout_external and s.generates,
        "the trainer and the engines have their own devices, or no SGLang server is started",
        MEMORY,
    ),
    "layers that share sequences": Condition(
        _shares_sequences,
        "layers with recurrent state or sparse attention need whole sequences, so no ranks share one",
        MEMORY,
    ),
    "its own budget": Condition(
        lambda s: not same_budget(s.parallel, s.training),
        "--dynamic-context-parallel fills micro-batches by tokens, up to --max-seqlen-per-dp-cp-rank on each rank",
        SAME,
    ),
    "Megatron": Condition(
        lambda s: s.backend.reads_megatron_flags,
        "Megatron's layout, and --train-backend fsdp divides every weight over all ranks",
        OTHER_PART,
    ),
    "experts": Condition(
        lambda s: (config := readable_config(s.model)) is None or counts_experts(config),
        "the model has no experts",
        OTHER_PART,
    ),
}
_HEADINGS = {
    **dict.fromkeys(("--use-wandb", "--use-mlflow", "--report-to", "no --no-report"), REPORTING),
    "no --device cpu": MEMORY,
    "--rollout-engine torch": OTHER_PART,
}


def read_needs(text: str) -> list[Condition]:
    """Read the ``needs`` of a flag.

    Raises:
        ValueError: A part is neither a flag nor the name of a condition.
    """
    return [_condition(part) for part in text.split(", ")]


def _condition(text: str) -> Condition:
    if text in CONDITIONS:
        return CONDITIONS[text]
    if " or " in text:
        several = [_condition(part) for part in text.split(" or ")]
        why = " and ".join(one.why for one in several)
        return Condition(lambda s: any(one.holds(s) for one in several), why)
    name, _, values = text.removeprefix("no ").partition(" ")
    field = name.removeprefix("--").replace("-", "_")
    accepted = values.split("|")
    if not name.startswith("--") or field not in section_of():
        raise ValueError(f"needs={text!r}: neither a flag nor one of {', '.join(CONDITIONS)}")

    def is_set(s: Settings) -> bool:
        section = getattr(s, section_of()[field])
        return str(getattr(section, field)) in accepted if values else bool(changed(section, [field]))

    written = f"{name} {' or '.join(accepted)}".rstrip()
    heading = _HEADINGS.get(text, NO_EFFECT)
    if text.startswith("no "):
        return Condition(lambda s: not is_set(s), f"with {written}", heading, comes_last=True)
    return Condition(is_set, f"without {written}", heading, flag=None if values else name)


@cache
def conditions() -> tuple[tuple[str, tuple[Condition, ...]], ...]:
    """Return every flag that has conditions, with these: first the parts that read it, then its declared needs."""
    by_flag = dict[str, list[Condition]]()
    for name, condition in _of_parts():
        by_flag.setdefault(name, []).append(condition)
    for section in SECTIONS.values():
        for field in fields(section):
            if "needs" in field.metadata:
                by_flag.setdefault(field.name, []).extend(read_needs(field.metadata["needs"]))
    return tuple((name, tuple(of_flag)) for name, of_flag in by_flag.items())


def _of_parts() -> Iterator[tuple[str, Condition]]:
    """Yield the flags that only some estimators, policy losses or rewards read, with the condition that one does."""
    parts = ((ESTIMATORS, _reads_estimator), (POLICY_LOSSES, _reads_policy_loss), (REWARDS, _reads_reward))
    for registry, reads in parts:
        for name in registry.reads:
            *others, last = registry.readers(name)
            readers = f"{', '.join(others)} or {last}" if others else last
            yield name, Condition(partial(reads, name), f"read by {flag_name(registry.flag)} {readers}")


def _reads_estimator(name: str, s: Settings) -> bool:
    """Return whether the estimator reads a flag, or the validator refuses it, since it asks for a missing part."""
    loss = s.loss
    estimator = build_objective(loss).estimator
    if not loss.type.uses_advantages:
        return name in loss.type.lacks
    return name in (*estimator.reads, *estimator.instead)


def _reads_policy_loss(name: str, s: Settings) -> bool:
    """Return whether the policy loss reads a flag. A function of the user's may read any."""
    loss = s.loss
    if loss.type.reads_any or (loss.type.uses_policy_loss and loss.custom_policy_loss_function_path is not None):
        return True
    return loss.type.uses_policy_loss and name in build_objective(loss).policy_loss.reads


def _reads_reward(name: str, s: Settings) -> bool:
    return any(name in REWARDS[chosen].reads for chosen in REWARDS if s.reward.names(chosen))


def without_effect(settings: Settings) -> tuple[Settings, list[Note]]:
    """Set every flag that has no effect to its default; return the settings, and a note for each.

    A flag whose condition is another flag without effect has none either.
    """
    notes, removed = list[Note](), set[str]()
    while unmet := list(_unmet(settings)):
        first = [pair for pair in unmet if not pair[1].comes_last]
        for name, condition in first or unmet:
            section = getattr(settings, section_of()[name])
            why = f"{condition.flag} has no effect" if condition.flag in removed else condition.why
            notes.append(note_on(condition.heading, name, getattr(section, name), why))
            removed.add(flag_name(name))
            default = getattr(type(section), name)  # a dataclass keeps it as an attribute of the class
            settings = replace(settings, **{section_of()[name]: replace(section, **{name: default})})
    return settings, notes


def _unmet(settings: Settings) -> Iterator[tuple[str, Condition]]:
    """Yield each flag that is set and has no effect, with the first condition that does not hold."""
    for name, of_flag in conditions():
        if changed(getattr(settings, section_of()[name]), [name]):
            unmet = next((condition for condition in of_flag if not condition.holds(settings)), None)
            if unmet is not None:
                yield name, unmet
