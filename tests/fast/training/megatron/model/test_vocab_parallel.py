"""Log-probs with the vocabulary on two ranks, in fp32 under a body in bf16, against float64. Needs no Megatron."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from forked_ranks import run_on_ranks
from tolerance import rounding_error

from miles.training.megatron.policy_model import vocab_parallel_log_probs

RANKS, ROWS, WIDTH, VOCABULARY, TEMPERATURE = 2, 30, 16, 22, 0.7


def an_fp32_head_is_exact_on_two_ranks(rank: int) -> None:
    """Values, entropy and gradients; every rank has half of the rows, and its part of the hidden states' gradient."""
    torch.manual_seed(0)
    hidden, head = (torch.randn(n, WIDTH).bfloat16().requires_grad_() for n in (ROWS, VOCABULARY))
    targets = torch.randint(VOCABULARY, (ROWS,))
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, head)]
    log_p = (exact[0] @ exact[1].t() / TEMPERATURE).log_softmax(-1)
    expected = log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    (expected[0].sum() + expected[1].sum()).backward()
    half = VOCABULARY // RANKS
    own = head.detach()[rank * half : (rank + 1) * half].requires_grad_()
    size = float((exact[0].detach().abs() @ exact[1].detach().abs().t()).max()) / TEMPERATURE
    bound = rounding_error(WIDTH + VOCABULARY, size)
    for fp32 in (True, False):
        hidden.grad = own.grad = None
        pair = vocab_parallel_log_probs(
            hidden,
            own,
            targets,
            first_token=rank * half,
            temperature=TEMPERATURE,
            chunk_size=7,
            group=dist.group.WORLD,  # type: ignore[arg-type]
            with_entropy=True,
            fp32=fp32,
        )
        assert pair[1] is not None
        errors = [float((a.double() - b).abs().max()) for a, b in zip(pair, expected, strict=True)]  # type: ignore[type-var]
        if not fp32:
            assert max(errors) > 30 * bound
            continue
        assert max(errors) < bound, errors
        (pair[0].sum() + pair[1].sum()).backward()
        assert hidden.grad is not None and own.grad is not None
        whole = hidden.grad.float()
        dist.all_reduce(whole)
        wanted = exact[1].grad[rank * half : (rank + 1) * half]  # type: ignore[index]
        # Each rank rounds its part to bf16; the head's gradient is rounded once.
        assert (own.grad.double() - wanted).abs().max() <= 2.0**-8 * wanted.abs().max() + 100 * bound
        assert exact[0].grad is not None
        assert (whole.double() - exact[0].grad).abs().max() <= 2.0**-7 * own.detach().abs().max() * 4 + 100 * bound


def test_on_two_ranks(tmp_path: Path) -> None:
    said = run_on_ranks(tmp_path, "vocabulary", range(RANKS), {"fp32": an_fp32_head_is_exact_on_two_ranks})
    assert not said["fp32"], said["fp32"]
