"""Draw the batch that all implementations get, and compute our loss and the papers' from it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from miles.objective.aggregation import reconcile_aggregation, step_denominators

if TYPE_CHECKING:
    import torch

    from miles.objective.settings import LossArguments

LENGTHS = (7, 3, 5, 1, 6, 6, 2, 8, 4, 8, 1, 5, 3, 2, 8, 6)  # of four groups of four
RANKS = (((0, 4, 8, 12), (1, 5, 9, 13)), ((2, 6, 10, 14), (3, 7, 11, 15)))  # their micro-batches: uneven tokens
MASKED = 10  # a response without loss tokens
EQUAL = (12, 13, 14, 15)  # a group of advantage 0


def draw(seed: int) -> dict[str, Any]:
    """Return the columns of a batch, [samples, longest], as lists, and the micro-batches of each rank."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    shape = (len(LENGTHS), max(LENGTHS))

    def noise(scale: float) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64) * scale

    mask = (torch.arange(shape[1]) < torch.tensor(LENGTHS)[:, None]).double()
    mask *= torch.rand(shape, generator=generator, dtype=torch.float64) > 0.15  # answers of tools, between ours
    mask[MASKED] = 0.0
    log_probs = -noise(1.0).abs() - 0.05
    advantages = noise(1.0)[:, :1].expand(shape).clone()
    advantages[list(EQUAL)] = 0.0
    columns = {"mask": mask, "log_probs": log_probs, "advantages": advantages}
    columns |= {name: (log_probs + noise(0.3)).clamp(max=-1e-3) for name in ("old", "ref", "engine")}
    return {"columns": {name: value.tolist() for name, value in columns.items()}, "ranks": RANKS}


def settled(loss: LossArguments) -> LossArguments:
    """Return the flags of the loss as a run has them after its checks."""
    from miles.base.flags import collect_errors

    with collect_errors() as errors:
        return reconcile_aggregation(loss, None, None, 4, errors, is_explicit=True)[0]


