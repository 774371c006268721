"""Declare and check the flags of rewards. Those that one built-in reward owns are declared in its file."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from math import isfinite
from typing import Optional

from miles.base.flags import Errors, flag
from miles.base.text import InputError
from miles.tasks.rewards.built_in import REWARDS
from miles.types.sample import Prompt

ENVIRONMENT = "environment"  # the reward that an environment gives
CUSTOM = "custom"  # the name of --custom-rm-path among several rewards


@dataclass(frozen=True)
class CommonRewardFlags:
    """reward: the flags that belong to no single built-in reward."""

    rm_type: Optional[str] = flag(
        None,
        "built-in reward, or several with weights, such as math:1,repetition:0.2 (custom is your own, of "
        f"--custom-rm-path). {REWARDS.help}",
        needs="scored answers, a built-in reward",
        type=str,
    )
    custom_rm_path: Optional[str] = flag(
        None, "your reward function, module:function or module.function", needs="scored answers"
    )
    reward_key: Optional[str] = flag(
        None, "key of the reward if your function returns an object", needs="a custom reward"
    )
    custom_reward_post_process_path: Optional[str] = flag(
        None,
        "your function that makes advantages of rewards, instead of the estimator's (docs/rewards.md)",
        needs="advantages",
    )
    reward_error: Optional[str] = flag(
        None,
        "if the reward function fails on a sample: stop the run, give it --reward-error-value, or drop its trajectory; "
        "default: stop, or value with --reward-error-value",
        choices=("stop", "value", "drop"),
        type=str,
    )
    reward_error_value: Optional[float] = flag(
        None, "reward of a sample that the reward function fails on", needs="no --reward-error stop|drop"
    )
    reward_timeout: float = flag(
        300.0,
        "seconds that a call of your reward function may take; 0 is no limit (a built-in reward has limits per answer "
        "of its own)",
        needs="calls of your reward",
        at_least=0,
    )
    reward_memory: Optional[float] = flag(
        None,
        "GiB that the processes of your reward function may use together; 0 is no limit; default: half of the "
        "machine's memory",
        needs="calls of your reward",
        at_least=0,
    )
    log_passrate: bool = flag(
        False,
        "log pass@k of the training groups too (a sample passes with reward 1 or more; in a sum, with 1 or more of its "
        "first reward that reads the prompt's row)",
    )


@dataclass(frozen=True)
class RewardArguments(*reversed(REWARDS.own_flags), CommonRewardFlags):  # type: ignore[misc]
    """reward: the reward function, and what happens when it fails."""

    @property
    def on_error(self) -> str:
        """What happens if the reward function fails on a sample: stop, value or drop."""
        return self.reward_error or ("stop" if self.reward_error_value is None else "value")

    @property
    def drops_errors(self) -> bool:
        """Whether a sample that the reward function fails on is dropped."""
        return self.on_error == "drop"

    @cached_property  # read for every row
    def weights(self) -> Mapping[str, float]:
        """The weight of each reward by name; ``custom`` is the weight of ``custom_rm_path``. Empty without a reward."""
        if self.rm_type is not None:
            return reward_weights(self.rm_type)
        return {} if self.custom_rm_path is None else {CUSTOM: 1.0}

    def names(self, name: str) -> bool:
        """Return whether ``--rm-type`` has this name. Unlike for ``weights``, it need not be valid."""
        return self.rm_type is not None and name in dict(_named_rewards(self.rm_type))

    @property
    def has_custom(self) -> bool:
        """Whether a function of the user's is called."""
        return self.custom_rm_path is not None

    @property
    def labels_optional(self) -> bool:
        """Whether rows may lack a label: code of the user or an environment may not need it, and no reward does."""
        return (self.has_custom or ENVIRONMENT in self.weights) and not self.needing_labels

    @property
    def needing_labels(self) -> list[str]:
        """The built-in rewards of ``--rm-type`` that cannot score a row without a label."""
        built_in = [REWARDS[name] for name in self.weights if name in REWARDS]
        return [
            reward.name
            for reward in built_in
            if reward.needs_label
            and (reward.instead_of_label is None or getattr(self, reward.instead_of_label) is None)
        ]

    def check_prompt(self, prompt: Prompt) -> None:
        """Check that the built-in rewards can score answers to ``prompt``, unless the flags say what to do otherwise.

        Raises:
            ValueError: One cannot; the message names the prompt.
        """
        for name in self.weights:
            if name in REWARDS and self.on_error == "stop":
                REWARDS[name].check_prompt(prompt, REWARDS[name].flags_of(self))

    @property
    def is_sum(self) -> bool:
        """Whether the reward is a weighted sum, with parts that are logged."""
        return self.rm_type is not None and self.rm_type not in REWARDS


