"""Prompts, the samples generated from them, and the groups that these form.

Worked example, used throughout the docstrings: two prompts, two trajectories each. The data source draws prompts 0 and
1 and gives them ``group_index`` 0 and 1. Generation gives the four trajectories ``trajectory_id`` 0, 1 (group 0) and
2, 3 (group 1). A trajectory that is cut in two (context compaction) becomes two samples of one ``trajectory_id``.
"""

from __future__ import annotations

import base64
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import mean
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    from miles.types.images import PromptImages
    from miles.types.replay import TokenSets


class SampleStatus(StrEnum):
    """How a sample ended."""

    PENDING = "pending"  # not generated yet
    COMPLETED = "completed"  # an end-of-sequence or stop token was sampled
    TRUNCATED = "truncated"  # the length limit was reached first
    ABORTED = "aborted"  # generation was stopped from outside; what was generated is kept


IMAGE_PLACEHOLDER = "<image>"  # in the text of a prompt, at the position of an image from the column of images
NO_WEIGHTS = -1  # in ``weight_versions``: the token came from a tool or an environment


def data_uri(kind: str, content: bytes) -> str:
    """Return a file of a media type, such as ``image/png``, as a ``data:`` URI."""
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


@dataclass(frozen=True)
class Prompt:
    """One row of a prompt set, tokenized.

    ``text`` is the prompt as the model reads it (chat template applied); ``token_ids`` its tokens; ``label`` the
    reference answer; ``metadata`` whatever else the row carries for rewards and filters; ``source`` is the location of
    the row (``file.jsonl:17``), for messages to the user; ``prompt_set`` the name of its set in a mixture; ``input``
    the value of its column of prompts, unchanged: text or messages; ``tools`` the tools of the column ``--tool-key``;
    ``images`` the images that replace the placeholders in ``token_ids``.
    """

    text: str
    token_ids: tuple[int, ...]
    label: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)
    source: str = ""
    prompt_set: str = ""
    input: Any = field(default=None, compare=False)  # saved samples have neither
    tools: Any = field(default=None, compare=False)
    images: PromptImages | None = None

    @property
    def prefill(self) -> str:
        """The end of ``text`` that begins the answer: the assistant's message, if the model continues one."""
        last = self.input[-1] if isinstance(self.input, list) and self.input else None
        if not isinstance(last, dict) or last.get("role") != "assistant" or not isinstance(last.get("content"), str):
            return ""
        content = last["content"].strip()
        before, _, after = self.text.rpartition(content) if content else ("", "", self.text)
        return "" if after.strip() else self.text[len(before) :]


