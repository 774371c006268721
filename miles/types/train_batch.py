"""The trainer's input: the columns of one optimizer step, its shards, and the micro-batch of one forward pass."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

    from miles.types.groups import ContextGroup
    from miles.types.images import ImageTensors, MicroImages
    from miles.types.replay import TokenSets
    from miles.types.support import Support

_STEP_WIDE = ("num_trajectories", "num_loss_tokens", "expected_loss_mass", "tis_mean")


@dataclass(frozen=True)
class TrainBatch:
    """One optimizer step as columns with one entry per sample; a shard of it (``select``) has the same type.

    The three step-wide numbers describe the **whole** step on every shard. They are computed before the batch is
    split, so no split can change a denominator (docs/loss-aggregation.md). ``tis_mean`` is the whole step's too; it
    reads the trainer's log-probs, so the ranks compute it together.

    Worked example (two prompts, two trajectories each, response lengths 2, 6 | 4, 8, nothing masked)::

        num_trajectories N = 4, prompt groups P = 2, num_loss_tokens T = 20
        trajectory_token_counts = [2, 6, 4, 8]
        sample_denoms        = [2, 6, 4, 8]          under sample_mean
                             = [4, 4, 6, 6]          under prompt_mean: M_g * P / N = 8 * 2/4, 12 * 2/4
                             = [5, 5, 5, 5]          under token_mean:  T / N
                             = [L, L, L, L]          under constant
    """

    tokens: list[np.ndarray]  # int64 [prompt + response]
    response_lengths: list[int]
    loss_masks: list[np.ndarray]  # float32 0/1 [response]
    rollout_log_probs: list[np.ndarray]  # float32 [response], the engine's
    rewards: list[float]  # what phase 2 of the advantages reads: normalized within the group if the estimator does that
    sample_denoms: list[float]  # of pg_loss: 1/N sum_i S_i / sample_denoms[i]
    trajectory_token_counts: list[float]  # max(M_r, 1) of the sample's trajectory: denominators of the sample mean
    group_indices: list[int]
    trajectory_ids: list[int]
    position_in_step: list[int]  # index of the sample in the whole step; a trajectory's samples are in their order

    num_trajectories: int  # N
    num_loss_tokens: int  # T
    expected_loss_mass: float  # sum of the weights of all tokens in pg_loss

    tis_mean: float | None = None  # divides the weights of --use-tis, with --tis-batch-normalize

    old_log_probs: list[np.ndarray] | None = None  # float32 [response], by the trainer before the first step; the
    # engine's with --use-rollout-logprobs
    ref_log_probs: list[np.ndarray] | None = None  # float32 [response], by the reference model
    teacher_log_probs: list[np.ndarray] | None = None  # float32 [response], by the teacher that is distilled
    sum_squared_probs: list[np.ndarray] | None = None  # float64 [response], over the vocabulary, with old_log_probs
    values: list[np.ndarray] | None = None  # float32 [response], by the critic before the iteration's first step
    advantages: list[np.ndarray] | None = None  # float32 [response]; None: every token has its sample's reward
    returns: list[np.ndarray] | None = None  # float32 [response], the critic's targets
    selected: list[np.ndarray] | None = None  # float32 0/1 [response], tokens that the policy loss treats apart
    top_entropy: list[np.ndarray] | None = None  # float32 0/1 [response], tokens of --top-entropy-quantile
    supports: list[TokenSets] | None = None  # [response], what truncated sampling drew each token from
    experts: list[np.ndarray] | None = None  # [positions, layers, k], the engine's choices, from the first token on
    images: list[ImageTensors | None] | None = None  # of the prompt: one object for all samples of a group

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def total_lengths(self) -> list[int]:
        """The number of prompt and response tokens of each sample."""
        return [len(t) for t in self.tokens]

    def select(self, indices: Sequence[int]) -> TrainBatch:
        """Return the shard with these samples, in this order; step-wide numbers still describe the whole step."""
        columns: dict[str, Any] = {name: list(map(column.__getitem__, indices)) for name, column in self._columns()}
        return replace(self, **columns)

    def divide(self, parts: Sequence[Sequence[int]]) -> list[TrainBatch]:
        """Return ``select`` of each of ``parts``, sooner if they are many: samples are visited in their own order.

        Neighbors in a column are neighbors in memory, and neighbors in a part are not: of a million samples each visit
        would wait for the memory.
        """
        sizes = [len(part) for part in parts]
        samples = np.fromiter(chain.from_iterable(parts), np.int64, sum(sizes))
        order = np.argsort(samples, kind="stable")
        samples = samples[order]
        part_of = np.repeat(np.arange(len(parts)), sizes)[order].tolist()
        starts = np.cumsum([0, *sizes])[:-1]
        place = (np.arange(len(order)) - np.repeat(starts, sizes))[order].tolist()
        is_all = len(samples) == len(self) and bool((samples == np.arange(len(samples))).all())
        columns: list[dict[str, Any]] = [{} for _ in parts]
        for name, column in self._columns():
            lists: list[list[Any]] = [[None] * size for size in sizes]
            values = column if is_all else map(column.__getitem__, samples.tolist())
            # One call per sample, none of them in Python: a loop takes twice as long.
            deque(map(list.__setitem__, map(lists.__getitem__, part_of), place, values), maxlen=0)
            for of_part, entries in zip(columns, lists, strict=True):
                of_part[name] = entries
        return [replace(self, **of_part) for of_part in columns]

    def _columns(self) -> Iterator[tuple[str, Sequence[Any]]]:
        """Yield the columns that are there, with their names."""
        for f in fields(self):
            column = getattr(self, f.name)
            if f.name not in _STEP_WIDE and column is not None:
                yield f.name, column


@dataclass(frozen=True)
class MicroBatchPlan:
    """The samples of a micro-batch, how many consecutive ranks share it, and whether it is padded or packed."""

    samples: tuple[int, ...]  # indices into the shard's batch
    context_parallel_size: int = 1
    padded: bool = False


@dataclass(frozen=True)
class TrainShard:
    """One rank's part of a step: its samples, and how they are grouped into micro-batches.

    ``micro_batches`` are trained on. ``score_only`` holds the samples whose loss has no gradient (advantage 0, and no
    KL or entropy term): they are scored for the metrics without a backward pass.

    Every rank has the same number of both; an entry may be empty (a rank with fewer samples takes part in every
    collective and contributes zero). Ranks that share a micro-batch have the same samples in it.
    """

    batch: TrainBatch
    micro_batches: Sequence[MicroBatchPlan]
    score_only: Sequence[MicroBatchPlan] = ()
    expected_loss_mass: float | None = None  # of the whole step, if the canary watches (objective/canary.py)
    recorded: frozenset[int] = frozenset()  # positions in the step of samples whose tokens are recorded for the report

    def samples_sent_by(self, token_rank: int) -> Iterator[int]:
        """Yield the samples that ``token_rank``, whose shard this is, sends to the other ranks: each is sent once.

        Of the consecutive ranks that share a micro-batch, the first sends its samples.
        """
        for plan in (*self.micro_batches, *self.score_only):
            if token_rank % plan.context_parallel_size == 0:
                yield from plan.samples


@dataclass(frozen=True)
class TokenColumns:
    """Columns of a sample's tokens that the policy loss read, float32 [response] each (batch/collate.py).

    Attributes:
        advantages: The advantages that the loss used, after phase 2.
        log_probs: The trainer's, under the weights that the iteration began with; with ``--use-rollout-logprobs`` under
            the weights of the step.
        ratios: Current policy over the one that the iteration began with; over the engine with that flag.
        token_weights: The factor of the token's loss by all corrections.
    """

    advantages: np.ndarray
    log_probs: np.ndarray
    ratios: np.ndarray
    token_weights: np.ndarray


@dataclass(frozen=True)
class SharedLogits:
    """The tokens whose logits the response tokens read, each once: ``U`` rows for ``R`` response tokens.

    The rows of a chunk are read by consecutive ``readers``, whose places are on the host, so that no chunk waits for
    the device.

    Attributes:
        tokens: The token of each row, int64 [U], into the micro-batch.
        row: The row that each response token reads, int64 [R].
        readers: The response tokens in the order of their rows, int64 [R].
        ends: Row u is read by ``readers[ends[u]:ends[u + 1]]``; host int64 [U + 1].
    """

    tokens: torch.Tensor
    row: torch.Tensor
    readers: torch.Tensor
    ends: np.ndarray


@dataclass(frozen=True)
class MicroBatch:
    """The samples of one forward/backward pass, packed or padded, as tensors on the training device.

    ``token_index`` alone is in host memory: layouts are computed from it, while a GPU is still at the last micro-batch.

    ``S`` samples, ``T`` tokens, ``R`` response tokens. If packed, tokens that several samples begin with appear once.
    The last token of a response predicts nothing and is left out. ``token_index`` gives, sample by sample, the position
    of each remaining token in the packed axis, which is padded to a multiple of 8. The response axis is flat too:
    ``sample_index[r]`` names the sample of response token ``r``, and the logits at ``logit_index[r]`` predict it.

    Two samples of the prompt ``a b``, with responses ``c`` and ``d e``::

        input_ids    = [a b d 0 0 …]  token_index  = [0 1 | 0 1 2]        read_lengths  = (2, 3)
        logit_index  = [1, 1, 2]      targets      = [c, d, e]            sample_index  = [0, 1, 1]

    Under context parallelism (``context.size`` above 1) ``T`` and ``R`` are this rank's share: the zig-zag chunks of
    every sample, padded (types/parallel.py), and the response tokens that their logits predict. Everything
    on the response axis is sliced alike; ``response_index`` gives each token's position in the whole responses. Every
    response token is on exactly one rank. ``token_index`` then points into the packed axes of all ranks end to end.

    If ``padded``, every sample is a row, padded at its end to the longest, and ``T`` counts the cells of all rows, row
    by row. The two samples above::

        input_ids    = [a b c 0 | a b d e]    token_index  = [0 1 2 | 4 5 6 7]    logit_index  = [1, 5, 6]
    """

    input_ids: torch.Tensor  # int64 [T]
    position_ids: torch.Tensor  # int64 [T], from 0 in each sample
    token_index: torch.Tensor  # int64 [sum of read_lengths, padded for the context], into input_ids; on the host
    logit_index: torch.Tensor  # int64 [R]
    targets: torch.Tensor  # int64 [R]
    sample_index: torch.Tensor  # int64 [R]
    response_index: torch.Tensor  # int64 [R], into the concatenated whole responses, [sum of response_lengths]
    loss_mask: torch.Tensor  # float32 [R]
    advantages: torch.Tensor  # float32 [R]
    rollout_log_probs: torch.Tensor  # float32 [R]
    old_log_probs: torch.Tensor | None  # float32 [R]; None: the current log-probs, detached (first step on-policy)
    ref_log_probs: torch.Tensor | None  # float32 [R]
    sample_denoms: torch.Tensor  # float32 [S]
    trajectory_token_counts: torch.Tensor  # float32 [S]
    response_lengths: tuple[int, ...]  # S entries, of whole responses
    total_lengths: tuple[int, ...]  # S entries, of whole samples, without padding
    read_lengths: tuple[int, ...]  # S entries, of the parts that the model reads, without padding
    num_trajectories: int  # N of the whole step
    num_loss_tokens: int  # T of the whole step
    context: ContextGroup  # the ranks that share these samples
    values: torch.Tensor | None = None  # float32 [R], the critic's before the iteration's first step
    returns: torch.Tensor | None = None  # float32 [R], the critic's targets
    selected: torch.Tensor | None = None  # float32 0/1 [R], tokens that the policy loss treats apart
    top_entropy: torch.Tensor | None = None  # float32 0/1 [R], tokens of --top-entropy-quantile
    tis_mean: float | None = None  # of the whole step: the weights of --use-tis are divided by it
    support: Support | None = None  # of R tokens: the softmax of every log-prob and entropy is over these sets
    experts: torch.Tensor | None = None  # int16 [T, layers, k], given to the policy's routers; -1: own choice
    shared_logits: SharedLogits | None = None  # if several response tokens read the logits of one token
    images: MicroImages | None = None
    padded: bool = False
    positions: tuple[int, ...] = ()  # S entries, of the samples in the whole step

    @property
    def rows(self) -> int:
        """The number of equally long sequences that the T tokens form: one if packed, else one per sample."""
        return len(self.total_lengths) if self.padded else 1
