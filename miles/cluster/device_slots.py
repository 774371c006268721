"""Find out which node and GPU each bundle of a placement group has, and order them: rank i takes slot i."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

_PROBE_SHARE = 0.01  # of a GPU, for a task that looks at it


@dataclass(frozen=True)
class Slot:
    """A GPU that a bundle holds.

    Attributes:
        bundle: The bundle's index in its placement group.
        node: The Ray node.
        gpu: The GPU, as CUDA_VISIBLE_DEVICES of that node names it.
    """

    bundle: int
    node: str
    gpu: str


def find_slots(group: PlacementGroup, bundles: int) -> tuple[Slot, ...]:
    """Return the slots of the first ``bundles`` bundles, each of one GPU: node by node, and by device in a node.

    Ray fills bundles in any order, so consecutive ranks would otherwise be on different nodes.
    """
    probe = ray.remote(num_cpus=0, num_gpus=_PROBE_SHARE)(_look)
    calls = [
        probe.options(
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
        ).remote()
        for bundle in range(bundles)
    ]
    return in_order([Slot(bundle, *found) for bundle, found in enumerate(ray.get(calls))])


def _look() -> tuple[str, str]:
    return ray.get_runtime_context().get_node_id(), str(ray.get_gpu_ids()[0])


def in_order(slots: Sequence[Slot]) -> tuple[Slot, ...]:
    """Order slots by node, the node of the first bundle first, and by device.

    >>> [slot.bundle for slot in in_order([Slot(0, "b", "1"), Slot(1, "a", "0"), Slot(2, "b", "0")])]
    [2, 0, 1]
    """
    nodes = list(dict.fromkeys(slot.node for slot in slots))

    def key(slot: Slot) -> tuple[int, int, str]:
        return nodes.index(slot.node), int(slot.gpu) if slot.gpu.isdigit() else 0, slot.gpu

    return tuple(sorted(slots, key=key))


def check_engines(slots: Sequence[Slot], size: int, per_node: int) -> None:
    """Check that every process of an engine has its devices, ``per_node`` consecutive slots, on one node.

    Args:
        slots: The slots of all engines.
        size: The devices of an engine.
        per_node: Its devices on each of its nodes.

    Raises:
        ValueError: Ray has spread the devices so that one has not.
    """
    for first in range(0, len(slots), per_node):
        nodes = list(dict.fromkeys(slot.node for slot in slots[first : first + per_node]))
        if len(nodes) > 1:
            held = " and ".join(str(sum(slot.node == node for slot in slots)) for node in nodes)
            devices = "the devices" if per_node == size else f"{per_node} devices"
            raise ValueError(
                f"--rollout-num-gpus-per-engine {size}: with --colocate {devices} of engine {first // size} are on "
                f"{len(nodes)} nodes, which hold {held} of the trainer's devices; free whole nodes, or give a smaller "
                "engine"
            )
