"""Checkpoints in Megatron's own format, ``torch_dist``: whole tensors by name, which can be read under any layout.

Tensors have Megatron's names (``optimizer.state.exp_avg.…`` for Adam's), without rank numbers: each rank describes
the parts that it holds. Weights are the fp32 ones that the optimizer updates. Saving copies one tensor at a
time to the CPU, loading reads ``BUCKET_BYTES`` at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, tensor_parallel
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.utils import make_sharded_tensor_for_checkpoint, make_tp_sharded_tensor_for_checkpoint
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.multiprocessing.reductions import StorageWeakRef

from miles.models.parameters import EMBEDDING
from miles.training.checkpoint_files import in_one_line
from miles.training.checkpoint_folder import read_run_state, write_run_state
from miles.training.checkpoint_io import StagedFiles, checked_index, loading, save_errors
from miles.training.megatron.checkpoint.optimizer_state import MASTER, MOMENTS, AdamState, Piece
from miles.training.megatron.checkpoint.writer import DirectWriter
from miles.training.megatron.model.adapter import Adapter
from miles.training.megatron.model.policy_model import PolicyModel
from miles.training.megatron.moe.router import expert_biases
from miles.training.megatron.optimizer import MegatronOptimizer
from miles.training.megatron.process_groups import Ranks
from miles.training.random_state import restore_random_state, write_random_state

Sharded: TypeAlias = ShardedTensor | ShardedTensorFactory
KINDS = (MASTER, *MOMENTS)
OF_OPTIMIZER = "optimizer.state."  # where names of the moments begin
BUCKET_BYTES = 512 * 1024**2  # of whole tensors on a rank; a larger tensor is read by itself


def check_can_save(policy: PolicyModel, ranks: Ranks) -> None:
    """Check, before training, that Megatron can describe every part of every tensor on exactly one rank. Collective.

    Raises ``ValueError`` for a model that ``save`` could not write under this layout.
    """
    empty = _empty(_sharded(policy, ranks), KINDS, "meta")
    given = {_storage(described.data) for described in nested_values(empty)}
    try:
        parts, _ = save_preprocess(empty)
    except (CheckpointingException, AssertionError, KeyError) as error:  # describing the model may fail too
        raise _refusal(f"{type(error).__name__}: {error}") from None
    for part in nested_values(parts):
        # The writer locates the elements of a part by its place in the parameter's tensor.
        if not part.data.is_contiguous() or _storage(part.data) not in given:
            raise _refusal(f"{part.key} is made of parts of rows, or of a copy")


def _storage(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


def save(
    folder: Path,
    policy: PolicyModel,
    optimizer: MegatronOptimizer,
    ranks: Ranks,
    state: dict[str, Any],
    staged: StagedFiles | None = None,
) -> None:
    """Write everything that a resumed run needs into ``folder``, which is empty. Collective.

    Tensors go into ``staged`` if it is given. The caller makes the folder visible when it is complete. Raises
    ``OSError`` on all ranks if one cannot write its tensors.
    """
    adam = AdamState(optimizer.adam)
    sharded = _sharded(policy, ranks)
    pieces = {name: adam.piece(described.data) for name, described in sharded.items()}
    with save_errors(folder):
        writer = DirectWriter(pieces, staged)
        dist_checkpointing.save(_empty(sharded, KINDS, "meta"), str(folder), sharded_strategy=writer)
    write_random_state(folder, tensor_parallel.get_cuda_rng_tracker().get_states())
    if dist.get_rank() == 0:
        write_run_state(folder, "megatron", state, optimizer.state())
    dist.barrier()


def load(
    folder: Path, policy: PolicyModel, optimizer: MegatronOptimizer, ranks: Ranks, with_optimizer: bool, rng: bool
) -> dict[str, Any]:
    """Read what ``save`` wrote, under any layout, and return the launcher's state. Collective."""
    state = read_run_state(folder, "megatron", "--load")
    steps = state["schedule"]["steps_done"] if with_optimizer else 0
    adam = AdamState(optimizer.adam)
    kinds = KINDS if with_optimizer else (MASTER,)
    for parameter, whole in _read(folder, policy, ranks, kinds, "--load"):
        adam.restore(parameter, whole, steps)
    optimizer.steps_done = steps
    if rng:
        states = restore_random_state(folder)
        if states:
            tensor_parallel.get_cuda_rng_tracker().set_states(states)
    launcher: dict[str, Any] = state["launcher"]
    return launcher


