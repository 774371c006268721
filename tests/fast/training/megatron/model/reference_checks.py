"""A reference that follows the policy, and logits in fp32, on Megatron's layouts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from batches import batch_of
from followed_reference import assert_needs_the_interval
from layouts import CPU, TEMPERATURE, RankProcess, make_backend, plain_model, shard_of
from state_checks import ADAM, CASE, PLAIN, log_probs
from tolerance import log_prob_error, rounding_error

from miles.training import scoring
from miles.training.megatron.backend import MegatronBackend, named_weights
from miles.training.trainer import Trainer

KL = replace(PLAIN, use_kl_loss=True, kl_loss_coef=0.1)


def _backend(process: RankProcess, model: str, alpha: float, bf16: bool, **fields: Any) -> MegatronBackend:
    plain = make_backend(process, model, PLAIN, **ADAM).settings
    refreshed = replace(plain.model, **({"ref_update_interval": 1, "ref_mixup_alpha": alpha} | fields))
    settings = replace(plain, model=refreshed, loss=KL, training=replace(plain.training, bf16=bf16))
    return MegatronBackend(settings, CPU, 10)


def _train(backend: MegatronBackend) -> None:
    Trainer(backend, KL, backend.settings.dims.token_ranks).train([shard_of(backend, batch_of(CASE))])
    backend.refresh_reference()


def _exact(backend: MegatronBackend) -> dict[str, torch.Tensor]:
    assert backend.following is not None
    return {name: weight.clone() for name, weight in backend.following.exact.items()}


def reference_follows_the_policy(process: RankProcess) -> None:
    """Two refreshes against float64, on every rank's own parts; then policy and reference have the same log-probs."""
    model = process.layout.models[0]
    for alpha, bf16 in ((1.0, True), (0.3, True)):
        backend = _backend(process, model, alpha, bf16)
        expected = {name: weight.double() for name, weight in _exact(backend).items()}
        for _ in range(2):
            _train(backend)
            for name, weight in named_weights(backend.policy.stage).items():
                expected[name] = alpha * weight.detach().double() + (1 - alpha) * expected[name]
        for name, tensor in _exact(backend).items():
            largest = expected[name].abs().max().item()
            assert (tensor.double() - expected[name]).abs().max() <= rounding_error(4, largest), (alpha, bf16, name)
        assert backend.reference is not None
        for name, weight in named_weights(backend.reference.stage).items():
            assert torch.equal(weight, _exact(backend)[name].to(weight.dtype)), name
        if alpha == 1:
            shard = shard_of(backend, batch_of(CASE))
            pairs = zip(log_probs(backend, shard), log_probs(backend, shard, reference=True), strict=True)
            assert all((a == b).all() for a, b in pairs), bf16


def resumed_reference_is_exact(process: RankProcess) -> None:
    """A run that stops and resumes ends with the reference and the policy of one that did not."""
    model = process.layout.models[0]
    for alpha, bf16 in ((0.3, True),):
        folder = process.folder / f"reference {alpha} {bf16} of {process.name}"
        if dist.get_rank() == 0:
            folder.mkdir()
        dist.barrier()
        straight = _backend(process, model, alpha, bf16)
        fresh = _exact(straight)
        _train(straight)
        straight.save(folder, {"rollouts_done": 1})
        saved = _exact(straight)
        dist.barrier()
        resumed = _backend(process, model, alpha, bf16)
        assert resumed.load(folder) == {"rollouts_done": 1}
        assert all(torch.equal(_exact(resumed)[name], weight) for name, weight in _exact(straight).items())
        again = _backend(process, model, alpha, bf16)
        again.load(folder, reference=False)
        assert all(torch.equal(_exact(again)[name], weight) for name, weight in fresh.items())
        for backend in (straight, resumed):
            _train(backend)
        assert all(torch.equal(_exact(resumed)[name], weight) for name, weight in _exact(straight).items())
        later = named_weights(resumed.policy.stage)
        assert all(torch.equal(later[name], weight) for name, weight in named_weights(straight.policy.stage).items())
        assert_needs_the_interval(_backend(process, model, 1.0, bf16, ref_update_interval=None), folder)
        advised = _backend(process, model, 1.0, bf16, ref_update_interval=None, ref_load=str(folder / "reference"))
        assert advised.reference is not None
        for name, weight in named_weights(advised.reference.stage).items():
            assert torch.equal(weight, saved[name].to(weight.dtype)), name


