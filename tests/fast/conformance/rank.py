"""Run cases on real process groups over gloo: ``python rank.py ADDRESS FOLDER`` forks the ranks.

They are forked from one process that has imported everything, because importing takes much longer than a case.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from batches import batches_of
from cases import TEMPERATURE, VALUE_HEAD, Case, StepResult
from gloo_device import share_gloo_device
from mutations import MUTATIONS
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import DTensor, Shard
from transformers import AutoModelForCausalLM

from miles.batch.schedule import schedule_step
from miles.config.cluster import ClusterArguments
from miles.config.model import ModelArguments
from miles.config.optimizer import OptimizerArguments
from miles.config.rollout import RolloutArguments
from miles.config.settings import Settings
from miles.objective.canary import LossMassError, check_loss_mass
from miles.objective.chosen import build_objective
from miles.objective.settings import LossArguments
from miles.training import packed_attention
from miles.training import trainer as trainer_module
from miles.training.fsdp.backend import FsdpBackend
from miles.training.trainer import Role, Trainer
from miles.types.metrics import Metric, values
from miles.types.train_batch import TrainBatch

DEADLINE = timedelta(seconds=60)
STACKS_AFTER = 45.0  # seconds of a case; before its collectives time out
Parts = dict[str, np.ndarray]  # rows of parameters or gradients, by the parameter's name


class RecordedOptimizer:
    """An optimizer that records this rank's part of the gradients, and of weights that move, before each update."""

    def __init__(self, optimizer: Any, parameters: dict[str, torch.nn.Parameter], weights_move: bool) -> None:
        self.optimizer = optimizer
        self.parameters = parameters
        self.weights_move = weights_move
        self.taken: list[tuple[Parts, Parts]] = []

    def step(self) -> dict[str, Metric]:
        self._take()
        return self.optimizer.step()

    def skip(self) -> dict[str, Metric]:
        self._take()
        return self.optimizer.skip()

    def _take(self) -> None:
        named = self.parameters.items()
        weights = {name: _part(p, p) for name, p in named} if self.weights_move else {}
        self.taken.append(({name: _part(p.grad, p) for name, p in named}, weights))


def recorded(
    role: Role[Any], parameters: dict[str, torch.nn.Parameter], weights_move: bool
) -> tuple[Role[Any], RecordedOptimizer]:
    optimizer = RecordedOptimizer(role.optimizer, parameters, weights_move)
    return replace(role, optimizer=optimizer), optimizer


def of_critic(model: Any) -> dict[str, torch.nn.Parameter]:
    """Return the critic's parameters under the policy's names."""
    decoder = {f"model.{name}": p for name, p in model.language_model.named_parameters()}
    return {**decoder, "value_head": model.value_head.weight}


def _part(tensor: torch.Tensor | None, like: torch.Tensor) -> np.ndarray:
    """Return this rank's rows of a parameter or of its gradient, which FSDP cuts along the first dimension."""
    assert isinstance(like, DTensor) and like.placements == (Shard(0),)
    rows = like.to_local()
    if tensor is None:
        return np.zeros(tuple(rows.shape), np.float32)
    assert isinstance(tensor, DTensor) and tensor.placements == like.placements
    return tensor.to_local().detach().clone().numpy()


def _whole(of_ranks: list[Parts]) -> Parts:
    return {name: np.concatenate([part[name] for part in of_ranks]) for name in of_ranks[0]}


@contextmanager
def noted_canary() -> Iterator[list[str]]:
    """Yield a list for the canary's messages in the block, which continues after them."""
    said: list[str] = []

    def note(*arguments: Any) -> None:
        try:
            check_loss_mass(*arguments)
        except LossMassError as error:
            said.append(str(error))

    with patch.object(trainer_module, "check_loss_mass", note):
        yield said


