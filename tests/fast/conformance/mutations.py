"""Faults seeded into the production code, to show that the matrix finds them, and which ones the canary detects.

Each fault replaces functions on all ranks while a case runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from cases import BATCHES, LAYOUTS, MODES, Case, Layout, loss_of
from torch.distributed.fsdp import FSDPModule
from torch.nn.attention.bias import causal_upper_left

from miles.batch import collate, convert, schedule
from miles.config.training import TrainingArguments
from miles.objective.chosen import build_objective
from miles.objective.loss_types import policy_loss
from miles.objective.loss_types.base import Objective
from miles.objective.token_weights import OffPolicyMasking, Truncation
from miles.training import packed_attention
from miles.training.fsdp import runner
from miles.training.fsdp.models import Policy
from miles.types import groups
from miles.types.train_batch import MicroBatch

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclass(frozen=True)
class Mutation:
    """A fault, a case that shows it, and whether the canary detects it there.

    With ``off_policy``, old and reference log-probs differ from the model's. A fault ``of_build`` is in how the backend
    is built. One that is ``hidden_by_watching`` leaves samples out of the backward pass, and a watched step has all.
    """

    fault: str
    case: Case
    canary: bool
    patches: tuple[tuple[Any, str, Wrap], ...]
    off_policy: bool = False
    of_build: bool = False
    hidden_by_watching: bool = False

    @contextmanager
    def applied(self) -> Iterator[None]:
        with ExitStack() as stack:
            for owner, name, wrap in self.patches:
                stack.enter_context(patch.object(owner, name, wrap(getattr(owner, name))))
            yield


def case(mode: str = "sample_mean", batch: str = "uneven", layout: str = "dp2", **fields: Any) -> Case:
    assert mode in MODES
    return Case(BATCHES[batch], loss_of(mode, **fields), LAYOUTS[layout])


def of_result(change: Callable[..., Any]) -> Wrap:
    """Return a wrapper that changes a function's result. ``change`` also gets the function's arguments."""
    return lambda original: lambda *args, **kwargs: change(original(*args, **kwargs), *args, **kwargs)


def denominators(change: Callable[[Any, dict[str, Any]], Any]) -> tuple[Any, str, Wrap]:
    return (convert, "step_denominators", of_result(lambda result, mode, **given: change(result, given)))


def micro_batch(change: Callable[[MicroBatch], MicroBatch]) -> tuple[Any, str, Wrap]:
    return (runner, "collate", of_result(lambda micro, *_, **__: change(micro)))


def loss_times(factor: Callable[..., float]) -> tuple[Any, str, Wrap]:
    """Multiply the loss of every micro-batch by ``factor(micro)``; leave the metrics unchanged."""
    return (
        Objective,
        "language_model_loss",
        of_result(lambda output, objective, micro, *_: replace(output, loss=output.loss * factor(micro))),
    )


class _Count:
    """Count the micro-batches of the step over all ranks, when the step begins."""

    def __init__(self) -> None:
        self.here = self.everywhere = 1

    def noted(self) -> tuple[Any, str, Wrap]:
        def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
            def run(model: Any, shard: Any, *rest: Any) -> Any:
                self.here = len(shard.micro_batches)
                self.everywhere = self.here * dist.get_world_size()
                return original(model, shard, *rest)

            return run

        return (runner.FsdpTrainedModel, "forward_backward", wrap)


COUNT = _Count()
WEIGHTS: list[torch.Tensor] = []


def _own_samples_only(result: Any, named: dict[str, Any]) -> Any:
    own = [float(max(count, 1)) for count in named["token_counts"]]
    return replace(result, sample_denoms=own, trajectory_token_counts=own)


def _remember(result: Any, *_: Any) -> Any:
    WEIGHTS[:] = [result.weights]
    return result


def _weights_in_the_denominator(original: Callable[..., Any]) -> Callable[..., Any]:
    def reducer(loss: Any, micro: MicroBatch) -> Any:
        mask = micro.loss_mask * (WEIGHTS[0] > 0)
        counts = torch.zeros_like(micro.trajectory_token_counts).index_add(0, micro.sample_index, mask)
        return original(loss, replace(micro, loss_mask=mask, trajectory_token_counts=counts.clamp(min=1)))

    return reducer


def _mean_of_means(original: Callable[..., Any]) -> Callable[..., Any]:
    def reducer(micro: MicroBatch, per_token: bool) -> Any:
        return original(
            replace(micro, num_trajectories=max(len(micro.response_lengths), 1) * COUNT.everywhere), per_token
        )

    return reducer


def _zeroed_before(original: Callable[..., Any]) -> Callable[..., Any]:
    def run(policy: Any, *rest: Any) -> Any:
        policy.zero_grad()
        return original(policy, *rest)

    return run


def _averaged(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda module, factor: original(module, factor * dist.get_world_size())


def _everyone_sees_everything(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda rows, sharers: torch.zeros_like(original(rows, sharers))


def _own_gradient_only(_: Callable[..., Any]) -> Callable[..., Any]:
    def run(ctx: Any, grad: torch.Tensor) -> Any:
        return grad.chunk(ctx.context.size)[ctx.context.rank].contiguous(), None

    return run


def _mirror_chunk_one_early(indices: np.ndarray, length: int, size: int, rank: int) -> np.ndarray:
    half = len(indices) // 2
    return indices if size == 1 else np.concatenate([indices[:half], indices[half:] - 1])


def gradients_of(**unseen: Any) -> tuple[Any, str, Wrap]:
    """Make ``samples_with_gradient`` see these values of the settings instead of the real ones."""
    return (
        Objective,
        "samples_with_gradient",
        lambda original: lambda chosen, rewards: original(build_objective(replace(chosen.flags, **unseen)), rewards),
    )


def _rejection_alone(original: Callable[..., Any]) -> Callable[..., Any]:
    def weights(self: Any, loss: Any, ratios: Any) -> Any:
        result = original(self, loss, ratios)
        return result._replace(weights=torch.ones_like(result.weights)) if loss.use_rs else result

    return weights


def _moved_by_one(micro: MicroBatch) -> MicroBatch:
    return replace(micro, loss_mask=micro.loss_mask.roll(1))


MASKED = dict(batch="masked")
MUTATIONS: dict[str, Mutation] = {
    mutation.fault: mutation
    for mutation in (
        Mutation(
            "a trajectory's samples are averaged one by one",
            case(batch="compacted"),
            True,
            (denominators(_own_samples_only),),
        ),
        Mutation(
            "prompt_mean forgets P / N",
            case("prompt_mean"),
            True,
            (
                denominators(
                    lambda d, given: replace(
                        d,
                        sample_denoms=[
                            x * d.num_trajectories / len(set(given["group_indices"])) for x in d.sample_denoms
                        ],
                    )
                ),
            ),
        ),
        Mutation(
            "constant divides by the longest response instead of L",
            case("constant"),
            True,
            (
                denominators(
                    lambda d, given: replace(
                        d, sample_denoms=[float(max(given["token_counts"]))] * len(d.sample_denoms)
                    )
                ),
            ),
        ),
        Mutation(
            "a fully masked sample adds a phantom token to T",
            case("token_mean", **MASKED),
            True,
            (denominators(lambda d, given: replace(d, num_loss_tokens=sum(max(c, 1) for c in given["token_counts"]))),),
        ),
        Mutation(
            "a fully masked trajectory does not count in N",
            case(**MASKED),
            True,
            (
                denominators(
                    lambda d, given: replace(d, num_trajectories=d.num_trajectories - given["token_counts"].count(0))
                ),
            ),
        ),
        Mutation(
            "T is the micro-batch's own count",
            case("token_mean"),
            True,
            (micro_batch(lambda m: replace(m, num_loss_tokens=int(m.loss_mask.sum()))),),
        ),
        Mutation(
            "N is the micro-batch's own count",
            case(),
            True,
            (micro_batch(lambda m: replace(m, num_trajectories=max(len(m.response_lengths), 1))),),
        ),
        Mutation(
            "gradients are averaged over ranks",
            case(),
            True,
            ((FSDPModule, "set_gradient_divide_factor", _averaged),),
            of_build=True,
        ),
        Mutation(
            "the loss is multiplied by the number of ranks",
            case(layout="dp4"),
            True,
            (loss_times(lambda _: dist.get_world_size()),),
        ),
        Mutation(
            "the loss is multiplied by the context-parallel size",
            case(layout="dp2 x cp2"),
            True,
            (loss_times(lambda micro: micro.context.size),),
        ),
        Mutation(
            "the loss is divided by the number of micro-batches",
            case(),
            True,
            (COUNT.noted(), loss_times(lambda _: 1 / COUNT.here)),
        ),
        Mutation(
            "gradients of the last micro-batch only",
            case(),
            True,
            ((Policy, "scorer", _zeroed_before),),
        ),
        Mutation(
            "the last sample of the step is lost",
            case(layout="alone"),
            True,
            ((schedule, "_in_order", of_result(lambda parts, *_: [*parts[:-1], parts[-1][:-1]])),),
        ),
        Mutation(
            "two ranks train the same sample",
            case(),
            True,
            ((schedule, "_in_order", of_result(lambda parts, *_: [[*parts[0], parts[1][0]], *parts[1:]])),),
        ),
        Mutation(
            "masked tokens are trained on",
            case(**MASKED),
            True,
            (micro_batch(lambda m: replace(m, loss_mask=torch.ones_like(m.loss_mask))),),
        ),
        Mutation(
            "masks are cut one token off", case(batch="masked", layout="cp2"), True, (micro_batch(_moved_by_one),)
        ),
        Mutation(
            "the second zig-zag chunk starts one token early",
            case(layout="cp2"),
            True,
            ((collate, "zigzag_positions", of_result(_mirror_chunk_one_early)),),
        ),
        Mutation(
            "rejected tokens leave the denominator",
            case(batch="even", use_rs=True, rs_lower_bound=0.4, rs_upper_bound=2.5),
            False,
            (
                (policy_loss, "weigh", of_result(_remember)),
                (policy_loss, "get_pg_loss_reducer", _weights_in_the_denominator),
            ),
        ),
        Mutation(
            "a metric is a mean of micro-batch means",
            case(**MASKED),
            False,
            (COUNT.noted(), (policy_loss, "get_sum_of_sample_mean", _mean_of_means)),
        ),
        Mutation(
            "advantages are centred in each micro-batch",
            case(),
            False,
            (
                micro_batch(
                    lambda m: replace(
                        m, advantages=m.advantages - m.advantages.mean() if len(m.advantages) else m.advantages
                    )
                ),
            ),
        ),
        Mutation(
            "packed samples see their future",
            case(layout="alone, packed"),
            False,
            ((packed_attention, "_mask_of_heads", _everyone_sees_everything),),
        ),
        Mutation(
            "queries of a late chunk are taken for the first",
            replace(case(layout="cp2"), long_rows=True),
            False,
            ((packed_attention, "causal_lower_right", lambda _: causal_upper_left),),
        ),
        Mutation(
            "positions do not restart in each sample",
            case(layout="alone, packed"),
            False,
            (micro_batch(lambda m: replace(m, position_ids=torch.arange(len(m.position_ids)))),),
        ),
        Mutation(
            "keys and values give their gradients to nobody else",
            case(layout="cp2"),
            False,
            ((groups._Gather, "backward", lambda f: staticmethod(_own_gradient_only(f))),),
        ),
        Mutation(
            "samples of negative advantage are not trained on",
            case(),
            False,
            ((Objective, "samples_with_gradient", lambda _: lambda chosen, rewards: [x > 0 for x in rewards]),),
            hidden_by_watching=True,
        ),
        Mutation(
            "samples of positive advantage are not trained on",
            case(),
            False,
            ((Objective, "samples_with_gradient", lambda _: lambda chosen, rewards: [x < 0 for x in rewards]),),
            hidden_by_watching=True,
        ),
        Mutation(
            "samples without advantage get no entropy bonus",
            replace(case(entropy_coef=0.1), equal_rewards=True),
            False,
            (gradients_of(entropy_coef=0.0),),
            hidden_by_watching=True,
        ),
        Mutation(
            "samples without advantage are not held to the reference",
            replace(case(use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type="k3"), equal_rewards=True),
            False,
            (gradients_of(kl_loss_coef=0.0),),
            off_policy=True,
            hidden_by_watching=True,
        ),
        Mutation(
            "samples without advantage are kept from the custom reducer",
            replace(
                case(custom_pg_loss_reducer_function_path="custom_reducers:mean_of_samples_seen"),
                layout=Layout("one micro-batch", 1, training=TrainingArguments(micro_batch_size=16)),
                equal_rewards=True,
            ),
            True,
            (gradients_of(custom_pg_loss_reducer_function_path=None),),
        ),
        Mutation(
            "sequences at the bound are masked as off-policy",
            case(use_opsm=True, opsm_delta=0.0),
            False,
            (
                (
                    OffPolicyMasking,
                    "weigh",
                    lambda f: lambda me, loss, of: f(me, replace(loss, opsm_delta=loss.opsm_delta - 1e-9), of),
                ),
            ),
        ),
        Mutation(
            "rejection takes the place of truncation",
            case(use_tis=True, tis_clip=1.1, tis_clip_low=0.9, use_rs=True, rs_lower_bound=0.6, rs_upper_bound=1.7),
            False,
            ((Truncation, "weigh", _rejection_alone),),
        ),
    )
}