def our_gradient(loss: LossArguments, case: dict[str, Any]) -> tuple[float, torch.Tensor]:
    """Compute our loss of every micro-batch as a step does, and add up: loss, and gradient in the log-probs."""
    import torch

    from miles.objective.chosen import build_objective
    from miles.objective.loss_types.policy_loss import policy_loss_function
    from miles.types.groups import ALONE
    from miles.types.train_batch import MicroBatch

    columns = {name: torch.tensor(value) for name, value in case["columns"].items()}
    leaf = columns["log_probs"].clone().requires_grad_()
    counts = [int(row.sum()) for row in columns["mask"]]
    denominators = step_denominators(
        loss.loss_aggregation,
        token_counts=counts,
        trajectory_ids=range(len(counts)),
        group_indices=[place // 4 for place in range(len(counts))],
        divisor=loss.loss_aggregation_divisor,
    )
    total = 0.0
    for micro in [micro for rank in case["ranks"] for micro in rank]:
        lengths = [LENGTHS[place] for place in micro]
        is_token = torch.arange(max(LENGTHS)) < torch.tensor(lengths)[:, None]
        flat = {name: value[list(micro)][is_token] for name, value in columns.items()}
        size = sum(lengths)
        total_lengths = tuple(length + 1 for length in lengths)
        batch = MicroBatch(
            input_ids=torch.zeros(sum(total_lengths), dtype=torch.int64),
            position_ids=torch.zeros(sum(total_lengths), dtype=torch.int64),
            token_index=torch.arange(sum(total_lengths)),
            logit_index=torch.arange(size),
            targets=torch.zeros(size, dtype=torch.int64),
            sample_index=torch.arange(len(micro)).repeat_interleave(torch.tensor(lengths)),
            response_index=torch.arange(size),
            loss_mask=flat["mask"],
            advantages=flat["advantages"],
            rollout_log_probs=flat["engine"],
            old_log_probs=flat["old"],
            ref_log_probs=flat["ref"],
            sample_denoms=torch.tensor([denominators.sample_denoms[place] for place in micro]),
            trajectory_token_counts=torch.tensor([max(counts[place], 1.0) for place in micro]),
            response_lengths=tuple(lengths),
            total_lengths=total_lengths,
            read_lengths=total_lengths,
            num_trajectories=len(counts),
            num_loss_tokens=sum(counts),
            context=ALONE,
        )
        output = policy_loss_function(build_objective(loss), batch, leaf[list(micro)][is_token], None)
        output.loss.backward()
        total += output.loss.item()
    assert leaf.grad is not None
    return total, leaf.grad.double()


def paper_gradient(loss: Any, case: dict[str, Any]) -> tuple[float, torch.Tensor]:
    """Compute the formulas of the papers that the flags stand for in float64, from whole samples, never split.

    PPO (1707.06347) with dual clip (1912.09729), GSPO (2507.18071), CISPO (2506.13585), SAPO (2511.20347), GMPO
    (2507.20673), DPPO (2602.04879), KL k1 to k3 (Schulman), TIS and IcePop; the means of docs/loss-aggregation.md.
    """
    import torch

    c = {name: torch.tensor(value, dtype=torch.float64) for name, value in case["columns"].items()}
    x = c["log_probs"].clone().requires_grad_()
    m, lengths = c["mask"], c["mask"].sum(-1, keepdim=True)
    token = _paper_token_losses(loss, c, x)
    if loss.use_tis:
        weight = ((c["old"] - c["engine"]) * m).exp()
        if loss.tis_level == "sequence":
            weight = ((c["old"] - c["engine"]) * m).sum(-1, keepdim=True).exp().expand_as(x)
        inside = (weight >= loss.tis_clip_low) & (weight <= loss.tis_clip)
        cut = weight.clamp(loss.tis_clip_low, loss.tis_clip)
        token = token * (cut if loss.tis_mode == "truncate" else weight * inside)
    n, tokens = len(m), m.sum()
    means = {
        "sample_mean": 1 / (n * lengths.clamp(min=1)),
        "token_mean": (1 / tokens).expand_as(lengths),
        "constant": torch.full_like(lengths, 1 / (n * (loss.loss_aggregation_divisor or 1))),
    }
    total = (token * m * means[loss.loss_aggregation]).sum()
    if loss.use_kl_loss:
        difference, ratio = (x - c["ref"]) * m, ((x - c["old"]) * m).exp()
        ready = {"k1": difference, "k2": difference**2 / 2, "k3": (-difference).exp() - 1 + difference}
        name = loss.kl_loss_type
        kl = ready["k2" if name.endswith("+") else name.replace("low_var_kl", "k3")]
        kl = kl * ratio if loss.use_unbiased_kl else kl
        mean = means["token_mean" if loss.loss_aggregation == "token_mean" else "sample_mean"]
        total = total + loss.kl_loss_coef * (kl * m * mean).sum()
    total.backward()
    assert x.grad is not None
    return total.item(), x.grad


def _paper_token_losses(loss: Any, c: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    import torch

    m, a = c["mask"], c["advantages"]
    lengths = m.sum(-1, keepdim=True)
    log_ratio = (x - c["old"]) * m
    ratio = log_ratio.exp()
    of_sequence = (log_ratio.sum(-1, keepdim=True) / lengths.clamp(min=1)).exp()

    def clipped(r: torch.Tensor) -> torch.Tensor:
        high = loss.eps_clip if loss.eps_clip_high is None else loss.eps_clip_high
        best = torch.minimum(r * a, r.clamp(1 - loss.eps_clip, 1 + high) * a)
        return -best if loss.eps_clip_c is None else -torch.where(a < 0, torch.maximum(best, loss.eps_clip_c * a), best)

    kind = loss.policy_loss or "ppo"
    if kind in ("ppo", "gspo"):
        token = clipped(ratio if kind == "ppo" else of_sequence.expand_as(x))
    elif kind == "cispo":
        token = -ratio.detach().clamp(loss.ratio_min, loss.ratio_max) * a * x
    elif kind == "sapo":
        tau = torch.where(a > 0, loss.sapo_tau_pos, loss.sapo_tau_neg)
        token = -torch.sigmoid(tau * (ratio - 1)) * 4 / tau * a
    elif kind == "geo_mean":
        sign, bound = a.sign(), loss.geo_mean_log_clip
        clamped = sign * torch.minimum(sign * log_ratio, sign * log_ratio.clamp(-bound, bound))
        token = -a * ((clamped * m).sum(-1, keepdim=True) / lengths.clamp(min=1)).exp().expand_as(x)
    elif kind == "dppo_tv":
        moved = (x.exp() - c["old"].exp()).detach()
        drops = ((a > 0) & (moved > loss.dppo_tv_delta)) | ((a < 0) & (-moved > loss.dppo_tv_delta))
        bounded = ratio.detach().clamp(max=loss.dppo_ratio_max) * x if loss.dppo_ratio_max else ratio
        token = -(~drops).double() * a * bounded
    else:
        raise ValueError(f"{kind}: no formula here")
    return token
