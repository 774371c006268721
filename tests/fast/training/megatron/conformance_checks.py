"""Compare every mode, under both of Megatron's contracts, with the oracle of tests/fast/conformance on one layout."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from batches import batch_of
from cases import ANYWHERE, BATCHES, FULL, MODES, Case, loss_of
from compare import distance, norm_of, off_policy, samples_of, wanted
from layouts import RankProcess, gradients, make_backend, note, plain_model, shard_of
from tolerance import RELATIVE_ERROR

from miles.objective.chosen import build_objective
from miles.objective.settings import LossArguments
from miles.training.trainer import Trainer
from miles.types.metrics import Metric
from miles.types.train_batch import TrainBatch, TrainShard

EVERY_MODE = BATCHES["masked"]
CONTRACTS = {"averages": LossArguments(), "counts tokens": loss_of("token_mean")}


@dataclass(frozen=True)
class Expected:
    """A case and the oracle's results for it. Computed once, before the ranks are forked."""

    case: Case
    gradients: dict[str, torch.Tensor]
    metrics: dict[str, float]


class Contracts:
    """Choose the contracts of each comparison: both, or one of them by turns from layout to layout."""

    def __init__(self, whole: bool) -> None:
        self.whole = whole
        self._chosen: Counter[str] = Counter()

    def of(self, what: str) -> tuple[str, ...]:
        """Return the contracts for comparing ``what`` in the next layout."""
        names = tuple(CONTRACTS)
        self._chosen[what] += 1
        return names if self.whole else (names[self._chosen[what] % len(names)],)

    def cases(self, model: str, layout: str, drafts: list[Draft], contract: str) -> list[Draft]:
        """Return the cases of the next comparison of ``model``: every mode, and half of the other cases.

        The other contract has the other half. Each layout divides them in another way. By turns it is half of these.
        """
        modes = [draft for draft in drafts if draft.case.spec is EVERY_MODE]
        others = [draft for draft in drafts if draft.case.spec is not EVERY_MODE]
        random.Random(layout).shuffle(others)
        selection = modes + others[list(CONTRACTS).index(contract) :: len(CONTRACTS)]
        turn = self._chosen[model] // len(CONTRACTS) % 2  # with either contract, one half and then the other
        return selection if self.whole else selection[turn::2]


@dataclass(frozen=True)
class Draft:
    """A case, to which old and reference log-probs near the model's own are added if it is off-policy."""

    case: Case
    is_off_policy: bool = True


class Oracle:
    """Reads each model once and computes each case once, in the process that the ranks are forked from."""

    def __init__(self, folder: Path) -> None:
        self._model = cache(lambda name: plain_model(folder, name, torch.float64).train())
        self._known: dict[tuple[str, int], Expected] = {}
        self.drafts = cache(self._drafts)

    def _drafts(self, name: str) -> list[Draft]:
        """Return all cases. On-policy cases have a group with equal rewards, whose samples are only scored."""
        config = self._model(name).config
        drafts = []
        for mode in MODES:
            plain = Case(BATCHES["compacted"], loss_of(mode), ANYWHERE, shuffled=True, equal_rewards=True)
            drafts += [
                Draft(Case(EVERY_MODE, loss_of(mode, **FULL), ANYWHERE, seed=3)),
                Draft(plain, is_off_policy=False),
                Draft(Case(BATCHES["one sample"], loss_of(mode, **FULL), ANYWHERE)),
            ]
        if getattr(config, "num_experts_per_tok", None):
            routing = (config.num_hidden_layers, 4, 2)
            drafts.append(Draft(Case(BATCHES["compacted"], loss_of("sample_mean"), ANYWHERE, routing=routing)))
        full = loss_of("token_mean", **FULL)
        for loss in (loss_of("delta_l"), loss_of("constant", top_entropy_quantile=0.4), full):
            drafts.append(Draft(Case(BATCHES["uneven"], loss, ANYWHERE, seed=4, restricted=loss is full)))
        return drafts

    def expected(self, name: str, draft: Draft) -> Expected:
        """Return the case of ``draft`` with its results."""
        key = name, self.drafts(name).index(draft)
        if key not in self._known:
            model = self._model(name)
            case = off_policy(draft.case, model) if draft.is_off_policy else draft.case
            gradient, metrics = wanted(case, model, samples_of(case))
            self._known[key] = Expected(case, by_expert(gradient), metrics)
        return self._known[key]

    def all_expected(self, name: str) -> list[Expected]:
        return [self.expected(name, draft) for draft in self.drafts(name)]


