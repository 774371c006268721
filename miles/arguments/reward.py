"""How responses are scored."""

from dataclasses import dataclass
from typing import Optional

from miles.flags import flag

BUILT_IN_REWARDS = ("exact_match", "last_number", "math", "reasoning_gym", "length")


@dataclass(frozen=True)
class RewardArguments:
    """reward: the reward function and what happens when it fails."""

    rm_type: Optional[str] = flag(None, "built-in reward", choices=BUILT_IN_REWARDS, type=str)
    custom_rm_path: Optional[str] = flag(None, "your reward function, module:function or module.function")
    reward_key: Optional[str] = flag(None, "key of the reward where the function returns an object")
    reward_error_value: Optional[float] = flag(
        None, "reward of a sample whose reward function raised; without it such a sample stops the run"
    )
    reward_timeout: float = flag(300.0, "seconds that a call of the reward function may take; 0 is no limit")
    log_passrate: bool = flag(False, "log pass@k of the training groups too (a sample passes with reward 1 or more)")
