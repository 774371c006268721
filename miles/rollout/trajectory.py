"""Trajectories of several turns, each made by a function: ``--custom-generate-function-path`` or a built-in one.

A trajectory alternates turns of the model with tokens of a tool or an environment.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Protocol

from miles.base.text import one_line
from miles.base.threads import gather_or_cancel
from miles.engine.base import Engine, FinishReason, Generation, GenerationRequest, SamplingParams
from miles.rollout.groups import STATUS, GroupSpec, answer_text, fit_context, response_seed
from miles.types.replay import continued, extended
from miles.types.sample import NO_WEIGHTS, PromptGroup, Sample, SampleStatus


@dataclass(frozen=True)
class Turn:
    """The model's output in one turn.

    ``text`` comes from ``answer_text``, without the special token that ended it; ``finish_reason`` is as an engine
    gives it.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason


@dataclass
class Trajectory:
    """The object that a custom generate function works on: one response that grows with each turn.

    The model's tokens have loss mask 1 and the engine's log-probs. The tokens of ``append`` have mask 0 and log-prob 0:
    the model reads them and is never trained on them. ``--rollout-max-response-len`` and
    ``--rollout-max-context-len`` limit the whole response, including the environment's tokens.
    """

    sample: Sample  # ``sample.prompt`` is the task; its columns grow with the turns
    tokenizer: Any  # a transformers tokenizer
    engine: Engine
    sampling: SamplingParams
    seed_of_turn: Callable[[int], int]
    max_context_len: int | None = None
    turns: int = 0

    @property
    def room(self) -> int:
        """Tokens that may still be added."""
        left = self.sampling.max_new_tokens - len(self.sample.response_ids)
        if self.max_context_len is not None:
            left = min(left, self.max_context_len - len(self.sample.tokens))
        return max(left, 0)

    @property
    def finished(self) -> bool:
        """True if no room is left, or if the response was aborted from outside."""
        return self.room == 0 or self.sample.status is SampleStatus.ABORTED

    async def generate(self, *, stop_token_ids: Sequence[int] = (), max_new_tokens: int | None = None) -> Turn:
        """Let the model continue until its end-of-sequence token, one of ``stop_token_ids``, or the limits.

        If no room is left, nothing is generated, and the turn is empty with finish_reason ``length``. Raises the
        engine's errors.
        """
        if self.finished:
            return Turn("", [], "abort" if self.sample.status is SampleStatus.ABORTED else "length")
        sampling = replace(
            self.sampling,
            max_new_tokens=min(self.room, max_new_tokens or self.room),
            stop_token_ids=(*self.sampling.stop_token_ids, *stop_token_ids),
        )
        seeds = (self.seed_of_turn(self.turns),)
        request = GenerationRequest(tuple(self.sample.tokens), seeds, sampling, self.sample.prompt.images)
        [generation] = await self.engine.generate(request)
        self.turns += 1
        self.sample.status = STATUS[generation.finish_reason]
        self._extend(generation.token_ids, generation)
        text = self._text(generation.token_ids, [1] * len(generation.token_ids))
        return Turn(text, generation.token_ids, generation.finish_reason)

    def append(self, text: str) -> None:
        """Add the text of a tool or an environment, without special tokens of the tokenizer.

        Text that does not fit is cut at the limit, and the sample becomes ``TRUNCATED``.

        Raises:
            ValueError: The text has a placeholder of an image, which would be read as text.
        """
        token_ids = self.tokenizer.encode(text, add_special_tokens=False)
        images = self.sample.prompt.images
        if images is not None and images.placeholder_id in token_ids:
            raise ValueError(
                f"append({one_line(text, 60)!r}): it takes no images, and the text has the placeholder of one; have an "
                "environment, a tool or an agent program give it (docs/images.md)"
            )
        if len(token_ids) >= self.room:
            self.sample.status = SampleStatus.TRUNCATED
        self._extend(token_ids[: self.room])

    def _extend(self, token_ids: list[int], generation: Generation | None = None) -> None:
        sample = self.sample
        extend(sample, token_ids, generation)
        sample.response = sample.prompt.prefill + self._text(sample.response_ids, sample.loss_mask)

    def _text(self, token_ids: list[int], mask: list[int]) -> str:
        ended = self.sample.status is SampleStatus.COMPLETED
        return answer_text(self.tokenizer, token_ids, mask, ended, self.sampling.stop_texts)


