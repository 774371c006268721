"""Compare the decode attention of CPU servers with one sequence at once in float64."""

import pytest
import torch
from tolerance import attention_error

from miles.engine.sglang.cpu.batched_decode import batched_decode

SLOTS, HEADS, KEY_HEADS, DIM = 64, 4, 2, 8


def one_by_one(query, keys, values, slots, lengths, scaling):
    rows = []
    for row, length in enumerate(lengths.tolist()):
        present = (cache[slots[row, :length]].double() for cache in (keys, values))
        k, v = (cache.repeat_interleave(HEADS // KEY_HEADS, 1) for cache in present)
        weights = torch.softmax(torch.einsum("hd,thd->ht", query[row].double(), k) * scaling, -1)
        rows.append(torch.einsum("ht,thd->hd", weights, v))
    return torch.stack(rows)


@pytest.mark.parametrize("lengths", [[5, 9, 1, 7], [3]])
def test_equals_one_sequence_at_a_time(lengths):
    torch.manual_seed(0)
    lengths = torch.tensor(lengths)
    query, output = torch.randn(len(lengths), HEADS, DIM), torch.empty(len(lengths), HEADS, DIM)
    keys, values = torch.randn(SLOTS, KEY_HEADS, DIM), torch.randn(SLOTS, KEY_HEADS, DIM)
    keys[0] = values[0] = 1e4  # the slot that padding reads
    table = torch.randint(1, SLOTS, (6, 16), dtype=torch.int32)
    pool = torch.randperm(6)[: len(lengths)]
    decode = batched_decode(lambda *_: pytest.fail("these fit in a batch"))
    decode(None, query, output, keys, values, table, pool, lengths, scaling=0.3, enable_gqa=True)
    expected = one_by_one(query, keys, values, table[pool].long(), lengths, 0.3)
    error = attention_error(query, keys[1:], values[1:], scaling=0.3, terms=int(lengths.max()))
    torch.testing.assert_close(output.double(), expected, atol=error, rtol=0)


@pytest.mark.parametrize("options", [{"sliding_window_size": 4}, {"is_cross_attn": True}, {"lengths": [1] * 15 + [16]}])
def test_unsupported_cases_use_the_loop(options):
    lengths = torch.tensor(options.pop("lengths", [3, 4]))
    reached = []
    batched_decode(lambda *arguments: reached.append(arguments))(
        "backend", *[torch.zeros(1)] * 4, None, None, lengths, scaling=0.3, **options
    )
    assert len(reached) == 1 and reached[0][0] == "backend" and reached[0][7] is lengths
