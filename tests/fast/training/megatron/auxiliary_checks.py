"""Compare the losses inside the model with their oracle, under both of Megatron's contracts, on one layout.

Each case runs twice: with the policy loss, and without any advantage. Without advantages the gradient comes from the
auxiliary loss alone, so a larger gradient cannot hide an error in it.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from auxiliary_oracle import HEADS, Heads, Routers, recorded_routers, router_losses, save_with_heads, with_heads
from batches import batch_of
from cases import ANYWHERE, BATCHES, Case, loss_of
from compare import distance, norm_of, samples_of
from conformance_checks import CONTRACTS, Contracts, Expected, by_expert, run_step
from layouts import LAYOUTS, MODELS, TEMPERATURE, RankProcess, make_backend, note, plain_model, weights
from oracle import OracleSample, objective, scores_of
from safetensors.torch import load_file
from tolerance import RELATIVE_ERROR
from transformers import AutoConfig

from miles.batch.schedule import schedule_step
from miles.config.megatron.settings import MegatronArguments
from miles.types.train_batch import TrainBatch

MTP = dict(mtp_num_layers=HEADS, enable_mtp_training=True, mtp_loss_scaling_factor=0.7)
ROUTED = dict(moe_aux_loss_coeff=0.3, moe_z_loss_coeff=0.05)
KINDS: dict[str, tuple[str, dict[str, Any]]] = {  # the model, and losses besides the policy loss
    "policy": ("untied", {}),  # nothing else
    "aux_loss": ("qwen3_moe", ROUTED),
    "seq_aux_loss": ("qwen3_moe", dict(moe_aux_loss_coeff=0.3, moe_router_load_balancing_type="seq_aux_loss")),
    "six layers, aux_loss": ("six_moe_layers", ROUTED),
    "six layers, seq_aux_loss": ("six_moe_layers", ROUTED | dict(moe_router_load_balancing_type="seq_aux_loss")),
    "mtp": ("untied", MTP),
    "mtp and seq_aux_loss": ("qwen3_moe", MTP | ROUTED | dict(moe_router_load_balancing_type="seq_aux_loss")),
}
ROUTER = ("aux_loss", "seq_aux_loss")
SIX = ("six layers, aux_loss", "six layers, seq_aux_loss")
ALL = tuple(kind for kind in KINDS if kind not in ("policy", *SIX))
BOTH = "mtp and seq_aux_loss"
OF_LAYOUT: dict[str, tuple[str, ...]] = {
    "one": ALL,
    "one, recomputed": (BOTH,),
    "one, padded": (BOTH,),
    "dp2": ("seq_aux_loss", "mtp"),
    "dp2, padded": ("aux_loss",),
    "dp2, overlapped": (BOTH,),
    "dp2, distributed optimizer": (BOTH,),
    "tp2": ("mtp",),
    "tp2 with sp": ALL,
    "tp2 with sp, padded": ALL,
    "pp2": ("aux_loss", BOTH),
    "pp3, interleaved": SIX,
    "pp2, padded": (BOTH,),
    "cp2": ALL,
    "ep2": ("aux_loss", BOTH),
    "ep2 with cp2": ROUTER,
    "dynamic cp": ("seq_aux_loss", "mtp"),
    "tp2 with sp, cp2": ("aux_loss", "mtp"),
    "pp2, cp2": (BOTH,),
    "tp2 with sp, ep2": ("seq_aux_loss",),
    "tp2 with sp, ep2, experts cut": ("aux_loss", "seq_aux_loss"),
}
BY_TURNS: dict[str, tuple[str, ...]] = {
    "one": ("aux_loss", "mtp"),
    "one, padded": (BOTH,),
    "dp2, distributed optimizer": (BOTH,),
    "tp2 with sp": ("seq_aux_loss", BOTH),
    "pp2": (BOTH,),
    "cp2": ("aux_loss", "mtp"),
    "ep2 with cp2": ROUTER,
    "dynamic cp": ("seq_aux_loss", "mtp"),
}
HEADS_CONVERTED = {"one": "untied", "tp2": "untied", "pp2": "untied", "ep2": "qwen3_moe"}
MODE = {"averages": "sample_mean", "counts tokens": "constant"}


def save_models(folder: Path) -> None:
    for name in sorted({model for model, kind in KINDS.values() if "mtp_num_layers" in kind}):
        save_with_heads(folder, name)


@dataclass(frozen=True)
class Step:
    """A batch, and which of its samples are balanced together."""

    case: Case
    batch: TrainBatch
    samples: list[OracleSample]
    groups: list[list[int]]


def _step(layout_name: str, contract: str, kind: dict[str, Any], with_policy: bool) -> Step:
    spec = BATCHES["compacted" if with_policy else "masked"]
    case = Case(spec, loss_of(MODE[contract]), ANYWHERE, seed=5)
    batch, samples = batch_of(case), samples_of(case)
    if not with_policy:
        batch = replace(batch, rewards=[0.0] * len(batch))
        samples = [replace(s, advantage=0.0) for s in samples]
    groups = [[i] for i in range(len(samples))]
    if kind.get("moe_router_load_balancing_type", "aux_loss") == "aux_loss":
        groups = _micro_batches(layout_name, batch, samples)
    return Step(case, batch, samples, groups)


def _micro_batches(layout_name: str, batch: TrainBatch, samples: Sequence[OracleSample]) -> list[list[int]]:
    """The samples of every micro-batch of all ranks; ranks that share one have the same samples."""
    place = {(s.rollout, tuple(s.tokens)): i for i, s in enumerate(samples)}
    assert len(place) == len(samples)
    layout = LAYOUTS[layout_name]
    ranks = layout.ranks // (layout.sizes.tensor_model_parallel_size * layout.sizes.pipeline_model_parallel_size)
    groups: set[tuple[int, ...]] = set()
    for shard in schedule_step(batch, ranks, layout.training, layout.parallel):
        part = shard.batch
        keys = [(r, tuple(t.tolist())) for r, t in zip(part.trajectory_ids, part.tokens, strict=True)]
        groups |= {tuple(sorted(place[keys[i]] for i in plan.samples)) for plan in shard.micro_batches if plan.samples}
    assert sorted(i for group in groups for i in group) == list(range(len(samples)))
    return [list(group) for group in sorted(groups)]


@dataclass(frozen=True)
class Pass:
    """Samples after one pass through a model, with its graph."""

    scores: list[tuple[torch.Tensor, torch.Tensor]]
    routers: Routers
    mtp_loss: torch.Tensor | None


class Oracle:
    """Reads each model once and computes each step once, in the process that the ranks are forked from."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.models: dict[Any, Any] = {}
        self.passes: dict[Any, Pass] = {}
        self.known: dict[Any, Expected] = {}

    def expected(self, layout_name: str, kind_name: str, contract: str, with_policy: bool) -> tuple[Step, Expected]:
        model_name, kind = KINDS[kind_name]
        step = _step(layout_name, contract, kind, with_policy)
        key = (kind_name, contract, with_policy, str(step.groups))
        if key not in self.known:
            self.known[key] = self._ask(model_name, MegatronArguments(**kind), step)
        return step, self.known[key]

    def _model(self, name: str, has_heads: bool) -> Any:
        if (name, has_heads) not in self.models:
            self.models[name, has_heads] = (
                Heads(self.folder, name) if has_heads else plain_model(self.folder, name, torch.float64).train()
            )
        return self.models[name, has_heads]

    def _pass(self, name: str, has_heads: bool, samples: Sequence[OracleSample]) -> Pass:
        """Run the samples through the model once, whatever is computed from it."""
        key = (name, has_heads, str([(s.tokens, s.mask) for s in samples]))
        if key not in self.passes:
            whole = self._model(name, has_heads)
            with recorded_routers(whole) as routers:
                if has_heads:
                    mtp_loss = whole.loss(samples, HEADS)  # its routers include the heads' routers
                else:
                    scores = scores_of(whole, samples, TEMPERATURE)
            if has_heads:
                scores = scores_of(whole.model, samples, TEMPERATURE)
            self.passes[key] = Pass(scores, routers, mtp_loss if has_heads else None)
        return self.passes[key]

    def _ask(self, name: str, sizes: MegatronArguments, step: Step) -> Expected:
        has_heads = sizes.mtp_heads > 0
        whole, outputs = self._model(name, has_heads), self._pass(name, has_heads, step.samples)
        whole.zero_grad()
        metrics = objective(outputs.scores, step.samples, step.case.loss)
        total = metrics["loss"]
        if outputs.mtp_loss is not None:
            metrics["mtp_loss"] = outputs.mtp_loss
            total = total + sizes.mtp_loss_scaling_factor * outputs.mtp_loss
        if sizes.has_router_loss:
            config = (whole.model if has_heads else whole).config
            balance, z_loss = router_losses(outputs.routers, config.num_experts_per_tok, step.samples, step.groups)
            total = total + sizes.moe_aux_loss_coeff * balance + sizes.moe_z_loss_coeff * z_loss
            metrics["moe_aux_loss"] = balance / len(outputs.routers)
            if sizes.moe_z_loss_coeff:
                metrics["moe_z_loss"] = z_loss / len(outputs.routers)
        total.backward(retain_graph=True)  # other losses of these samples have the same pass
        gradients = whole.gradients() if has_heads else {
            n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in whole.named_parameters()
        }  # fmt: skip
        return Expected(step.case, by_expert(gradients), {n: float(v.detach()) for n, v in metrics.items()})


