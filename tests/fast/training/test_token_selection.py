"""Tokens that a step treats apart are the same in every layout, though scores differ by the micro-batch."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.objective.chosen import build_objective
from miles.objective.settings import LossArguments
from miles.training.scoring import TokenSelector

PROMPTS, ANSWERS, VOCABULARY = 2, 6, 5


def chosen(flags, scores, tokens, noise, size, monkeypatch):
    """The chosen tokens of answers whose scores depend on their context, off by ``noise`` of each micro-batch."""
    prompt = 3
    lengths = [len(row) - prompt for row in tokens]
    batch = SimpleNamespace(
        tokens=[np.array(row) for row in tokens],
        response_lengths=lengths,
        loss_masks=[np.ones(n, np.float32) for n in lengths],
        position_in_step=list(range(len(tokens))),
        trajectory_ids=list(range(len(tokens))),
        old_log_probs=[np.zeros(n, np.float32) for n in lengths],
        advantages=[np.full(n, number % 2, np.float32) for number, n in enumerate(lengths)],
        rewards=[],
    )

    of_context = dict[tuple[int, ...], float]()
    first = prompt if "top_entropy_quantile" in flags else prompt + 1  # a log-prob is of the token as well

    def score(backend, model, shard):
        return [
            np.array(
                [of_context.setdefault(tuple(row[: first + t]), scores[len(of_context)]) for t in range(lengths[i])]
            )
            + noise[i // size]
            for i, row in enumerate(tokens)
        ]

    monkeypatch.setattr("miles.training.scoring.entropies", score)
    monkeypatch.setattr("miles.training.scoring.log_probs", score)
    monkeypatch.setattr("miles.training.scoring.gather_step", lambda own, group: own)
    monkeypatch.setattr("miles.training.scoring.dist.get_rank", lambda group: 0)
    monkeypatch.setattr("miles.training.scoring.replace", lambda thing, **given: SimpleNamespace(**vars(thing) | given))
    shard = SimpleNamespace(batch=batch, samples_sent_by=lambda rank: range(len(tokens)))
    objective = build_objective(LossArguments(**flags))
    selector, backend = TokenSelector(objective), SimpleNamespace(policy=None)
    if objective.ranks_entropies:
        columns = selector.rank_entropies(backend, shard).batch.top_entropy
    else:
        columns = selector.select(backend, shard, step=1).batch.selected
    return [column.tolist() for column in columns]


@pytest.mark.parametrize(
    "flags",
    [
        dict(top_entropy_quantile=0.3),
        dict(top_entropy_quantile=0.8),
        dict(policy_loss="kl_cov", kl_cov_fraction=0.3),
        dict(policy_loss="clip_cov", clip_cov_fraction=0.3, clip_cov_min=0.0, eps_clip=0.9),
    ],
)
@given(seed=st.integers(0, 2**31))
def test_equal_contexts_are_chosen_alike_in_every_layout(flags, seed):
    """As in bf16: the first tokens of the answers to one prompt are scored apart in two micro-batches."""
    rng = np.random.default_rng(seed)
    tokens = [
        [prompt] * 3 + rng.integers(0, VOCABULARY, rng.integers(1, 9)).tolist()
        for prompt in range(PROMPTS)
        for _ in range(ANSWERS)
    ]
    scores = rng.permutation(200).astype(float)  # far apart
    selections = []
    with pytest.MonkeyPatch.context() as patch:
        for size in (1, 3, 12):
            noise = rng.uniform(-1e-4, 1e-4, 12)
            selections.append(chosen(flags, scores, tokens, noise, size, patch))
    assert selections[0] == selections[1] == selections[2]
