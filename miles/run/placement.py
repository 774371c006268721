"""Find out which node and GPU each bundle of a placement group has, and order them: rank i takes slot i.

Ray packs bundles onto as few nodes as it can: of two nodes of eight GPUs, one would hold two times four ranks.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import ray
import ray.exceptions
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

_PROBE_SHARE = 0.01  # of a GPU, for a task that looks at it


@dataclass(frozen=True)
class GpuSlot:
    """A GPU that a bundle holds.

    Attributes:
        bundle: The bundle's index in its placement group.
        node: The Ray node.
        gpu: The GPU, as CUDA_VISIBLE_DEVICES of that node names it.
    """

    bundle: int
    node: str
    gpu: str


def find_slots(group: PlacementGroup, bundles: int) -> tuple[GpuSlot, ...]:
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
    return in_order([GpuSlot(bundle, *slot) for bundle, slot in enumerate(ray.get(calls))])


def _look() -> tuple[str, str]:
    return ray.get_runtime_context().get_node_id(), str(ray.get_gpu_ids()[0])


def in_order(slots: Sequence[GpuSlot]) -> tuple[GpuSlot, ...]:
    """Order slots by node, the node of the first bundle first, and by device.

    >>> [slot.bundle for slot in in_order([GpuSlot(0, "b", "1"), GpuSlot(1, "a", "0"), GpuSlot(2, "b", "0")])]
    [2, 0, 1]
    """
    nodes = list(dict.fromkeys(slot.node for slot in slots))

    def key(slot: GpuSlot) -> tuple[int, int, str]:
        number = int(slot.gpu) if slot.gpu.isdigit() else 0
        return nodes.index(slot.node), number, slot.gpu

    return tuple(sorted(slots, key=key))


def is_as_asked(nodes_of_ranks: Sequence[str], nodes: int, per_node: int) -> bool:
    """Return whether the ranks are on ``nodes`` nodes, ``per_node`` on each."""
    return list(Counter(nodes_of_ranks).values()) == [per_node] * nodes


def choose_nodes(
    free: Mapping[str, float], nodes: int, per_node: int, engines: Sequence[float] = ()
) -> list[str] | None:
    """Return the nodes for the ranks: those with the fewest free devices that suffice, so that larger ones stay free.

    None if there are not enough, or the engines do not fit alongside the ranks.

    Args:
        free: The free devices of each node.
        nodes: How many nodes the ranks have.
        per_node: Their devices on each.
        engines: The devices of each part of an engine, which is on one node; all have as many.

    >>> choose_nodes({"a": 8, "b": 4, "c": 3, "d": 4}, nodes=2, per_node=4)
    ['b', 'd']
    """
    chosen = [node for node in sorted(free, key=lambda node: free[node]) if free[node] >= per_node][:nodes]
    left = [have - (per_node if node in chosen else 0) for node, have in free.items()]
    room = sum(int(have // engines[0]) for have in left) if engines else 0
    return chosen if len(chosen) == nodes and room >= len(engines) else None


def ranks_by_node(nodes_of_ranks: Sequence[str], names: Mapping[str, str]) -> str:
    """Say which ranks are on which node; ``names`` is what to call each.

    >>> ranks_by_node(["a", "a", "a", "b"], {"a": "10.0.0.1", "b": "10.0.0.2"})
    'ranks 0-2 on 10.0.0.1, 3 on 10.0.0.2'
    """
    parts = []
    for node in dict.fromkeys(nodes_of_ranks):
        ranks = [rank for rank, of_rank in enumerate(nodes_of_ranks) if of_rank == node]
        follows = len(ranks) > 1 and ranks == list(range(ranks[0], ranks[-1] + 1))
        numbers = f"{ranks[0]}-{ranks[-1]}" if follows else " ".join(map(str, ranks))
        parts.append(f"{numbers} on {names.get(node, node)}")
    return f"ranks {', '.join(parts)}"


def check_engines(slots: Sequence[GpuSlot], size: int, per_node: int) -> None:
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
            counts = " and ".join(str(sum(slot.node == node for slot in slots)) for node in nodes)
            devices = "the devices" if per_node == size else f"{per_node} devices"
            raise ValueError(
                f"--rollout-num-gpus-per-engine {size}: with --colocate {devices} of engine {first // size} are on "
                f"{len(nodes)} nodes, which hold {counts} of the trainer's devices; free whole nodes, or give a "
                "smaller engine"
            )
