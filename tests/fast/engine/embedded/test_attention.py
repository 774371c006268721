"""Compare a decoding step's attention over the cache with one sequence at a time in float64."""

import pytest
import torch
from tolerance import attention_error

from miles.engine.embedded.attention import MANY_ROWS, DecodeStep, KVCache, Layer

HEADS, KEY_HEADS, DIM, WIDTH = 4, 2, 8, 40


def decode(rows, longest, generator, sinks=None):
    """Return the attention of a step over a cache whose free cells hold large numbers, and what it must be."""
    keys, values = (torch.randn(rows, KEY_HEADS, WIDTH, DIM, generator=generator) for _ in range(2))
    query, key, value = (torch.randn(rows, h, 1, DIM, generator=generator) for h in (HEADS, KEY_HEADS, KEY_HEADS))
    positions = torch.arange(rows) % longest
    later = torch.arange(WIDTH) >= positions[:, None]
    cache = KVCache()
    cache.reserve(rows, longest)
    filled = [part.masked_fill(later[:, None, :, None], 1e4)[:, :, :longest] for part in (keys, values)]
    cache.write_prompts(0, *filled, 0)
    width = cache.attended(rows, longest)
    mask = torch.zeros(rows, width).masked_fill_(torch.arange(width) > positions[:, None], -torch.inf)
    step = DecodeStep(cache, torch.arange(rows), positions, mask[:, None, None])
    out = step.attend(Layer(0, 0.3, sinks=sinks), query, key, value)
    wanted = []
    for row, position in enumerate(positions.tolist()):
        own = (torch.cat([part[row, :, :position], new[row]], 1) for part, new in ((keys, key), (values, value)))
        k, v = (part.double().repeat_interleave(HEADS // KEY_HEADS, 0) for part in own)
        scores = torch.einsum("hqd,htd->hqt", query[row].double(), k) * 0.3
        if sinks is not None:
            scores = torch.cat([scores, sinks.double()[:, None, None]], -1)
        wanted.append(scores.softmax(-1)[..., : position + 1] @ v)
    error = attention_error(query, torch.cat([keys, key], 2), torch.cat([values, value], 2), scaling=0.3, terms=WIDTH)
    return out, torch.stack(wanted), error


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("longest", [3, WIDTH])
@pytest.mark.parametrize("rows", [1, MANY_ROWS - 1, MANY_ROWS, 3 * MANY_ROWS])
def test_a_step_equals_one_sequence_at_a_time(rows, longest, with_sinks):
    generator = torch.Generator().manual_seed(rows)
    sinks = 3 * torch.randn(HEADS, generator=generator) if with_sinks else None
    out, wanted, error = decode(rows, longest, generator, sinks)
    torch.testing.assert_close(out.double(), wanted, atol=error, rtol=0)


def test_many_rows_attend_over_whole_buffers_unless_these_are_much_wider():
    cache = KVCache()
    cache.reserve(MANY_ROWS, 100)
    whole = cache.attended(MANY_ROWS, 100)
    assert whole >= 100 and cache.attended(MANY_ROWS, whole // 2) == whole
    assert cache.attended(MANY_ROWS, 16) == 16 and cache.attended(1, 100) == 100
