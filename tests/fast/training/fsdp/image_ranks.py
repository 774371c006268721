"""Compare gradients of a model with images on 1 to 4 ranks with float64: ``python image_ranks.py FOLDER KIND``.

Rank 0 has the samples without an image, in as many micro-batches as the others.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from forked_ranks import run_on_ranks
from test_images import CPU, alone, batch_of, groups_of, weights
from torch.distributed.device_mesh import init_device_mesh
from vision_models import write_vision_model

from miles.batch.collate import collate
from miles.training.fsdp.adapter import full_tensor
from miles.training.fsdp.models import Policy, load_model, shard_model

PARTS = {  # the micro-batches of each rank
    1: [[range(8)]],
    2: [[range(2)], [range(2, 8)]],
    3: [[range(2), range(0)], [range(2, 4), range(4, 5)], [range(5, 6), range(6, 8)]],
    4: [[range(2)], [range(2, 5)], [range(5, 8)], [range(0)]],
}


@dataclass(frozen=True)
class Place:
    """A rank, and the gradients that it is compared with."""

    model: str
    rank: int
    world: int
    expected: dict[str, torch.Tensor]


def gradients_are_those_of_each_sample_alone(place: Place) -> None:
    policy = Policy(load_model(place.model, torch.float32), 1.0, 64)
    shard_model(policy, init_device_mesh("cpu", (place.world,)), torch.float32, checkpointing=place.world == 3)
    policy.train()
    sharded = dict(policy.language_model.named_parameters())  # a pass puts gathered ones in their places
    batch = batch_of(groups_of(place.model))
    for part in PARTS[place.world][place.rank]:
        micro = collate(batch, part, CPU)
        log_probs = policy.scorer(micro)(with_entropy=False).log_probs
        of_tokens = [weights(batch.response_lengths[i]) for i in part]
        (log_probs * torch.cat([*of_tokens, torch.zeros(0)]).float()).sum().backward()
    scale = max(gradient.abs().max() for gradient in place.expected.values())
    for name, weight in sharded.items():
        if name in place.expected:
            assert weight.grad is not None, f"{name} has no gradient"
            difference = (full_tensor(weight.grad).double() - place.expected[name]).abs().max()
            assert difference <= 1e-5 * scale, f"{name} differs by {difference / scale}"


def main(folder: Path, kind: str) -> None:
    model = write_vision_model(folder / "model", kind)
    _, expected = alone(model, groups_of(model))
    check = gradients_are_those_of_each_sample_alone
    results = {}
    for world in PARTS:
        ranks = [Place(model, rank, world, expected) for rank in range(world)]
        results[world] = run_on_ranks(folder, f"{world} ranks", ranks, {check.__name__: check})
    (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
