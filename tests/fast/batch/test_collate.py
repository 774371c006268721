"""Packing against a loop over samples and tokens."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from miles.batch.collate import TOKEN_MULTIPLE, collate, split_by_sample

CPU = torch.device("cpu")
LENGTHS = st.lists(st.tuples(st.integers(1, 6), st.integers(0, 8)), min_size=1, max_size=8)


@st.composite
def choices(draw):
    lengths = draw(LENGTHS)
    return lengths, draw(st.lists(st.sampled_from(range(len(lengths))), unique=True, min_size=1))


@given(choices(), st.sampled_from([2, 1000]), st.booleans())
def test_layout_is_that_of_a_loop(make_batch, choice, vocabulary, reads_last):
    lengths, indices = choice
    batch = make_batch(lengths)
    batch = replace(batch, tokens=[tokens % vocabulary for tokens in batch.tokens])
    micro = collate(batch, indices, CPU, reads_last=reads_last)
    ids, positions, logit_index, targets, sample_index, prefixes = [], [], [], [], [], set()
    for s, i in enumerate(indices):
        prompt, start = lengths[i][0], len(ids)
        for t, token in enumerate(batch.tokens[i].tolist()):
            if t < prompt or t + 1 < sum(lengths[i]) or reads_last:  # the last token of a response predicts nothing
                ids.append(token)
                positions.append(t)
                prefixes.add(tuple(batch.tokens[i][: t + 1].tolist()))
            if t >= prompt:
                logit_index.append(start + t - 1)
                targets.append(token)
                sample_index.append(s)
        assert micro.read_lengths[s] == len(ids) - start and micro.total_lengths[s] == sum(lengths[i])
    index = micro.token_index
    assert micro.input_ids[index].tolist() == ids and micro.position_ids[index].tolist() == positions
    assert micro.logit_index.tolist() == index[logit_index].tolist() and micro.targets.tolist() == targets
    assert index.unique().tolist() == list(range(len(prefixes))), "equal prefixes are kept once"
    assert len(micro.input_ids) % TOKEN_MULTIPLE == 0 and 0 <= len(micro.input_ids) - len(prefixes) < TOKEN_MULTIPLE
    if micro.shared_logits is None:
        assert len(micro.logit_index.unique()) == len(targets)
    else:
        assert torch.equal(micro.shared_logits.tokens[micro.shared_logits.row], micro.logit_index)
        assert torch.equal(micro.shared_logits.tokens, micro.logit_index.unique())
    assert micro.sample_index.tolist() == sample_index


def test_tokens_with_other_experts_are_not_shared(make_batch):
    """They have other hidden states, and so have all tokens after them."""
    batch = make_batch([(3, 2)] * 3)
    experts = np.zeros((3, 4, 2, 1), np.int16)  # [samples, positions, layers, k]; none for the last token
    experts[1, 2, 1] = 1
    batch = replace(batch, tokens=[batch.tokens[0]] * 3, experts=list(experts))
    micro = collate(batch, range(3), CPU)
    assert micro.token_index.tolist() == [0, 1, 2, 3, 0, 1, 4, 5, 0, 1, 2, 3]
    token_experts = micro.experts[micro.token_index].numpy().reshape(3, 4, 2, 1)
    assert np.array_equal(token_experts, experts) and (micro.experts[6:] == -1).all(), "padding has none"
    micro = collate(batch, range(3), CPU, reads_last=True)
    assert micro.token_index.tolist() == [0, 1, 2, 3, 4, 0, 1, 5, 6, 7, 0, 1, 2, 3, 4]
    token_experts = micro.experts[micro.token_index].numpy().reshape(3, 5, 2, 1)
    assert np.array_equal(token_experts[:, :4], experts) and (token_experts[:, 4] == -1).all()


@given(choices(), st.integers(1, 5))
def test_rows_are_the_samples_padded_at_the_end(make_batch, choice, multiple):
    lengths, indices = choice
    batch = make_batch(lengths)
    micro = collate(batch, indices, CPU, row_multiple=multiple)
    rows = micro.input_ids.view(micro.rows, -1)
    width = rows.shape[1]
    longest = max(batch.total_lengths[i] for i in indices)
    assert len(rows) == len(indices) and width % multiple == 0 and longest <= width < longest + multiple
    for row, i in zip(rows, indices, strict=True):
        total = batch.total_lengths[i]
        assert row[:total].tolist() == batch.tokens[i].tolist() and not row[total:].any()
    assert micro.position_ids.view(micro.rows, -1).tolist() == [list(range(width))] * len(indices)
    packed = collate(batch, indices, CPU, share_prefixes=False)
    assert torch.equal(micro.input_ids[micro.token_index], packed.input_ids)
    assert torch.equal(micro.logit_index, micro.token_index[packed.logit_index])
    for name in ("targets", "sample_index", "response_index", "loss_mask", "advantages"):
        assert torch.equal(getattr(micro, name), getattr(packed, name)), name


@given(choices())
def test_columns_follow_their_samples(make_batch, choice):
    lengths, indices = choice
    batch = make_batch(lengths)
    micro = collate(batch, indices, CPU)
    for name, column in (
        ("loss_mask", batch.loss_masks),
        ("rollout_log_probs", batch.rollout_log_probs),
        ("old_log_probs", batch.old_log_probs),
        ("ref_log_probs", batch.ref_log_probs),
        ("values", batch.values),
        ("returns", batch.returns),
    ):
        parts = split_by_sample(getattr(micro, name), micro)
        assert all(np.array_equal(part, column[i]) for part, i in zip(parts, indices, strict=True)), name
    assert micro.advantages.tolist() == [i + 0.5 for i in indices for _ in range(lengths[i][1])]
    assert micro.sample_denoms.tolist() == [i + 2.0 for i in indices]
    assert micro.trajectory_token_counts.tolist() == [i + 3.0 for i in indices]
    assert (micro.num_trajectories, micro.num_loss_tokens) == (91, 93)


@given(choices())
def test_advantages_by_token_replace_rewards(make_batch, choice):
    lengths, indices = choice
    batch = make_batch(lengths, advantages=True)
    micro = collate(batch, indices, CPU)
    parts = split_by_sample(micro.advantages, micro)
    assert all(np.array_equal(part, batch.advantages[i]) for part, i in zip(parts, indices, strict=True))


def test_no_samples_are_one_token_and_no_response(make_batch):
    for batch in (make_batch([(2, 3)]), make_batch([]), make_batch([(2, 3)], scored=False)):
        micro = collate(batch, [], CPU)
        assert micro.input_ids.shape == (TOKEN_MULTIPLE,) and micro.token_index.tolist() == [0]
        assert micro.total_lengths == micro.read_lengths == (1,)
        assert micro.response_lengths == () and split_by_sample(micro.loss_mask, micro) == []
        for name in ("logit_index", "targets", "sample_index", "loss_mask", "advantages", "sample_denoms"):
            assert getattr(micro, name).shape == (0,), name
        assert micro.logit_index.dtype == micro.targets.dtype == torch.int64
        assert (micro.num_trajectories, micro.num_loss_tokens) == (91, 93)
        padded = collate(batch, [], CPU, row_multiple=4)
        assert padded.rows == 1 and padded.input_ids.shape == (4,) and padded.logit_index.shape == (0,)


def test_without_scores_there_are_none(make_batch):
    micro = collate(make_batch([(2, 3)], scored=False), [0], CPU)
    assert micro.old_log_probs is None and micro.ref_log_probs is None
    assert micro.values is None and micro.returns is None


@given(choices())
def test_select_keeps_the_numbers_of_the_step(make_batch, choice):
    lengths, indices = choice
    batch = make_batch(lengths)
    part = batch.select(indices)
    assert part.trajectory_ids == [100 + i for i in indices]
    assert all(np.array_equal(a, batch.tokens[i]) for a, i in zip(part.tokens, indices, strict=True))
    assert (part.num_trajectories, part.num_loss_tokens, part.expected_loss_mass) == (91, 93, 0.94)
    assert part.select([]).num_trajectories == 91 and len(part.select([])) == 0


@given(choices(), st.data())
def test_a_step_is_divided_as_it_is_selected(make_batch, choice, data):
    lengths, indices = choice
    batch = make_batch(lengths)
    parts = data.draw(st.one_of(st.just([indices]), st.lists(st.permutations(range(len(lengths))), max_size=3)))
    cut = data.draw(st.integers(0, len(lengths)))
    for wanted in (parts, [[], *parts, indices], [range(cut), range(cut, len(lengths))]):
        for sub_batch, part in zip(batch.divide(wanted), wanted, strict=True):
            expected = batch.select(part)
            for name, column in vars(expected).items():
                own = getattr(sub_batch, name)
                if isinstance(column, list):
                    assert len(own) == len(column) and all(a is b for a, b in zip(own, column, strict=True)), name
                else:
                    assert own == column, name