def checked_steps(
    process: RankProcess, kind_name: str, contract: str, steps: Sequence[tuple[Step, Expected]], kind: dict[str, Any]
) -> tuple[float, list[str]]:
    """Return the largest relative error of a gradient, and a line for each difference from the oracle.

    With a distributed optimizer no rank has whole gradients, so their norm is compared.
    """
    name = KINDS[kind_name][0]
    model = with_heads(name) if "mtp_num_layers" in kind else name
    backend = make_backend(process, model, CONTRACTS[contract], auxiliary=kind, lr=0.0, weight_decay=0.0)
    messages: list[str] = []
    largest = 0.0
    for step, expected in steps:
        result = run_step(backend, step.case, step.batch)
        if backend.settings.megatron.use_distributed_optimizer:
            norm = norm_of(expected.gradients)
            worst = abs(result.metrics["grad_norm"] - norm) / norm
            lines = [f"grad_norm {result.metrics['grad_norm']} for {norm}"] * (worst > RELATIVE_ERROR)
        else:
            worst, lines = distance(result, expected.gradients, expected.metrics)
        note(process, f"{kind_name}, {contract}", worst, result.metrics["grad_norm"])
        messages += lines
        largest = max(largest, worst)
    return largest, messages


def conforms(process: RankProcess, kind_name: str, contract: str, steps: Sequence[tuple[Step, Expected]]) -> str:
    """Return the differences from the oracle, in words; empty if there are none."""
    return "\n".join(checked_steps(process, kind_name, contract, steps, KINDS[kind_name][1])[1])


