"""The flags of related launchers that are no setting here: each is accepted with a note, or refused (``tables/``)."""

import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Literal, TypeAlias

from miles.base.flags import Errors
from miles.config.checkpoint import first_iteration
from miles.config.model import readable_config
from miles.config.notes import NO_EFFECT, READ_AS, SAME, Note, written
from miles.config.settings import Settings
from miles.tasks.environments.built_in.tool_calls import ToolCalls

Kind = Literal["switch", "value", "list", "optional"]
ForeignFlags: TypeAlias = Mapping[str, Any]  # flags of the tables in a command, with their values; True for a switch

_KINDS: dict[str, Kind] = {"": "switch", "V": "value", "V...": "list", "V?": "optional"}


@dataclass(frozen=True)
class Foreign:
    """Describe one flag.

    Attributes:
        flag: The flag.
        kind: The words that it takes: none, one, several, or one at most.
        why: Why it changes nothing here or, if it is refused, why it cannot be obeyed.
        heading: The heading of its note; None if it is refused.
        instead: What to do instead, if it is refused.
        neutral: The values at which a refused flag asks for nothing.
        unless: The name of the condition under which a refused flag changes nothing.
        unless_why: Why not.
        is_megatron: Whether the flag is one of Megatron, and so chooses that backend.
    """

    flag: str
    kind: Kind
    why: str
    heading: str | None = None
    instead: str = ""
    neutral: tuple[str, ...] = ()
    unless: str | None = None
    unless_why: str = ""
    is_megatron: bool = False

    @property
    def verdict(self) -> str:
        """What happens to the flag, in the words of the page of launch scripts."""
        if self.heading is not None:
            return "obeyed" if self.heading == READ_AS else "noted"
        return "noted or refused" if self.neutral or self.unless is not None else "refused"

    def judge(self, value: Any, settings: Settings, command: ForeignFlags, errors: Errors) -> Note | None:
        """Return the note on the flag, or add its error.

        Args:
            value: Its value; True for a switch.
            settings: The settings of the run.
            command: All flags of the tables in the command.
            errors: Collects the refusal.
        """
        text = written(self.flag, value)
        if self.heading is not None:
            return Note(self.heading, text, self.why)
        if self.neutral and _text(value) in self.neutral:
            return Note(SAME, text, "the value that asks for nothing")
        if self.unless is not None and CONDITIONS[self.unless](settings, command):
            return Note(NO_EFFECT, text, self.unless_why)
        errors.add(f"{text}: {self.why}; {self.instead}")
        return None


def _text(value: Any) -> str:
    return " ".join(value) if isinstance(value, list) else str(value)


def _has_llama3_rope(settings: Settings, command: ForeignFlags) -> bool:
    """Return whether the rotary embedding of the model is scaled as Llama 3.1's, or may be: its config is not here."""
    config = readable_config(settings.model)
    if config is None:
        return True
    rope: dict[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return bool(rope.get("rope_type", rope.get("type")) == "llama3")


def _keeps_tokens(settings: Settings, command: ForeignFlags) -> bool:
    flags = ("--slime-router-middleware-paths", "--miles-router-middleware-paths")
    paths = [path for flag in flags for path in command.get(flag, ())]
    return all(path.rpartition(".")[2] == "RadixTreeMiddleware" for path in paths)


def _trains_what_generated(settings: Settings, command: ForeignFlags) -> bool:
    rollout = settings.rollout
    return not (rollout.async_steps or rollout.fully_async or rollout.partial_rollout)


def _is_weight_decay(flag: str) -> Callable[[Settings, ForeignFlags], bool]:
    def is_equal(settings: Settings, command: ForeignFlags) -> bool:
        try:
            return float(command[flag]) == settings.optimizer.weight_decay
        except ValueError:
            return False

    return is_equal


# Values of ``unless`` in the tables: they name runs in which a refused flag changes nothing.
CONDITIONS: dict[str, Callable[[Settings, ForeignFlags], bool]] = {
    "has_tool_calls": lambda s, command: (s.rollout.environment or "").startswith(f"{ToolCalls.name}:"),
    "keeps_tokens": _keeps_tokens,
    "shares_gpus": lambda s, command: s.cluster.colocate,
    "evaluates_the_same_key": lambda s, command: str(command["--eval-reward-key"]) == s.reward.reward_key,
    "samples_teacher_tokens": lambda s, command: str(command.get("--opd-log-prob-top-k", "0")) == "0",
    "centers_no_scores": lambda s, command: "--use-score-centering" not in command,
    "has_no_advantages": lambda s, command: not s.loss.type.uses_advantages,
    "has_no_adapter": lambda s, command: not s.lora.trains_adapter,
    "flushes_cache": lambda s, command: not s.sglang.keeps_cache,
    "trains_what_generated": _trains_what_generated,
    "has_llama3_rope": _has_llama3_rope,
    # Layers come from transformers or Megatron-Bridge, and not from the flags that describe them.
    "trains_any_layer": lambda s, command: not s.backend.reads_megatron_flags or s.megatron.uses_bridge,
    "loads_nothing": lambda s, command: s.checkpoint.load is None,
    "has_checkpoint": lambda s, command: s.checkpoint.load is None or first_iteration(s.checkpoint) not in (None, 0),
    "divides_weights": lambda s, command: not s.backend.reads_megatron_flags,
    "starts_at_weight_decay": _is_weight_decay("--start-weight-decay"),
    "ends_at_weight_decay": _is_weight_decay("--end-weight-decay"),
}


def table(name: str) -> dict[str, Any]:
    """Return a file of ``tables/``."""
    return tomllib.loads((files(__package__) / "tables" / f"{name}.toml").read_text(encoding="utf-8"))


def rows(name: str) -> Iterator[Foreign]:
    """Yield the flags of a file of ``tables/``."""
    read = table(name)
    for verdict in read["verdict"]:
        words = [flag.partition(" ") for flag in verdict.pop("flags")]
        neutral = tuple(verdict.pop("neutral", ()))
        for flag, _, value in words:
            yield Foreign(flag, _KINDS[value], neutral=neutral, is_megatron=read.get("is_megatron", False), **verdict)


FOREIGN_FLAGS = {row.flag: row for name in ("launcher", "megatron", "training") for row in rows(name)}
