"""Images on their way to the trainer: each prompt's once, and each sample gets its own back."""

import pickle
from dataclasses import replace
from types import SimpleNamespace

import numpy as np

from miles.batch.convert import convert
from miles.batch.schedule import schedule_step
from miles.config.parallel import ParallelArguments
from miles.config.training import TrainingArguments
from miles.objective.settings import LossArguments
from miles.run.rollout_actor import RolloutActor
from miles.run.train_actor import TrainActor
from miles.types.images import ImageTensors
from miles.types.sample import Prompt, PromptGroup, Sample

PROMPTS, SAMPLES, RANKS = 4, 6, 3


async def test_images_are_stored_once_and_every_sample_has_those_of_its_prompt():
    images = [ImageTensors({"pixels": np.full((10, 1000), i, np.float32)}, (1,), (0,), 9) for i in range(PROMPTS - 1)]
    prompt = Prompt("", (9, 1))
    groups = [
        PromptGroup(g, prompt, [Sample(prompt, g, SAMPLES * g + k, [g], "", [1], [0.0], reward=k) for k in range(6)])
        for g in range(PROMPTS)
    ]
    (batch,) = convert(groups, loss=LossArguments(), global_batch_size=PROMPTS * SAMPLES)
    batch = replace(batch, images=[[*images, None][g] for g in batch.group_indices])  # the last prompt has none
    by_rank = [[one] for one in schedule_step(batch, RANKS, TrainingArguments(micro_batch_size=2), ParallelArguments())]

    actor = object.__new__(RolloutActor)

    async def generate(start):
        return "summary", *by_rank

    actor.generate = generate
    _, *stored = [pickle.dumps(one) for one in await actor.generate_stored(None)]  # as objects of the store
    size = sum(one.nbytes for one in images)
    assert size <= len(stored[0]) <= 1.1 * size and sum(map(len, stored[1:])) <= 0.5 * size

    trainer = SimpleNamespace(train=lambda shards, iteration: (shards, iteration))
    pixels = {}
    for rank in range(RANKS):
        shards, iteration = TrainActor.train_stored(trainer, *map(pickle.loads, (stored[0], stored[1 + rank])), 2)
        assert iteration == 2
        held = {id(one) for one in shards[0].batch.images if one is not None}
        assert len(held) < PROMPTS, "a frozen tower encodes each once"
        for one, group in zip(shards[0].batch.images, shards[0].batch.group_indices, strict=True):
            pixels.setdefault(group, []).append(None if one is None else one.tensors["pixels"][0, 0])
    assert pixels == {g: [g] * SAMPLES for g in range(PROMPTS - 1)} | {PROMPTS - 1: [None] * SAMPLES}
