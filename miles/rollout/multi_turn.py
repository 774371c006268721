"""Groups of trajectories that a user's function makes, turn by turn: ``--custom-generate-function-path``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

from miles.arguments.rollout import RolloutArguments
from miles.concurrency import gather_or_cancel
from miles.engine.base import Engine, SamplingParams
from miles.import_path import load_function
from miles.rollout.generate import GroupGenerator, SeedOf, fit_context, generate_group, response_seed
from miles.rollout.trajectory import Trajectory
from miles.sample import PromptGroup, Sample, SampleStatus

_FLAG = "--custom-generate-function-path"


class GenerateFunction(Protocol):
    """Takes a trajectory from its prompt to its end, by ``trajectory.generate()`` and ``trajectory.append(text)``.

    It returns None, and the trajectory's sample is trained on; or a list of samples, made with ``dataclasses.replace``
    of it, where one trajectory becomes several (context compaction). Those share its trajectory_id.
    """

    async def __call__(self, trajectory: Trajectory) -> list[Sample] | None: ...


def get_group_generator(rollout: RolloutArguments) -> GroupGenerator:
    """``generate_group``, or the user's function for each trajectory of a group.

    Raises ``ValueError`` if the path cannot be imported.
    """
    path = rollout.custom_generate_function_path
    return generate_group if path is None else partial(generate_trajectories, load_function(path, _FLAG), path)


async def generate_trajectories(
    function: GenerateFunction,
    path: str,
    group: PromptGroup,
    engine: Engine,
    sampling: SamplingParams,
    tokenizer: Any,
    *,
    n_samples: int,
    seed_of: SeedOf,
    max_context_len: int | None = None,
) -> PromptGroup:
    """A ``GroupGenerator``: ``n_samples`` trajectories by ``function``, all at once.

    A function that takes one turn gives what ``generate_group`` gives: the first turn has the sample's own seed.
    Raises ``ValueError`` naming ``path`` for a wrong return value, and what the function raises.
    """
    fit_context(sampling, group.prompt, max_context_len)  # for its message: a prompt that leaves no room

    async def make(k: int) -> list[Sample]:
        seed = seed_of(group.group_index, k)
        trajectory = Trajectory(
            Sample(group.prompt, group.group_index, group.group_index * n_samples + k),
            tokenizer,
            engine,
            sampling,
            lambda turn: response_seed(seed, "turn", turn) if turn else seed,
            max_context_len,
        )
        return _checked(await function(trajectory), trajectory, path)

    made = await gather_or_cancel(make(k) for k in range(n_samples))
    return PromptGroup(group.group_index, group.prompt, [sample for samples in made for sample in samples])


def _checked(answer: Any, trajectory: Trajectory, path: str) -> list[Sample]:
    own = trajectory.sample
    samples = [own] if answer is None else answer
    if not isinstance(samples, Sequence) or not samples or not all(isinstance(s, Sample) for s in samples):
        raise ValueError(
            f"{_FLAG} {path}: it returned {answer!r:.80} for {own.prompt.source}; return None for the trajectory's own "
            f"sample, or a list of one or more samples"
        )
    for sample in samples:
        if (sample.group_index, sample.trajectory_id) != (own.group_index, own.trajectory_id):
            raise ValueError(
                f"{_FLAG} {path}: a sample of {own.prompt.source} has group {sample.group_index} and "
                f"trajectory_id {sample.trajectory_id}, its trajectory {own.group_index} and {own.trajectory_id}; make "
                f"further samples "
                f"with dataclasses.replace(trajectory.sample, ...)"
            )
        if not sample.response_ids and sample.status is not SampleStatus.ABORTED:
            raise ValueError(
                f"{_FLAG} {path}: a sample of {own.prompt.source} has no response; call trajectory.generate() at least "
                f"once"
            )
        sample.check()
    return list(samples)