def logits_are_fp32_under_a_bf16_body(process: RankProcess) -> None:
    """Log-probs agree with float64, from the body's own bf16 hidden states and every rank's rows of the head."""
    plain = make_backend(process, process.layout.models[0], PLAIN, **ADAM).settings
    worst = {}
    for fp32 in (False, True):
        training = replace(plain.training, bf16=True, fp32_lm_head=fp32)
        backend = MegatronBackend(replace(plain, training=training), CPU, 10)
        stage, shard = backend.policy.stage, shard_of(backend, batch_of(CASE))
        errors = [0.0]

        def scored(
            micro: Any, scorer: Any, stage: Any = stage, errors: list[float] = errors, ranks: Any = backend.ranks
        ) -> None:
            hidden = scorer.args[0]
            assert hidden.dtype == torch.bfloat16
            if stage.config.sequence_parallel:
                parts = [torch.empty_like(hidden) for _ in range(ranks.tp.size())]
                dist.all_gather(parts, hidden.contiguous(), group=ranks.tp)
                hidden = torch.cat(parts)
            actual = scorer(with_entropy=False).log_probs.double()
            own = stage.head_weight().detach()
            rows = [torch.empty_like(own) for _ in range(ranks.tp.size())]
            dist.all_gather(rows, own.contiguous(), group=ranks.tp)
            chosen = hidden[:, 0][micro.logit_index].double() if hidden.shape[1] == 1 else None
            assert chosen is not None, "packed layouts only"
            logits = chosen @ torch.cat(rows).double().t() / TEMPERATURE
            expected = logits.log_softmax(-1).gather(1, micro.targets[:, None])[:, 0]
            if len(expected):
                errors.append((actual - expected).abs().max().item() / logits.abs().max().item())

        backend.policy.forward(shard, shard.micro_batches, scored)
        worst[fp32] = max(errors)
    bound = rounding_error(32 + 66, 1.0)
    assert worst[True] < bound
    assert len(errors) == 1 or worst[False] > 30 * bound


def sums_of_squared_probs_are_those_of_the_model(process: RankProcess) -> None:
    """They come from log-probs at two temperatures; compare with float64 over the vocabulary, sample by sample."""
    name = process.layout.models[0]
    backend = make_backend(process, name, PLAIN)
    shard = shard_of(backend, batch_of(CASE))
    columns = scoring.sum_squared_probs(backend, backend.policy, shard, log_probs(backend, shard))
    model = plain_model(process.folder, name, torch.float64)
    tolerance = 4 * log_prob_error(model, shard.batch.tokens, TEMPERATURE)  # relative: of 2 log p - log q
    for tokens, response, sums in zip(shard.batch.tokens, shard.batch.response_lengths, columns, strict=True):
        with torch.no_grad():
            logits = model(torch.as_tensor(tokens)[None]).logits[0, -response - 1 : -1] / TEMPERATURE
        expected = logits.softmax(-1).square().sum(-1).numpy()
        assert (abs(sums - expected) <= tolerance * expected).all()


CHECKS = (
    sums_of_squared_probs_are_those_of_the_model,
    reference_follows_the_policy,
    resumed_reference_is_exact,
    logits_are_fp32_under_a_bf16_body,
)
OF_LAYOUT = {
    "one": (sums_of_squared_probs_are_those_of_the_model, logits_are_fp32_under_a_bf16_body),
    "tp2": CHECKS,
    "ep2": CHECKS[:-1],
    "tp2 with sp, dp2, distributed optimizer": CHECKS,
    "tp2 with sp, pp2": CHECKS,
    "pp2, cp2": CHECKS[:-1],
    "pp3, interleaved": CHECKS[:-1],
}
BY_TURNS = {"one": OF_LAYOUT["one"]}
