"""Checkpoints of the Megatron backend: written under one layout, read under another, and left by a killed run."""

from __future__ import annotations

import copy
import io
import json
import math
import os
import pickle
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from auxiliary_checks import MTP
from auxiliary_oracle import with_heads
from batches import batch_of
from cases import FIXED
from forked_ranks import error_of
from layouts import (
    CPU,
    LAYOUTS,
    MODELS,
    ONE,
    SHARDED,
    TEMPERATURE,
    Layout,
    RankProcess,
    make_backend,
    plain_model,
    shard_of,
    weights,
)
from state_checks import ADAM, CASE, GRADIENT_ERROR, PLAIN, _train, log_probs
from tolerance import FEW_ROUNDINGS, METRIC_ERROR, RELATIVE_ERROR, adam_error, log_prob_error

from miles.training.checkpoint_check import check_checkpoint
from miles.training.checkpoint_files import at, newest, publish, staging
from miles.training.checkpoint_io import StagedFiles
from miles.training.megatron import checkpoint
from miles.training.megatron.backend import MegatronBackend
from miles.training.megatron.checkpoint import MASTER, AdamState, check_can_save
from miles.training.megatron.moe import expert_biases
from miles.types.metrics import values

BF16 = replace(FIXED, bf16=True)
LAYOUTS |= {
    "bf16, dp2": Layout(2, ONE, training=BF16),
    "bf16, dp2, distributed optimizer": Layout(2, SHARDED, training=BF16),
}
# The vocabulary does not divide by the tensor-parallel ranks, so the embedding is padded.
OWN_MODELS = {name: copy.deepcopy(MODELS["untied"]) for name in ("odd", "wide")}
OWN_MODELS["odd"].vocab_size = 65
OWN_MODELS["wide"].vocab_size = 80


@dataclass(frozen=True)
class Change:
    """A checkpoint of ``model``, written under ``before`` and read under each of ``after``."""

    model: str
    before: str
    after: tuple[str, ...]

    def root(self, folder: Path) -> Path:
        return folder / f"{self.model} of {self.before}"


CHANGES = (
    Change(
        "tied",
        "tp2 with sp, dp2, distributed optimizer",
        ("tp2 with sp, dp2, distributed optimizer", "one", "pp2", "cp2"),
    ),
    Change("tied", "pp2, cp2", ("tp2 with sp, pp2", "dp2, distributed optimizer")),
    Change("three_layers", "pp2, uneven", ("one", "pp2, uneven")),
    Change("six_layers", "pp3, interleaved", ("one", "pp3, interleaved")),
    Change("six_layers", "one", ("pp3, interleaved",)),
    Change("odd", "tp2", ("one", "tp2")),
    Change("odd", "one", ("tp2",)),
    Change("qwen3_moe", "tp2 with sp, ep2", ("one", "ep2")),
    Change("qwen3_moe", "ep2 with cp2", ("tp2 with sp, ep2",)),
    Change("deepseek_v3", "tp2 with sp, ep2, sigmoid", ("one", "pp2")),
    Change(with_heads("untied"), "tp2 with sp, pp2", ("dp2, distributed optimizer",)),
    Change("qwen3", "bf16, dp2", ("bf16, dp2, distributed optimizer", "one")),
    Change("qwen3", "bf16, dp2, distributed optimizer", ("bf16, dp2",)),
)
# Every kind of model, of parallelism and of precision once.
BY_TURNS = (
    Change("tied", "tp2 with sp, dp2, distributed optimizer", ("pp2",)),
    Change("six_layers", "pp3, interleaved", ("one", "pp3, interleaved")),
    Change("odd", "tp2", ("one", "tp2")),
    Change("deepseek_v3", "tp2 with sp, ep2, sigmoid", ("one",)),
    Change(with_heads("untied"), "pp2", ("dp2, distributed optimizer",)),
    Change("qwen3", "bf16, dp2", ("bf16, dp2, distributed optimizer",)),
)


def changes(whole: bool) -> tuple[Change, ...]:
    return CHANGES if whole else BY_TURNS


LAUNCHER = {"rollouts_done": 2, "prompts": {"source": {"position": [3, 1]}, "next_group_index": 2, "unfinished": []}}


def _backend(process: RankProcess, model: str) -> MegatronBackend:
    auxiliary = MTP if model == with_heads("untied") else None
    return make_backend(process, model, PLAIN, auxiliary=auxiliary, **ADAM)