class Rank:
    """One process of a group. Cases share backends, and each begins with the weights of the folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.backends: dict[Any, tuple[FsdpBackend, list[torch.Tensor]]] = {}  # and its first weights, if they move

    def run(self, case: Case) -> list[StepResult] | str:
        """Return the result of every step on rank 0, or the canary's message."""
        mutation = nullcontext() if case.mutation is None else MUTATIONS[case.mutation].applied()
        try:
            with mutation, patch.object(packed_attention, "SHORT", 0 if case.long_rows else packed_attention.SHORT):
                return self._train(case)
        except LossMassError as error:
            self.backends.clear()  # a gradient is left in them
            return str(error)

    def _train(self, case: Case) -> list[StepResult]:
        shards = [
            schedule_step(
                batch,
                dist.get_world_size(),
                case.layout.training,
                case.layout.parallel,
                _has_gradient(case, batch),
                case.watch,
            )[dist.get_rank()]
            for batch in batches_of(case)
        ]
        if case.records_tokens:
            shards = [replace(shard, recorded=frozenset(shard.batch.position_in_step)) for shard in shards]
        backend = self._backend(case)
        trainer = Trainer(backend, case.loss, dist.get_world_size(), case.passes)
        of_policy = dict(backend.policy.module.language_model.named_parameters())
        weights_move = case.trajectories_per_step is not None
        trainer.policy, policy = recorded(trainer.policy, of_policy, weights_move)
        critic = None
        if backend.critic is not None and trainer.critic is not None:
            trainer.critic, critic = recorded(trainer.critic, of_critic(backend.critic.module), False)
        with noted_canary() if case.notes_canary else nullcontext([]) as said:
            metrics = trainer.train(shards)
        reported = [{n.removeprefix("train/"): v for n, v in values(m).items() if "time/" not in n} for m in metrics]
        critic_gradients: list[Parts] = [{} for _ in metrics] if critic is None else [g for g, _ in critic.taken]
        everywhere: list[Any] = [None] * dist.get_world_size()
        mine = (reported, trainer.recorder.read(), policy.taken, critic_gradients)
        # One exchange: a collective per parameter took longer than the step.
        dist.gather_object(mine, everywhere if dist.get_rank() == 0 else None)
        if dist.get_rank() != 0:
            return []
        assert all(str(other) == str(reported) for other, *_ in everywhere), "ranks report different metrics"
        return [
            StepResult(
                _whole([taken[step][0] for _, _, taken, _ in everywhere]),
                _whole([taken[step][1] for _, _, taken, _ in everywhere]),
                reported[step],
                _whole([of_critics[step] for _, _, _, of_critics in everywhere]),
                {place[1]: value for _, read, _, _ in everywhere for place, value in read.items() if place[0] == step},
                "".join(said),
            )
            for step in range(len(metrics))
        ]

    def _backend(self, case: Case) -> FsdpBackend:
        if case.mutation is not None and MUTATIONS[case.mutation].of_build:
            return self._built(case, 0.0)
        moves = case.trajectories_per_step is not None  # several steps need weights that move
        replays = case.routing is not None, case.records_routing
        key = (case.layout.backend, case.layout.parallel, case.model, case.loss.has_critic, replays, moves)
        if key not in self.backends:
            made = self._built(case, 1e-2 if moves else 0.0)
            self.backends[key] = made, [p.to_local().clone() for p in _parameters(made)] if moves else []
        backend, first_weights = self.backends[key]
        if moves:
            _begin_again(backend, first_weights)
        return backend

    def _built(self, case: Case, rate: float) -> FsdpBackend:
        backend = FsdpBackend(self._settings(case, rate), torch.device("cpu"), total_steps=10**9)
        if backend.critic is not None:
            head = {"value_head.weight": torch.from_numpy(VALUE_HEAD)}
            options = StateDictOptions(full_state_dict=True, strict=False)
            set_model_state_dict(backend.critic.module, head, options=options)
        return backend

    def _settings(self, case: Case, rate: float) -> Settings:
        return Settings(
            cluster=ClusterArguments(actor_num_gpus_per_node=dist.get_world_size()),
            model=ModelArguments(hf_checkpoint=str(self.folder / case.model)),
            rollout=RolloutArguments(
                rollout_temperature=TEMPERATURE, use_rollout_routing_replay=case.routing is not None
            ),
            optimizer=OptimizerArguments(lr=rate, weight_decay=0.0),
            loss=LossArguments(advantage_estimator=case.loss.advantage_estimator),
            training=replace(case.layout.training, use_routing_replay=case.records_routing),
            parallel=case.layout.parallel,
        )


def _parameters(backend: FsdpBackend) -> list[Any]:
    return list(backend.policy.module.language_model.parameters())


def _begin_again(backend: FsdpBackend, first_weights: list[torch.Tensor]) -> None:
    """Give the policy its first weights and an optimizer that has not stepped."""
    assert backend.critic is None, "only the policy's weights are kept"
    with torch.no_grad():
        for parameter, weight in zip(_parameters(backend), first_weights, strict=True):
            parameter.to_local().copy_(weight)
    backend.policy.optimizer.adam.state.clear()
    backend.policy.optimizer.steps_done = 0


def _has_gradient(case: Case, batch: TrainBatch) -> Sequence[bool]:
    return build_objective(case.loss).samples_with_gradient(batch.rewards)


def _serve(address: str, folder: Path, world: int, rank: int) -> None:
    torch.set_num_threads(1)
    share_gloo_device()
    store = dist.FileStore(str(folder / f"store{world}"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=DEADLINE)
    with Client(address) as connection:
        connection.send((world, rank))
        me = Rank(folder)
        while (case := connection.recv()) is not None:
            faulthandler.dump_traceback_later(STACKS_AFTER, file=sys.stderr)
            try:
                result: Any = me.run(case)
                connection.send(("done", result if rank == 0 else None))
            except Exception:
                me.backends.clear()
                connection.send(("failed", traceback.format_exc()))
            finally:
                faulthandler.cancel_dump_traceback_later()


def main(address: str, folder: Path, worlds: Sequence[int]) -> None:
    """Fork the ranks of every world size, and wait until the test process closes the connection."""
    AutoModelForCausalLM.from_pretrained(folder / "tied")  # the first of a process takes seconds
    gc.collect()
    gc.freeze()  # the ranks' collections pass over what was imported
    fork = multiprocessing.get_context("fork")
    ranks = [
        fork.Process(target=_serve, args=(address, folder, world, rank)) for world in worlds for rank in range(world)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    main(sys.argv[1], Path(sys.argv[2]), [int(world) for world in sys.argv[3:]])
