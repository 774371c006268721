"""The trainer's state in host memory while engines generate (``--offload-train``).

On CPU the same storages are emptied and filled again as on a GPU. That GPU memory is freed is for
tests/gpu/test_offloaded_trainer.py.
"""

from __future__ import annotations

import gc
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
from batches import batch_of
from layouts import CPU, RankProcess, make_backend, shard_of, weights
from offload_checks import on_a_gpu
from state_checks import ADAM, CASE, PLAIN

from miles.objective.settings import LossArguments
from miles.training.megatron.backend import MegatronBackend
from miles.training.megatron.checkpoint import AdamState
from miles.training.megatron.runner import gradients
from miles.training.trainer import Trainer

# A critic, and a reference of fp32 weights that follows the policy: all that a rank can have.
ALL = LossArguments(loss_canary="always", advantage_estimator="ppo", use_kl_loss=True, kl_loss_coef=0.1)
FOLLOWS = {"ref_update_interval": 1, "ref_mixup_alpha": 0.3}
LEFT = 6_000  # bytes of the largest tensor that stays: a random state of Megatron's has 5056


def _backend(process: RankProcess, loss: LossArguments, bf16: bool, **sizes: Any) -> MegatronBackend:
    plain = make_backend(process, process.layout.models[0], PLAIN, auxiliary=sizes, **ADAM).settings
    model = replace(plain.model, **(FOLLOWS if loss is ALL else {}))
    return MegatronBackend(
        replace(plain, loss=loss, model=model, training=replace(plain.training, bf16=bf16)), CPU, total_steps=10
    )


def _train(backend: MegatronBackend) -> None:
    trainer = Trainer(backend, backend.settings.loss, backend.settings.dims.token_ranks)
    trainer.train([shard_of(backend, batch_of(CASE))])
    if backend.following is not None:
        backend.refresh_reference()


def _state(backend: MegatronBackend) -> list[torch.Tensor]:
    """Return everything that a later step depends on."""
    tensors = [weight for _, weight in sorted(weights(backend).items())]
    for model in (backend.policy, backend.critic):
        if model is not None:
            adam = AdamState(model.optimizer.adam)
            pieces = [adam.piece(parameter) for parameter in model.stage.parameters()]
            tensors += [tensor.clone() for piece in pieces for _, tensor in sorted(piece.tensors.items())]
            tensors += [weight.detach().clone() for weight in model.stage.state_dict().values() if weight is not None]
    if backend.following is not None:
        tensors += [weight.clone() for weight in backend.following.exact.values()]
    return tensors


def _in_memory() -> dict[int, int]:
    """Return the bytes of every storage of this process's tensors, by its address."""
    gc.collect()
    tensors = [item for item in gc.get_objects() if isinstance(item, torch.Tensor) and item.device.type == "cpu"]
    storages = [tensor.untyped_storage() for tensor in tensors]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def _besides(others: Collection[int]) -> list[int]:
    """Return the bytes of storages that are not among ``others``, in descending order."""
    return sorted((size for address, size in _in_memory().items() if address not in others), reverse=True)


def host_memory_and_back_changes_nothing(process: RankProcess) -> None:
    """Two steps with a trip after each are those without, bit for bit; during it, nothing stays on the device."""
    for bf16 in (True, False) if process.whole else (process.layout.ranks > 1,):
        straight = _backend(process, ALL, bf16)
        for _ in range(2):
            _train(straight)
        expected = _state(straight)
        del straight
        before = set(_in_memory())
        backend = _backend(process, ALL, bf16)
        for _ in range(2):
            _train(backend)
            held = _besides(before)
            backend.offload()
            copies = {copy.untyped_storage().data_ptr() for _, copy in backend._host_copies._copies}
            left = _besides(before | copies)
            assert left[0] < LEFT < held[0] and 10 * sum(left) < sum(held), (left[:12], held[:12])
            backend.onload()
        state = _state(backend)
        assert len(state) == len(expected)
        assert all(torch.equal(a, b) for a, b in zip(state, expected, strict=True)), bf16


def gradients_that_are_left_are_found(process: RankProcess) -> None:
    """They are not copied, so they would be lost; nothing has moved when that is found."""
    backend = _backend(process, PLAIN, True)
    _train(backend)
    expected = _state(backend)
    (gradient, *_) = gradients(backend.policy.distributed)
    gradient[-1] = 1e-30
    try:
        backend.offload()
    except AssertionError as error:
        assert "gradients are not 0" in str(error)
    else:
        raise AssertionError("a gradient was lost")
    assert gradient[-1] != 0 and all(torch.equal(a, b) for a, b in zip(_state(backend), expected, strict=True))


def with_the_optimizer_in_host_memory_too(process: RankProcess) -> None:
    """With ``--optimizer-cpu-offload``, half of the state is updated there, and half moves."""
    sizes = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5}
    with on_a_gpu():
        straight, moved = (_backend(process, PLAIN, True, **sizes) for _ in range(2))
        for _ in range(2):
            _train(straight)
            _train(moved)
            moved.offload()
            moved.onload()
        assert all(torch.equal(a, b) for a, b in zip(_state(moved), _state(straight), strict=True))


_ALWAYS = (host_memory_and_back_changes_nothing,)
OF_LAYOUT = {
    "one": (*_ALWAYS, gradients_that_are_left_are_found),
    "dp2, distributed optimizer": (*_ALWAYS, with_the_optimizer_in_host_memory_too),
    "tp2 with sp, dp2, distributed optimizer": _ALWAYS,
    "pp3, interleaved": _ALWAYS,
    "ep2": _ALWAYS,
    "pp2, dp2, sigmoid": _ALWAYS,
}
BY_TURNS = {name: OF_LAYOUT[name] for name in ("one", "dp2, distributed optimizer")}