def reward_weights(rm_type: str) -> dict[str, float]:
    """Read ``--rm-type``: a name, or names with weights.

    Raises:
        InputError: A name is unknown or given twice, or a weight is no number, or 0.

    >>> reward_weights("math:0.7,length:0.01")
    {'math': 0.7, 'length': 0.01}
    """
    weights: dict[str, float] = {}
    several = "," in rm_type or ":" in rm_type
    for name, weight in _named_rewards(rm_type):
        if name not in REWARDS and not (several and name == CUSTOM):
            raise InputError(f"--rm-type {rm_type}: {_unknown(name)}")
        if name in weights:
            raise InputError(f"--rm-type {rm_type}: names {name} twice; give each reward once")
        weights[name] = 1.0 if weight is None else _weight(weight, rm_type)
    return weights


def _named_rewards(rm_type: str) -> Iterator[tuple[str, str | None]]:
    """Yield each name of ``--rm-type``, and its weight as written."""
    for word in rm_type.split(","):
        name, colon, weight = word.strip().partition(":")
        yield name, weight if colon else None


def _unknown(name: str) -> str:
    if name == CUSTOM:
        rule = "alone names no reward: it stands for --custom-rm-path in a sum"
        return f"{rule}; drop it, and give your function with --custom-rm-path module:function"
    near = get_close_matches(name, REWARDS, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    fault = f"no such reward as {name!r}; {hint}the built-in ones are {', '.join(REWARDS)}"
    return f"{fault}; for your own give --custom-rm-path module:function"


def _weight(text: str, rm_type: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        weight = 0.0
    if not isfinite(weight) or weight == 0:
        raise InputError(f"--rm-type {rm_type}: {text!r} is no weight; give a number other than 0, such as math:0.7")
    return weight


def check_reward(reward: RewardArguments, needed: bool, errors: Errors) -> None:
    """Check that there is a reward if responses are scored, and the flags of the rewards.

    Args:
        reward: The section.
        needed: Whether anything is generated, and so scored.
        errors: Collects the faults.
    """
    if needed and reward.rm_type is None and reward.custom_rm_path is None:
        errors.add(
            "--rm-type or --custom-rm-path is required: responses must be scored; add one of the two, "
            "such as --rm-type exact_match"
        )
    with errors.catching():
        _check_named(reward, errors)
    if reward.on_error == "value" and reward.reward_error_value is None:
        errors.refuse("reward_error", "value", "needs the value", "add --reward-error-value, such as 0")


def _check_named(reward: RewardArguments, errors: Errors) -> None:
    """Check the rewards that are named.

    Raises:
        InputError: A name or a weight is wrong.
    """
    names = list(reward.weights)
    chosen = [REWARDS[name] for name in names if name != CUSTOM]
    if CUSTOM in names and reward.custom_rm_path is None:
        errors.refuse("rm_type", reward.rm_type, "custom is your own reward", "add --custom-rm-path module:function")
    for choice in chosen:
        choice.check(choice.flags_of(reward), errors)