def extend(sample: Sample, token_ids: list[int], generation: Generation | None = None) -> None:
    """Add the tokens of a generation to a response; or, without one, tokens that the model only reads."""
    number, before = len(token_ids), len(sample.response_ids)
    sample.response_ids += token_ids
    sample.loss_mask += [0 if generation is None else 1] * number
    if generation is None:
        sample.support = extended(sample.support, before, None, number)
        sample.rollout_log_probs += [0.0] * number
        sample.weight_versions += [NO_WEIGHTS] * number
    else:
        sample.support = extended(sample.support, before, generation.support, number)
        sample.experts = continued(sample.experts, generation.experts)
        sample.rollout_log_probs += generation.log_probs
        sample.weight_versions += generation.token_versions


@lru_cache(maxsize=8)  # a vocabulary is read once, not in every turn
def token_ids_with(tokenizer: Any, text: str) -> tuple[int, ...]:
    """Return the ids of all tokens that contain ``text``, for example a character: ``stop_token_ids`` that stop at it.

    The token may also hold what follows the text: ``)`` stops at a token ``).`` too.
    """
    ids = sorted(tokenizer.get_vocab().values())
    return tuple(index for index in ids if text in tokenizer.decode([index], skip_special_tokens=False))


class GenerateFunction(Protocol):
    """Takes a trajectory from its prompt to its end, by ``trajectory.generate()`` and ``trajectory.append(text)``.

    It returns None, and the trajectory's sample is trained on. If one trajectory becomes several samples (context
    compaction), it returns a list of them, made with ``dataclasses.replace`` of the trajectory's sample. They share
    its trajectory_id.
    """

    async def __call__(self, trajectory: Trajectory) -> list[Sample] | None:
        """Extend ``trajectory`` to its end."""


async def generate_trajectories(
    function: GenerateFunction,
    origin: str,
    group: PromptGroup,
    engine: Engine,
    tokenizer: Any,
    spec: GroupSpec,
) -> PromptGroup:
    """Generate the trajectories of ``spec`` by ``function``, all at once; with its first two arguments, a generator.

    A function that takes one turn gives what ``generate_group`` gives: the first turn has the sample's own seed.

    Raises:
        ValueError: The function returns something wrong; the message begins with ``origin``, its flag and value.
        Exception: Whatever the function raises.
    """
    fit_context(spec.sampling, group.prompt, spec.max_context_len)  # refuses a prompt that leaves no room

    async def make(k: int) -> list[Sample]:
        seed = spec.seed_of(group.group_index, k)
        trajectory = Trajectory(
            Sample(group.prompt, group.group_index, group.group_index * spec.n_samples + k),
            tokenizer,
            engine,
            spec.sampling,
            lambda turn: response_seed(seed, "turn", turn) if turn else seed,
            spec.max_context_len,
        )
        return _checked(await function(trajectory), trajectory, origin)

    trajectories = await gather_or_cancel(make(k) for k in range(spec.n_samples))
    return PromptGroup(group.group_index, group.prompt, [sample for samples in trajectories for sample in samples])


def _checked(answer: Any, trajectory: Trajectory, origin: str) -> list[Sample]:
    first = trajectory.sample
    samples = [first] if answer is None else answer
    if not isinstance(samples, Sequence) or not samples or not all(isinstance(s, Sample) for s in samples):
        raise ValueError(
            f"{origin}: it returned {answer!r:.80} for {first.prompt.source}; return None for the trajectory's own "
            f"sample, or a list of one or more samples"
        )
    for sample in samples:
        if (sample.group_index, sample.trajectory_id) != (first.group_index, first.trajectory_id):
            raise ValueError(
                f"{origin}: a sample of {first.prompt.source} has group {sample.group_index} and trajectory_id "
                f"{sample.trajectory_id}, but its trajectory has group {first.group_index} and trajectory_id "
                f"{first.trajectory_id}; make further samples with dataclasses.replace(trajectory.sample, ...)"
            )
        if not sample.response_ids and sample.status is not SampleStatus.ABORTED:
            raise ValueError(
                f"{origin}: a sample of {first.prompt.source} has no response; call trajectory.generate() at least once"
            )
        sample.check()
    return list(samples)