def saves(process: RankProcess) -> None:
    """Take two steps, save, and take a third step, as a run that is never stopped does."""
    for number, change in enumerate(changes(process.whole)):
        if change.before != process.name:
            continue
        backend = _backend(process, change.model)
        for _ in range(2):
            _train(backend, batch_of(CASE))
        for _, bias in expert_biases(backend.policy.stage):
            bias.add_(0.125)  # no longer the bias in the model's folder
        root = change.root(process.folder)
        _save(process, backend, root, 2, in_background=number % 2 == 0)
        dist.barrier()
        _each_rank_writes_its_part(process, root / "iter_0000002")
        if number == 0:
            _rank_that_could_not_write_is_named(process, backend, change.root(process.folder) / "full")
        wanted: dict[str, Any] = {"weights": weights(backend), "random": torch.rand(3)}
        wanted["metrics"] = values(_train(backend, batch_of(CASE)))
        wanted["later"] = weights(backend)
        if process.rank == 0:
            torch.save(wanted, root / "wanted.pt")


def _each_rank_writes_its_part(process: RankProcess, folder: Path) -> None:
    """With a distributed optimizer each rank holds a part of every state and writes that part."""
    sizes = [file.stat().st_size for file in folder.glob("*.distcp")]
    if "distributed optimizer" in process.name:
        assert len(sizes) == process.layout.ranks and max(sizes) < 1.5 * sum(sizes) / len(sizes), sizes


def _rank_that_could_not_write_is_named(process: RankProcess, backend: MegatronBackend, folder: Path) -> None:
    """The last rank may write 1000 bytes per file; the error reaches every rank."""
    last = process.layout.ranks - 1
    folder.mkdir(exist_ok=True)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if process.rank == last:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError, match=f"rank {last} could not write {folder}: "):
            backend.save(folder, LAUNCHER)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def _save(process: RankProcess, backend: MegatronBackend, root: Path, done: int, in_background: bool = False) -> None:
    """Save as the launcher does. ``in_background``: the files are written after the weights have changed."""
    if process.rank == 0:
        staging(root, done)
    dist.barrier()
    staged = StagedFiles() if in_background else None
    backend.save(root / f".writing_iter_{done:07d}", LAUNCHER, staged)
    if staged is not None:
        parameters = list(backend.policy.stage.parameters())
        before = [parameter.detach().clone() for parameter in parameters]
        with torch.no_grad():
            for parameter in parameters:
                parameter.zero_()
            staged.write()
            for parameter, value in zip(parameters, before, strict=True):
                parameter.copy_(value)
        dist.barrier()
    if process.rank == 0:
        publish(root, done)


def _of(process: RankProcess) -> Iterator[tuple[Change, Path, dict[str, Any]]]:
    for change in changes(process.whole):
        if process.name in change.after:
            root = change.root(process.folder)
            folder = newest(root)
            assert folder is not None and folder.name == "iter_0000002"
            yield change, folder, torch.load(root / "wanted.pt")


def next_step_is_the_same(process: RankProcess) -> None:
    """Weights are equal bit for bit, and the next step equals the step of a run that was never stopped.

    Pipeline stages and ranks with experts have different parameters, so they need different numbers of buckets.
    """
    if process.name in ("pp2", "tp2 with sp, pp2", "tp2 with sp, ep2"):
        checkpoint.BUCKET_BYTES = 30_000
    for change, folder, wanted in _of(process):
        label = f"{change.model} of {change.before}"
        backend = _backend(process, change.model)
        assert backend.load(folder) == LAUNCHER
        assert backend.policy.optimizer.steps_done == 2
        if change.before == process.name and process.rank == 0:
            assert torch.equal(torch.rand(3), wanted["random"]), label
        exact = "bf16" in process.name or "bf16" not in change.before
        for name, weight in weights(backend).items():
            tensor = weight if exact else weight.bfloat16().float()
            assert torch.equal(tensor, wanted["weights"][name]), f"{label}: {name}"
        metrics = values(_train(backend, batch_of(CASE)))
        is_fp32 = exact and "bf16" not in process.name
        relative, absolute = (RELATIVE_ERROR, METRIC_ERROR) if is_fp32 else (0.02, 0.02)  # five units of bf16
        for name in ("train/loss", "train/pg_loss", "train/grad_norm", "train/lr"):
            expected = wanted["metrics"][name]
            assert math.isclose(metrics[name], expected, rel_tol=relative, abs_tol=absolute), (label, name, expected)
        later = weights(backend)
        rtol, atol = (FEW_ROUNDINGS, adam_error(ADAM["lr"], 1, GRADIENT_ERROR)) if is_fp32 else (0.2, 0.02)
        for name, weight in wanted["later"].items():
            torch.testing.assert_close(later[name], weight, rtol=rtol, atol=atol, msg=f"{label}: {name}")