@dataclass
class Sample:
    """One token sequence: the prompt's tokens, then ``response_ids`` with a 0/1 ``loss_mask`` over them.

    >>> p = Prompt("2*3=", (1, 2, 3))
    >>> s = Sample(p, group_index=0, trajectory_id=1, response_ids=[6, 0], loss_mask=[1, 1], rollout_log_probs=[-1, -2])
    >>> s.tokens, s.num_loss_tokens
    ([1, 2, 3, 6, 0], 2)
    """

    prompt: Prompt
    group_index: int  # the prompt draw that it came from, assigned when the prompt is drawn
    trajectory_id: int | None = None  # the trajectory that it belongs to, assigned when it is generated
    response_ids: list[int] = field(default_factory=list)
    response: str = ""
    loss_mask: list[int] = field(default_factory=list)  # one 0/1 per response token
    # The engine's, of logits / temperature; over ``support`` if it is given.
    rollout_log_probs: list[float] = field(default_factory=list)
    status: SampleStatus = SampleStatus.PENDING
    teacher_log_probs: list[float] = field(default_factory=list)  # of a teacher in servers; empty without one
    reward: float | None = None
    reward_parts: dict[str, float] = field(default_factory=dict)  # of a weighted sum: each reward by name, unweighted
    # Version of the weights behind each response token, NO_WEIGHTS for a tool's; empty if not recorded.
    weight_versions: list[int] = field(default_factory=list)
    failure: str = ""  # who failed to make the trajectory, and how; then --reward-error decides how it is scored
    environment_reward: float | None = None  # of the environment that made the trajectory
    remove_sample: bool = False  # set by a function of the user's: the sample is not trained on
    support: TokenSets | None = None  # what truncated sampling drew each response token from, if the engine said so
    # Experts of each layer for the tokens from the first on, [positions, layers, k], if the engine said them.
    experts: np.ndarray | None = field(default=None, compare=False)
    advantage: float | None = None  # given by a function of the user's, instead of the estimator's

    @property
    def label(self) -> Any:
        """The reference answer of the prompt."""
        return self.prompt.label

    @property
    def metadata(self) -> dict[str, Any]:
        """What else the prompt's row carries."""
        return self.prompt.metadata

    @property
    def index(self) -> int | None:
        """The trajectory, by the name that functions for related launchers read."""
        return self.trajectory_id

    @property
    def response_length(self) -> int:
        """Response tokens."""
        return len(self.response_ids)

    def get_reward_value(self, args: Any) -> float:
        """Return the reward, as functions for related launchers ask for it; ``args`` is not read."""
        assert self.reward is not None, f"a sample of group {self.group_index} has no reward yet"
        return self.reward

    @property
    def rollout_id(self) -> int | None:
        """The former name of ``trajectory_id``, readable for one more release."""
        warnings.warn("Sample.rollout_id is now Sample.trajectory_id", DeprecationWarning, stacklevel=2)
        return self.trajectory_id

    @property
    def tokens(self) -> list[int]:
        """Prompt and response token ids, in order."""
        return [*self.prompt.token_ids, *self.response_ids]

    @property
    def num_loss_tokens(self) -> int:
        """Response tokens whose mask is 1."""
        return sum(self.loss_mask)

    @property
    def trained_mask(self) -> list[int]:
        """The loss mask that is trained with: 0 throughout for a sample that was removed."""
        return [0] * len(self.loss_mask) if self.remove_sample else self.loss_mask

    def check(self) -> None:
        """Raise ``ValueError`` unless per-token columns are as long as the response, and tokens in their support."""
        n = len(self.response_ids)
        columns: dict[str, Sequence[float]] = {
            "loss_mask": self.loss_mask,
            "rollout_log_probs": self.rollout_log_probs,
            "teacher_log_probs": self.teacher_log_probs or [0.0] * n,
            "weight_versions": self.weight_versions or [NO_WEIGHTS] * n,
            "support": range(n if self.support is None else len(self.support)),
        }
        for name, column in columns.items():
            if len(column) != n:
                raise ValueError(
                    f"sample of group {self.group_index}, trajectory {self.trajectory_id}: {name} has {len(column)} "
                    f"entries for {n} response tokens; give one entry per token"
                )
        if self.experts is not None and not (self.experts.ndim == 3 and len(self.experts) < len(self.tokens)):
            raise ValueError(
                f"sample of group {self.group_index}, trajectory {self.trajectory_id}: experts of shape "
                f"{self.experts.shape} for {len(self.tokens)} tokens; give [positions, layers, k] of all but the last"
            )
        if self.support is not None and not self.support.contain(self.response_ids).all():
            raise ValueError(
                f"sample of group {self.group_index}, trajectory {self.trajectory_id}: support lacks a response token; "
                "a token is among those that it was drawn from"
            )


@dataclass
class PromptGroup:
    """All samples of one drawn prompt. They share ``group_index``.

    >>> PromptGroup(0, Prompt("2*3=", (1,))).samples
    []
    """

    group_index: int
    prompt: Prompt
    samples: list[Sample] = field(default_factory=list)
    dropped_trajectories: int = 0  # that were generated and are not in ``samples``: the reward function failed, …
    unconverted_trajectories: int = 0  # … or, counted there too, the user's conversion returned no row
    baseline_reward: float | None = None  # of the prompt's greedy response, if the estimator asks for one
    baseline_tokens: int = 0  # of that response

    @property
    def trajectories(self) -> list[list[Sample]]:
        """The samples of each trajectory, in the order of their first ones."""
        return in_trajectories(self.samples)

    @property
    def rewards(self) -> list[float]:
        """The rewards of the samples, in order. All samples must have been scored."""
        return [self._reward(sample) for sample in self.samples]

    @property
    def trajectory_rewards(self) -> list[float]:
        """The reward of each trajectory, as estimators have it: the mean of its samples' rewards."""
        return [exact_mean(map(self._reward, trajectory)) for trajectory in self.trajectories]

    def _reward(self, sample: Sample) -> float:
        assert sample.reward is not None, f"group {self.group_index} has unscored samples"
        return float(sample.reward)


def exact_mean(values: Iterable[float]) -> float:
    """Return the mean, correctly rounded: of equal values it is this value, and not one next to it."""
    values = list(values)
    return values[0] if len(values) == 1 else mean(values)


def in_trajectories(samples: Iterable[Sample]) -> list[list[Sample]]:
    """Return the samples of each trajectory, in the order of their first ones."""
    by_trajectory: dict[tuple[int, int | None], list[Sample]] = {}
    for sample in samples:
        by_trajectory.setdefault((sample.group_index, sample.trajectory_id), []).append(sample)
    return list(by_trajectory.values())