def heads_come_back_exactly(process: RankProcess, name: str) -> None:
    """Read from a checkpoint and written to one, bit for bit; drawn if it has none; never sent to the engine."""
    backend = make_backend(process, with_heads(name), loss_of("sample_mean"), auxiliary=MTP)
    folder = process.folder / f"export of {process.name}, {with_heads(name)}"
    backend.export_hf(folder)
    wanted = load_file(process.folder / with_heads(name) / "model.safetensors")
    tensors = load_file(folder / "model-00001.safetensors")
    assert tensors.keys() == wanted.keys() and all(torch.equal(tensors[n], wanted[n]) for n in wanted)
    assert AutoConfig.from_pretrained(folder).num_nextn_predict_layers == HEADS
    sent = {n for chunk in backend.export_weights() for n in chunk.tensors}
    assert sent == {n for n in wanted if not n.startswith("model.mtp_layers")}

    drawn = weights(make_backend(process, name, loss_of("sample_mean"), auxiliary=MTP))
    assert drawn.keys() == wanted.keys()
    for each, tensor in drawn.items():
        if each.startswith("model.mtp_layers") and tensor.dim() == 1:
            assert torch.equal(tensor, torch.ones_like(tensor))
        elif each.startswith("model.mtp_layers"):  # equal at every layout
            generator = torch.Generator().manual_seed(zlib.crc32(each.encode()))
            assert torch.equal(tensor, MODELS[name].initializer_range * torch.randn(tensor.shape, generator=generator))


def checks_of(layout_name: str, oracle: Oracle, contracts: Contracts) -> dict[str, Any]:
    checks: dict[str, Any] = {}
    if layout_name in (HEADS_CONVERTED if contracts.whole else ("pp2",)):
        checks["heads come back exactly"] = partial(heads_come_back_exactly, name=HEADS_CONVERTED[layout_name])
    return checks | {
        f"{kind}, {contract}": partial(
            conforms,
            kind_name=kind,
            contract=contract,
            steps=[oracle.expected(layout_name, kind, contract, with_policy) for with_policy in (True, False)],
        )
        for kind in (OF_LAYOUT if contracts.whole else BY_TURNS).get(layout_name, ())
        for contract in contracts.of(kind)
    }