def without_optimizer_it_starts_from_zero(process: RankProcess) -> None:
    for change, folder, wanted in _of(process):
        backend = _backend(process, change.model)
        state = torch.get_rng_state()
        assert backend.load(folder, optimizer=False, rng=False) == LAUNCHER
        assert torch.equal(torch.get_rng_state(), state)
        assert backend.policy.optimizer.steps_done == 0
        tensors = weights(backend)
        assert all(torch.equal(tensors[n].bfloat16(), w.bfloat16()) for n, w in wanted["weights"].items())
        assert _train(backend, batch_of(CASE))["train/lr"].value == ADAM["lr"]
        return  # one per layout is enough


def reference_comes_from_a_checkpoint(process: RankProcess) -> None:
    """``--ref-load`` names the folder of a run's checkpoints, or one of them."""
    for change, folder, _ in _of(process):
        trained = _backend(process, change.model)
        trained.load(folder)
        shard = shard_of(trained, batch_of(CASE))
        expected = log_probs(trained, shard)
        settings = replace(
            trained.settings,
            model=replace(trained.settings.model, ref_load=str(folder.parent)),
            loss=replace(PLAIN, use_kl_loss=True),
        )
        assert at(folder) == at(folder.parent) == folder
        backend = MegatronBackend(settings, CPU, 10)
        reference, policy = log_probs(backend, shard, reference=True), log_probs(backend, shard)
        plain = plain_model(process.folder, change.model, torch.float32)  # its logits are about as large after training
        tolerance = log_prob_error(plain, shard.batch.tokens, TEMPERATURE)
        for i, column in enumerate(expected):
            assert abs(reference[i] - column).max() < tolerance
        assert max(abs(reference[i] - policy[i]).max() for i in range(len(reference))) > 1e-3
        return


class Hostile:
    """Calls a function when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return Path.touch, (self.marker,)


def hostile_files_run_nothing(process: RankProcess) -> None:
    """An index and a file of common state that call a function: both are refused, and the launcher's check refuses."""
    for change, folder, _ in _of(process):
        assert check_checkpoint(folder) is not None
        backend = _backend(process, change.model)
        marker = process.folder / f"{process.name} ran"
        for name in (".metadata", "common.pt"):
            bad = process.folder / f"hostile {name} of {process.name}"
            if process.rank == 0:
                shutil.copytree(folder, bad)
                content = {".metadata": pickle.dumps(Hostile(marker)), "common.pt": _saved({"x": Hostile(marker)})}
                (bad / name).write_bytes(content[name])
            dist.barrier()
            with patch.dict(os.environ, {"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"}):  # as launchers of Megatron set it
                message = error_of(ValueError, backend.load, bad)
            assert str(bad) in message and "\n" not in message, (name, message)
            assert not marker.exists()
        return


def _saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def checkpoint_of_another_backend_is_refused(process: RankProcess) -> None:
    for change, folder, _ in _of(process):
        other = process.folder / f"other {process.name} {process.rank}"
        other.mkdir()
        state = json.loads((folder / "state.json").read_text()) | {"backend": "fsdp"}
        (other / "state.json").write_text(json.dumps(state))
        message = error_of(ValueError, _backend(process, change.model).load, other)
        assert "--train-backend fsdp" in message and "--save-hf" in message
        return


def checkpoint_of_another_model_is_refused(process: RankProcess) -> None:
    """More layers, its own head, and another vocabulary, which Megatron accepts."""
    for saved, read, words in (
        ("three_layers", "untied", "it also has decoder.layers.2."),
        ("untied", "tied", "it also has output_layer.weight"),
        ("wide", "untied", "its vocabulary has 80 rows, and the model's 66"),
        ("untied", "wide", "its vocabulary has 66 rows, and the model's 80"),
    ):
        folder = process.folder / f"{saved} as {read} under {process.name}"
        if process.rank == 0:
            folder.mkdir()
        dist.barrier()
        _backend(process, saved).save(folder, LAUNCHER)
        message = error_of(ValueError, _backend(process, read).load, folder)
        assert message.startswith(f"--load: the checkpoint {folder} ") and words in message, message