def by_expert(gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Split the experts of a layer, which transformers keeps in one parameter, as a checkpoint does."""
    by_name: dict[str, torch.Tensor] = {}
    for name, gradient in gradients.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            by_name[name] = gradient
            continue
        prefix, _, kind = name.rpartition(".")
        for number, of_expert in enumerate(gradient):
            parts = of_expert.chunk(2) if kind == "gate_up_proj" else [of_expert]
            names = ["gate_proj", "up_proj"] if kind == "gate_up_proj" else ["down_proj"]
            by_name |= {f"{prefix}.{number}.{n}.weight": part for n, part in zip(names, parts, strict=True)}
    return by_name


class RecordedOptimizer:
    """An optimizer that records ``gradients()`` before it steps. It has no ``skip``, as no step here may be skipped."""

    def __init__(self, optimizer: Any, gradients: Callable[[], dict[str, torch.Tensor]]) -> None:
        self.optimizer = optimizer
        self.read = gradients
        self.gradients: dict[str, Any] = {}

    def step(self) -> dict[str, Metric]:
        self.gradients = {name: gradient.numpy() for name, gradient in self.read().items()}
        return self.optimizer.step()


@dataclass(frozen=True)
class Result:
    gradients: dict[str, Any]
    metrics: dict[str, float]


def conforms(process: RankProcess, model: str, contract: str, expected: list[Expected], mode: str = "raw") -> str:
    """Return the differences from the oracle, in words; empty if there are none."""
    auxiliary = {"megatron_to_hf_mode": mode}
    backend = make_backend(process, model, CONTRACTS[contract], auxiliary=auxiliary, lr=0.0, weight_decay=0.0)
    messages = []
    for each in expected:
        result = _run(backend, each.case)
        reference = each.gradients
        if process.layout.sizes.use_distributed_optimizer:
            reference, lines = compare_norm_alone(result, each.gradients)
            messages += lines
        worst, lines = distance(result, reference, each.metrics)
        note(process, f"{model}, {contract}", worst)
        messages += [f"{each.case.loss.loss_aggregation}: {line}" for line in lines]
    return "\n".join(messages)


def compare_norm_alone(result: Result, wanted: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Compare the gradients' norm, as no rank of a distributed optimizer has whole gradients.

    Returns:
        The gradients of ``result``, to which its norm is set, so that a later comparison is of the other metrics;
        and a line if the norm differs.
    """
    own_norm, norm = result.metrics["grad_norm"], norm_of(wanted)
    own = {name: torch.from_numpy(gradient).double() for name, gradient in result.gradients.items()}
    result.metrics["grad_norm"] = norm_of(own)
    return own, [f"grad_norm {own_norm} for {norm}"] * (abs(own_norm - norm) > RELATIVE_ERROR * norm)


def _run(backend: Any, case: Case) -> Result:
    backend.policy.replays_experts = case.routing is not None
    return run_step(backend, case, batch_of(case))


def run_step(backend: Any, case: Case, batch: TrainBatch) -> Result:
    """Run one production step. The optimizer must leave the weights unchanged."""
    # The canary must see every token. Without it, samples without an advantage are scored and not trained on.
    only_policy = not backend.settings.megatron.has_auxiliary_loss
    has_gradient = build_objective(case.loss).samples_with_gradient(batch.rewards) if only_policy else None
    shard: TrainShard = shard_of(backend, batch, has_gradient, watch_mass=case.off_policy)
    trainer = Trainer(backend, case.loss, backend.settings.dims.token_ranks)
    policy = RecordedOptimizer(trainer.policy.optimizer, lambda: gradients(backend))
    trainer.policy = replace(trainer.policy, optimizer=policy)  # type: ignore[arg-type]
    metrics = reported(trainer, shard)
    return Result(policy.gradients, metrics)


def reported(trainer: Trainer, shard: TrainShard) -> dict[str, float]:
    """Train one step and return its metrics, on which all ranks must agree."""
    (metrics,) = trainer.train([shard])
    result = {n.removeprefix("train/"): v.value for n, v in metrics.items() if "time/" not in n}
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, result)
    assert all(str(other) == str(result) for other in everywhere), "ranks report different metrics"
    return result
