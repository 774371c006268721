"""Build the source of the training prompts: a file of prompts, of conversations, or the user's own source."""

import math
from dataclasses import dataclass
from typing import Any

from miles.config.flags_view import flags_view
from miles.config.inputs import load_training_prompts
from miles.config.rollout import RolloutArguments
from miles.config.settings import Settings
from miles.tasks.data.custom_source import CustomStream
from miles.tasks.data.prompts import RowReader
from miles.tasks.data.stream import CurriculumStream, Mixture, NamedSet, PromptStream, TrainingStream, load_curriculum


@dataclass(frozen=True)
class Supply:
    """The prompts of a run.

    Attributes:
        stream: Draws them; None if there are none to train on.
        num_prompts: How many make a pass; 0 if that is not known.
    """

    stream: TrainingStream | None = None
    num_prompts: int = 0


def build_supply(settings: Settings, tokenizer: Any) -> Supply:
    """Load what ``--prompt-data``, ``--prompt-mix`` or ``--data-source-path`` names.

    Raises:
        ValueError: A row is malformed, or the source or the curriculum cannot be imported.
    """
    data, rollout = settings.data, settings.rollout
    if data.data_source_path is not None:
        reader = RowReader(data, tokenizer, reward=settings.reward, max_context_len=rollout.rollout_max_context_len)
        return Supply(CustomStream(data.data_source_path, flags_view(settings), reader))
    if data.prompt_mix is not None or data.curriculum_path is not None:
        sources = data.mixed_sources
        sets = [
            NamedSet(name, load_training_prompts(name, source, settings, tokenizer)) for name, source in sources.items()
        ]
        weights = data.prompt_mix_weights or [float(len(one.prompts)) for one in sets]
        mixture = Mixture(sets, weights, data.rollout_shuffle, data.rollout_seed)
        return Supply(_with_curriculum(mixture, data.curriculum_path, rollout), mixture.num_prompts)
    if data.prompt_data is None:
        return Supply()
    prompts = load_training_prompts("", data.prompt_data, settings, tokenizer)
    return Supply(PromptStream(prompts, data.rollout_shuffle, data.rollout_seed), len(prompts))


def _with_curriculum(mixture: Mixture, path: str | None, rollout: RolloutArguments) -> Mixture | CurriculumStream:
    if path is None:
        return mixture
    return CurriculumStream(mixture, load_curriculum(path), path, iterations_of(rollout, mixture.num_prompts))


def iterations_of(rollout: RolloutArguments, num_prompts: int) -> int:
    """Return ``--num-rollout``, or the iterations of ``--num-epoch`` passes over the prompts."""
    if rollout.num_rollout is not None:
        return rollout.num_rollout
    assert rollout.num_epoch is not None and rollout.rollout_batch_size is not None, "validate() requires one of them"
    return math.ceil(rollout.num_epoch * num_prompts / rollout.rollout_batch_size)