def states_belong_to_their_parameters(process: RankProcess) -> None:
    """Test bf16 weights and fp32 ones (the canary, the critic's head), in the parts of an interleaved pipeline."""
    loss = replace(PLAIN, advantage_estimator="ppo")
    plain = make_backend(process, "six_layers", loss, auxiliary={"use_distributed_optimizer": True}).settings
    backend = MegatronBackend(replace(plain, training=replace(plain.training, bf16=True)), CPU, 10)
    for model in (backend.policy, backend.critic):
        assert model is not None
        adam = AdamState(model.optimizer.adam)
        for name, parameter in ((n, p) for chunk in model.stage.chunks for n, p in chunk.named_parameters()):
            master = adam.piece(parameter).tensors[MASTER]  # whole: there is one data-parallel rank
            assert torch.equal(master.view_as(parameter).to(parameter.dtype), parameter), name


def what_cannot_be_written_is_refused_at_the_start(process: RankProcess) -> None:
    """Refused: a parameter without a name in the checkpoint, and a part of a tensor that no rank has."""
    backend = _backend(process, "untied")
    described = backend.policy.stage.sharded_state_dict
    check_can_save(backend.policy.stage, backend.ranks)
    messages = []
    for wrong in (_forgets_a_parameter, _has_half_of_a_tensor):
        backend.policy.stage.sharded_state_dict = lambda wrong=wrong, **given: wrong(described(**given))  # type: ignore
        try:
            check_can_save(backend.policy.stage, backend.ranks)
        except ValueError as error:
            messages.append(str(error))
    assert all(message.startswith("--save: ") and "--save-hf" in message for message in messages)
    assert len(messages) == (2 if process.rank == 0 else 1)  # rank 0 compares the parts of all ranks


def _forgets_a_parameter(described: dict[str, Any]) -> dict[str, Any]:
    return {name: sharded for name, sharded in described.items() if "q_layernorm" not in name and "proj" not in name}


def _has_half_of_a_tensor(described: dict[str, Any]) -> dict[str, Any]:
    name = next(name for name in described if name.endswith("final_layernorm.weight"))
    shape = described[name].global_shape
    described[name] = replace(described[name], global_shape=(2 * shape[0],), axis_fragmentations=(2,))
    return described


def killed_while_saving(process: RankProcess) -> None:
    """Save once, then SIGKILL after the tensors of the second checkpoint are written and before its index is."""
    backend = _backend(process, "tied")
    root = process.folder / "killed"
    _save(process, backend, root, 1)
    _train(backend, batch_of(CASE))
    rank = os.getpid()

    def kill(_: int) -> None:
        os.kill(rank, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    if process.rank == 0:
        os.fsync = kill
    _save(process, backend, root, 2)
    raise AssertionError("it was to be killed")


def last_checkpoint_is_whole(process: RankProcess) -> None:
    """After ``killed_while_saving``, the half-written checkpoint is ignored, and the next save replaces it."""
    root = process.folder / "killed"
    assert (root / ".writing_iter_0000002").is_dir()
    folder = newest(root)
    assert folder is not None and folder.name == "iter_0000001"
    backend = _backend(process, "tied")
    assert backend.load(folder) == LAUNCHER and backend.policy.optimizer.steps_done == 0
    _train(backend, batch_of(CASE))
    dist.barrier()
    _save(process, backend, root, 2)
    dist.barrier()
    path = newest(root)
    assert path is not None and path.name == "iter_0000002"
    assert backend.load(path) == LAUNCHER and backend.policy.optimizer.steps_done == 1


STARTS = (without_optimizer_it_starts_from_zero, reference_comes_from_a_checkpoint)
REFUSALS = (
    hostile_files_run_nothing,
    checkpoint_of_another_backend_is_refused,
    checkpoint_of_another_model_is_refused,
    what_cannot_be_written_is_refused_at_the_start,
)
FURTHER = {name: (*STARTS, *REFUSALS) for name in ("one", "tp2", "bf16, dp2, distributed optimizer")}
FURTHER_BY_TURNS = {"one": REFUSALS, "tp2": (*STARTS, what_cannot_be_written_is_refused_at_the_start)}
IN_PARTS = {"pp3, interleaved": (states_belong_to_their_parameters,)}


def saving(whole: bool) -> dict[str, tuple[Callable[[RankProcess], None], ...]]:
    """Return the checks by layout."""
    return {change.before: (saves,) for change in changes(whole)}


def resuming(whole: bool) -> dict[str, tuple[Callable[[RankProcess], None], ...]]:
    """Return the checks by layout, after the checks of ``saving``."""
    further = (FURTHER if whole else FURTHER_BY_TURNS) | IN_PARTS
    names = dict.fromkeys(name for change in changes(whole) for name in change.after)
    return {name: (next_step_is_the_same, *further.get(name, ())) for name in names}