@torch.no_grad()
def load_weights(folder: Path, policy: PolicyModel, ranks: Ranks, flag: str) -> None:
    """Read the weights alone, into a model without an optimizer. Collective.

    Raises ``ValueError`` naming ``flag``, as ``load`` does.
    """
    for parameter, whole in read_weights(folder, policy, ranks, flag):
        parameter.copy_(whole)


def read_weights(
    folder: Path, policy: PolicyModel, ranks: Ranks, flag: str
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield each weight of ``policy`` with what ``folder`` has for it, whole and fp32 on CPU. Collective."""
    read_run_state(folder, "megatron", flag)
    yield from ((parameter, whole[MASTER]) for parameter, whole in _read(folder, policy, ranks, (MASTER,), flag))


def save_weights(
    folder: Path,
    policy: PolicyModel,
    ranks: Ranks,
    value_of: Callable[[torch.Tensor], torch.Tensor],
    staged: StagedFiles | None = None,
) -> None:
    """Write weights alone: ``value_of`` each weight of ``policy``. Collective.

    They go into ``folder``, which is empty, or into ``staged`` if it is given.
    """
    sharded = _sharded(policy, ranks)
    pieces = {
        name: Piece(0, described.data.numel(), False, {MASTER: value_of(described.data).detach().view(-1)})
        for name, described in sharded.items()
    }
    with save_errors(folder):
        writer = DirectWriter(pieces, staged)
        dist_checkpointing.save(_empty(sharded, (MASTER,), "meta"), str(folder), sharded_strategy=writer)
    if dist.get_rank() == 0:
        write_run_state(folder, "megatron", {}, {"steps_done": 0})
    dist.barrier()


def _read(
    folder: Path, policy: PolicyModel, ranks: Ranks, kinds: tuple[str, ...], flag: str
) -> Iterator[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
    """Yield each parameter with its whole fp32 tensors, on CPU. Collective: all ranks read equally often."""
    sharded = _sharded(policy, ranks)
    buckets = list(_buckets(sharded.items(), 4 * len(kinds)))
    try:
        # Checks all parts of every tensor, which a bucket may lack.
        parts, _ = save_preprocess(_empty(sharded, kinds, "meta"))
        of_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, (len(buckets), {part.key for part in nested_values(parts)}))
        turns, names = zip(*of_ranks, strict=True)
        _check_holds_only(folder, policy, set().union(*names), flag)
        for turn in range(max(turns)):
            mine = buckets[turn] if turn < len(buckets) else {}
            with loading(folder, flag):
                found = dist_checkpointing.load(
                    _empty(mine, kinds, "cpu"), str(folder), validate_access_integrity=False
                )
            for name, described in mine.items():
                yield described.data, found.pop(name)  # frees the bucket before the next one is read
    except CheckpointingException as error:
        raise ValueError(
            f"{flag}: the checkpoint {folder} does not hold this model ({in_one_line(error)}); give one that was saved "
            "with the same model and heads, and by no later megatron-core"
        ) from error


def _check_holds_only(folder: Path, policy: PolicyModel, names: Set[str], flag: str) -> None:
    """Refuse what Megatron would accept: weights that are not in ``names``, and a vocabulary of another size.

    Heads of multi-token prediction may be there, because a reference has none.

    Raises:
        ValueError: The checkpoint ``folder`` is that of another model.
    """
    index = checked_index(folder, flag)
    sizes = {
        name: found.size
        for name, found in index.state_dict_metadata.items()
        if isinstance(found, TensorStorageMetadata) and not name.startswith((OF_OPTIMIZER, "mtp."))
    }
    reason = f"it also has {min(sizes.keys() - names)}" if sizes.keys() - names else None
    tokens, heads = policy.tokens_in_vocabulary, policy.config.num_attention_heads
    padded = {-(-tokens // tp) * tp for tp in range(1, heads + 1) if heads % tp == 0}
    if EMBEDDING in sizes and sizes[EMBEDDING][0] not in padded:
        reason = f"its vocabulary has {sizes[EMBEDDING][0]} rows, and the model's {tokens}"
    if reason is not None:
        raise ValueError(
            f"{flag}: the checkpoint {folder} does not hold this model ({reason}); give one that was saved with the "
            "same model"
        )


def _buckets(sharded: Iterable[tuple[str, Sharded]], element_bytes: int) -> Iterator[dict[str, Sharded]]:
    bucket: dict[str, Sharded] = {}
    free = BUCKET_BYTES
    for name, described in sharded:
        size = element_bytes * described.data.numel()
        if bucket and size > free:
            yield bucket
            bucket, free = {}, BUCKET_BYTES
        bucket[name] = described
        free -= size
    if bucket:
        yield bucket


def _empty(sharded: dict[str, Sharded], kinds: tuple[str, ...], device: str) -> dict[str, Any]:
    """Return the description of each kind, with fp32 tensors to be filled (zeros on a real device)."""
    return {
        name: {
            kind: _holding(described, kind, torch.zeros(described.data.shape, dtype=torch.float32, device=device))
            for kind in (kinds if isinstance(described.data, torch.nn.Parameter) else (MASTER,))
        }
        for name, described in sharded.items()
    }


def _sharded(policy: PolicyModel, ranks: Ranks) -> dict[str, Sharded]:
    """Return Megatron's description of each parameter, and of the experts' biases; ``data`` is the tensor itself.

    With an adapter that is all: the other weights are those of ``--hf-checkpoint``.

    Shards are singletons: every layer and every expert has its own tensor, whatever the pipeline and expert sizes. The
    canary (objective/canary.py) is always 0 and is not saved.
    """
    if policy.adapter is not None:
        return dict(_sharded_adapter(policy.adapter, ranks))
    found: dict[str, Sharded] = {}
    for number, chunk in enumerate(policy.chunks):
        # The names of a dictionary are those of a chunk; the keys in a checkpoint are those of the whole model.
        found |= {f"{number}.{name}": sharded for name, sharded in _sharded_chunk(chunk, ranks).items()}
    return found


def _sharded_chunk(chunk: PolicyModel, ranks: Ranks) -> dict[str, Sharded]:
    described = chunk.sharded_state_dict(metadata={"dp_cp_group": ranks.token_group, "singleton_local_shards": True})
    named = dict(chunk.named_parameters()) | dict(expert_biases(chunk))
    tensors = {id(tensor): name for name, tensor in named.items() if tensor is not chunk.canary}
    found = {name: sharded for name, sharded in described.items() if id(sharded.data) in tensors}
    missing = tensors.keys() - {id(sharded.data) for sharded in found.values()}
    if missing:
        raise _refusal(", ".join(name for number, name in tensors.items() if number in missing))
    return found


def _sharded_adapter(adapter: Adapter, ranks: Ranks) -> Iterator[tuple[str, Sharded]]:
    for layer, name, part, parameter in adapter.parameters_by_name():
        key = f"adapter.{name}.{part}"
        groups = {"tp_group": ranks.tp, "dp_cp_group": ranks.token_group}
        if layer.divides(part):
            yield key, make_tp_sharded_tensor_for_checkpoint(parameter, key, layer.divided_dim, **groups)
        else:
            yield key, make_sharded_tensor_for_checkpoint(parameter, key, **groups)


def _refusal(reason: str) -> ValueError:
    return ValueError(
        f"--save: megatron-core cannot write this model under this layout ({reason}); drop --save and export with "
        "--save-hf, or change the layout (first --pipeline-model-parallel-size)"
    )


def _holding(sharded: Sharded, kind: str, tensor: torch.Tensor) -> Sharded:
    """Return the description of the same part of the tensor of ``kind``, holding ``tensor``."""
    key = sharded.key if kind == MASTER else f"{OF_OPTIMIZER}{kind}.{sharded.key}"
    if isinstance(sharded, ShardedTensorFactory):
        return replace(sharded, key=key, data=tensor)
    return replace(sharded, key=key, data=tensor, dtype=tensor.dtype)
