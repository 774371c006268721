"""Given experts, through Megatron's own routing: their weights follow from the router's logits."""

from __future__ import annotations

import pytest
import torch

from miles.training.megatron.moe import LayerExperts, MicroBatchExperts

TOKENS, EXPERTS, K = 7, 6, 2
GROUPS = {"num_groups": 2, "group_topk": 1}
KINDS = {
    "softmax over the chosen": {},
    "softmax over all": {"use_pre_softmax": True},
    "sigmoid": {"score_function": "sigmoid", "scaling_factor": 1.7, **GROUPS},
}


def route(*tensors: object, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
    from megatron.core.transformer.moe import moe_utils  # slow to import, which every worker of pytest-xdist would do

    return moe_utils.topk_routing_with_score_function(*tensors, **options)


def expected_weights(kind: str, logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    values = logits.gather(1, chosen)
    match kind:
        case "softmax over the chosen":
            return values.exp() / values.exp().sum(1, keepdim=True)
        case "softmax over all":
            return values.exp() / logits.exp().sum(1, keepdim=True)
    scores = 1 / (1 + (-values).exp())
    return 1.7 * scores / scores.sum(1, keepdim=True)


def inputs(kind: str) -> tuple[torch.Tensor, dict[str, object]]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(TOKENS, EXPERTS, generator=generator, dtype=torch.float64).requires_grad_()
    bias = 0.1 * torch.randn(EXPERTS, generator=generator, dtype=torch.float64) if kind == "sigmoid" else None
    return logits, {"expert_bias": bias, **KINDS[kind]}


@pytest.mark.parametrize("kind", KINDS)
def test_given_experts_replace_the_choice_alone(kind: str) -> None:
    logits, options = inputs(kind)
    own, _ = route(logits, K, **options)
    experts = torch.tensor([[(t + 1) % EXPERTS, (t + 4) % EXPERTS] for t in range(TOKENS)], dtype=torch.int16)
    experts[-1] = -1  # the last token chooses on its own
    weights, chosen = route(logits, K, router_replay=LayerExperts(experts, None), **options)
    index = experts[:-1].long()
    expected = torch.zeros(TOKENS, EXPERTS, dtype=torch.float64)
    expected = expected[:-1].scatter(1, index, expected_weights(kind, logits[:-1], index))
    torch.testing.assert_close(weights[:-1], expected)
    torch.testing.assert_close(weights[-1], own[-1])
    assert torch.equal(chosen, weights != 0)
    weigh = torch.randn(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    [gradient] = torch.autograd.grad((weights * weigh)[:-1].sum(), logits, retain_graph=True)
    [wanted] = torch.autograd.grad((expected * weigh[:-1]).sum(), logits)
    torch.testing.assert_close(gradient, wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_kept_is_chosen_again(kind: str) -> None:
    logits, options = inputs(kind)
    by_layer: dict[int, torch.Tensor] = {}
    first = MicroBatchExperts(choices=by_layer, keeps=True)
    own, _ = route(logits, K, router_replay=first.of_layer(3), **options)
    plain, _ = route(logits, K, **options)
    assert list(by_layer) == [3] and torch.equal(own, plain)
    again, _ = route(logits, K, router_replay=MicroBatchExperts(choices=by_layer).of_layer(3), **options)
    torch.testing.assert_close(again, plain)
    moved = -logits.detach()
    _, other = route(moved, K, **options)
    _, replayed = route(moved, K, router_replay=MicroBatchExperts(choices=by_layer).of_layer(3), **options)
    assert torch.equal(replayed, plain != 0) and not torch.equal(other, replayed)


class Half:
    """Two sequence-parallel ranks, as seen by one."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return self._rank


def test_routers_see_tokens_with_the_sequence_first() -> None:
    experts = torch.arange(6, dtype=torch.int16).view(6, 1, 1)

    def order(shape: tuple[int, int], padding: int, group: object = None) -> list[int]:
        replay = MicroBatchExperts.of(experts, shape, padding, group)
        assert replay.replayed is not None
        return replay.replayed[:, 0, 0].tolist()

    assert order((1, 8), 2) == [0, 1, 2, 3, 4, 5, -1, -1]
    assert order((2, 3), 0) == [0, 3, 1, 4, 2, 5]
    assert order((1, 8), 2, Half(1)) == [4, 5, -1, -1]
    assert order((2, 3), 0, Half(0)) == [0, 3, 1]
