"""The layout of a micro-batch: from its samples to the tensors that the model and the loss read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from miles.objective.estimators.base import spread_over_tokens
from miles.objective.output import TokenValues
from miles.objective.sequences import whole_responses
from miles.types.groups import ALONE, ContextGroup
from miles.types.parallel import gathered_index, zigzag_positions
from miles.types.replay import TokenSets, at_tokens
from miles.types.support import Support
from miles.types.train_batch import MicroBatch, SharedLogits, TokenColumns, TrainBatch, TrainShard

if TYPE_CHECKING:
    from miles.types.images import ImageTensors, MicroImages

# Of a packed micro-batch on one rank. oneDNN's product of 779 rows takes 10 % longer than one of 784; tensor cores
# work on 8 rows at once, too.
TOKEN_MULTIPLE = 8

# fp32 [response] each.
_OPTIONAL = ("advantages", "old_log_probs", "ref_log_probs", "values", "returns", "selected", "top_entropy")


def collate(
    batch: TrainBatch,
    samples: Sequence[int],
    device: torch.device,
    context: ContextGroup = ALONE,
    share_prefixes: bool = True,
    row_multiple: int | None = None,
    reads_last: bool = False,
) -> MicroBatch:
    """Return the micro-batch of ``samples``, or this rank's part of it if ``context`` shares them.

    Args:
        batch: The shard that holds the samples.
        samples: Indices into ``batch``. If there are none, the micro-batch has no response: it adds zero.
        device: The device of the tensors.
        context: The ranks that share the samples. If there are several, each sample is padded and cut among them.
        share_prefixes: Whether a rank on its own keeps one copy of tokens that several samples begin with.
        row_multiple: If given, each sample is a row, padded to the longest, rounded up to a multiple of this.
        reads_last: Whether the last token of a response is read, which predicts nothing. Without ``share_prefixes``, in
            rows, and by ranks that share the samples it always is.
    """
    part = batch.select(samples)
    if row_multiple is not None:
        layout = _in_rows(part, context, row_multiple)
    else:
        layout = _shared(part, reads_last) if share_prefixes and context.size == 1 else _packed(part, context)

    def tensor(values: object, dtype: type) -> torch.Tensor:
        return to_device(np.asarray(values, dtype), device)

    return MicroBatch(
        input_ids=tensor(layout.input_ids, np.int64),
        position_ids=tensor(layout.position_ids, np.int64),
        token_index=torch.from_numpy(layout.token_index),
        logit_index=tensor(layout.logit_index, np.int64),
        targets=tensor(layout.targets, np.int64),
        sample_index=tensor(layout.sample_index, np.int64),
        response_index=tensor(layout.response_index, np.int64),
        sample_denoms=tensor(part.sample_denoms, np.float32),
        trajectory_token_counts=tensor(part.trajectory_token_counts, np.float32),
        response_lengths=tuple(part.response_lengths),
        total_lengths=tuple(part.total_lengths or [1]),
        read_lengths=tuple(layout.read_lengths.tolist()),
        num_trajectories=part.num_trajectories,
        num_loss_tokens=part.num_loss_tokens,
        context=context,
        tis_mean=part.tis_mean,
        **_response_columns(part, layout, device),
        support=Support.of(TokenSets.joined(part.supports).take(layout.response_index), device)
        if part.supports
        else None,
        experts=tensor(at_tokens(part.experts, layout.token_sample, layout.position_ids), np.int16)
        if part.experts
        else None,
        shared_logits=_shared_logits(part, layout, device),
        images=_images(part, layout, device) if part.images and any(part.images) else None,
        padded=row_multiple is not None,
        positions=tuple(part.position_in_step),
    )


def _response_columns(part: TrainBatch, layout: _Layout, device: torch.device) -> dict[str, Any]:
    """Return the columns with a number per response token, fp32 [R], by name."""

    def column(parts: list[np.ndarray]) -> torch.Tensor:
        whole = np.concatenate(parts) if parts else np.zeros(0, np.float32)
        return to_device(np.asarray(whole[layout.response_index], np.float32), device)

    optional = {name: getattr(part, name) for name in _OPTIONAL}  # None: not given
    columns = {name: None if parts is None else column(parts) for name, parts in optional.items()}
    columns |= {"loss_mask": column(part.loss_masks), "rollout_log_probs": column(part.rollout_log_probs)}
    if columns["advantages"] is None:
        rewards = to_device(np.asarray(part.rewards, np.float32), device)
        columns["advantages"] = spread_over_tokens(rewards, to_device(layout.sample_index, device))
    return columns


def _shared_logits(part: TrainBatch, layout: _Layout, device: torch.device) -> SharedLogits | None:
    """Return the rows of logits that are read; None if each has one reader.

    With supports, which may differ, each response token has its own logits.
    """
    tokens, row, counts = np.unique(layout.logit_index, return_inverse=True, return_counts=True)
    if part.supports or len(tokens) == len(row):
        return None
    return SharedLogits(
        to_device(tokens, device),
        to_device(row, device),
        to_device(np.argsort(row, kind="stable"), device),
        np.cumsum([0, *counts]),
    )


def _images(part: TrainBatch, layout: _Layout, device: torch.device) -> MicroImages:
    from miles.types.images import MicroImages  # a step of text reads none of it

    assert part.images is not None
    totals = np.asarray(part.total_lengths, np.int64)
    starts = _starts(totals)
    first: dict[ImageTensors, int] = {}  # of each prompt's images: the first of their rows of features
    feature = np.full(totals.sum(), -1, np.int64)
    axes = np.concatenate([np.tile(np.arange(total), (3, 1)) for total in totals], axis=1)
    for start, tokens, images in zip(starts.tolist(), part.tokens, part.images, strict=True):
        if images is None:
            continue
        row = first.setdefault(images, sum(sum(other.counts) for other in first))
        feature[start + images.places(tokens)] = row + np.arange(sum(images.counts))
        positions = images.positions(tokens)
        if positions is not None:
            axes[:, start : start + len(tokens)] = positions
    sample, position = layout.token_sample, layout.position_ids
    inside = (sample >= 0) & (position < totals[sample])
    token = np.where(inside, starts[sample] + position, 0)
    has_axes = any(images.grids is not None for images in first)
    return MicroImages(
        tuple(first),
        to_device(np.where(inside, feature[token], -1), device),
        to_device(np.where(inside, axes[:, token], position), device) if has_axes else None,
    )


def to_device(values: np.ndarray, device: torch.device) -> torch.Tensor:
    """Return ``values`` as a tensor on ``device``, without waiting for the work that a GPU still has to do.

    A copy from ordinary memory waits for all of that work. A copy from page-locked memory is queued behind it, and
    PyTorch keeps that memory until it is done.
    """
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


@dataclass(frozen=True)
class _Layout:
    """The columns of ``MicroBatch`` with the same names, int64, and the sample of each token."""

    read_lengths: np.ndarray
    input_ids: np.ndarray
    position_ids: np.ndarray
    token_index: np.ndarray
    logit_index: np.ndarray
    targets: np.ndarray
    sample_index: np.ndarray
    response_index: np.ndarray
    token_sample: np.ndarray  # the sample of each token, int64 [T]; -1 for padding


def _packed(part: TrainBatch, context: ContextGroup) -> _Layout:
    assert all(total > response for total, response in zip(part.total_lengths, part.response_lengths, strict=True)), (
        "a sample needs a prompt token, whose logits predict its first response token"
    )
    # Without samples there is one token of padding, so that the model has something to compute.
    tokens = np.concatenate(part.tokens) if len(part) else np.zeros(1, np.int64)
    totals = np.asarray(part.total_lengths or [1], np.int64)
    responses = np.asarray(part.response_lengths or [0], np.int64)
    starts, response_starts = _starts(totals), _starts(responses)
    prompts = totals - responses

    of_samples = [zigzag_positions(int(total), context.size, context.rank) for total in totals]
    position = np.concatenate(of_samples)
    sample = np.repeat(np.arange(len(totals)), [len(positions) for positions in of_samples])
    inside = position < totals[sample]
    # The logits at a position predict the next token: the rank that holds the position has the loss of that token.
    predicting = np.flatnonzero((position >= prompts[sample] - 1) & (position < totals[sample] - 1))
    owner, target = sample[predicting], position[predicting] + 1
    return _Layout(
        read_lengths=totals,
        input_ids=np.where(inside, tokens[starts[sample] + np.minimum(position, totals[sample] - 1)], 0),
        position_ids=position,
        token_index=gathered_index(totals.tolist(), context.size),
        logit_index=predicting,
        targets=tokens[starts[owner] + target],
        sample_index=owner,
        response_index=response_starts[owner] + target - prompts[owner],
        token_sample=sample,
    )


def _shared(part: TrainBatch, reads_last: bool) -> _Layout:
    """Keep tokens that samples begin with once, leave out the last ones, and pad to ``TOKEN_MULTIPLE``."""
    packed = _packed(part, ALONE)
    responses = np.asarray(part.response_lengths or [0], np.int64)
    read = packed.read_lengths if reads_last else packed.read_lengths - (responses > 0)
    is_read = packed.position_ids < read[packed.token_sample]
    token_index, unique = _share_prefixes(part, read)
    unique = np.flatnonzero(is_read)[unique]
    place = np.cumsum(is_read) - 1  # of each token among those that are read
    padding = -len(unique) % TOKEN_MULTIPLE
    return replace(
        packed,
        read_lengths=read,
        input_ids=np.pad(packed.input_ids[unique], (0, padding)),
        position_ids=np.pad(packed.position_ids[unique], (0, padding)),
        token_index=token_index,
        logit_index=token_index[place[packed.logit_index]],
        token_sample=np.pad(packed.token_sample[unique], (0, padding), constant_values=-1),
    )


def _in_rows(part: TrainBatch, context: ContextGroup, multiple: int) -> _Layout:
    """Lay samples out as rows. The positions of a row continue into its padding, as rotary embedding has them."""
    assert context.size == 1, "validate() refuses padded rows if ranks share a sequence"
    packed = _packed(part, context)
    totals = np.asarray(part.total_lengths or [1], np.int64)
    width = -(-int(totals.max()) // multiple) * multiple
    cells = np.repeat(np.arange(len(totals)), totals) * width + packed.position_ids
    input_ids = np.zeros(len(totals) * width, np.int64)
    input_ids[cells] = packed.input_ids
    token_sample = np.full(len(totals) * width, -1, np.int64)
    token_sample[cells] = packed.token_sample
    return replace(
        packed,
        input_ids=input_ids,
        token_sample=token_sample,
        position_ids=np.tile(np.arange(width), len(totals)),
        token_index=cells,
        logit_index=cells[packed.logit_index],
    )


def _starts(lengths: np.ndarray) -> np.ndarray:
    starts: np.ndarray = np.cumsum(lengths) - lengths
    return starts


def _share_prefixes(part: TrainBatch, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return where each token is if equal prefixes are kept once, and which tokens are kept: int64 [all], [kept].

    Of each sample, the first ``lengths`` tokens count. The hidden state of a token depends on it and on those before
    it, so samples that begin alike have the same ones. In the order of their tokens, a sample shares its longest prefix
    with a neighbor. Prefixes for which the engine chose other experts are not equal.
    """
    if not len(part):
        return np.zeros(1, np.int64), np.zeros(1, np.int64)
    keys = []
    for i, (tokens, length) in enumerate(zip(part.tokens, lengths.tolist(), strict=True)):
        experts = part.experts[i] if part.experts else None
        images = id(part.images[i]) if part.images else None
        keys.append(_key_of(tokens[:length], experts, images))
    starts = _starts(lengths)
    copy_of = np.arange(lengths.sum())
    order = sorted(range(len(part)), key=lambda number: keys[number].tobytes())
    for before, number in pairwise(order):
        shared = _common_prefix(keys[before], keys[number])
        copy_of[starts[number] : starts[number] + shared] = copy_of[starts[before] : starts[before] + shared]
    unique = np.flatnonzero(copy_of == np.arange(len(copy_of)))
    return np.searchsorted(unique, copy_of), unique


def _key_of(tokens: np.ndarray, experts: np.ndarray | None, images: int | None) -> np.ndarray:
    """Return the bytes of each token, its images and its experts, uint8 [tokens, width]; they sort as token ids do.

    ``images`` is a number for the images of each prompt.

    The engine chooses no experts for the last token of a response.
    """
    key = tokens.astype(">i8").view(np.uint8).reshape(len(tokens), 8)
    if images is not None:  # equal placeholders of other images are other tokens
        key = np.concatenate([key, np.full((len(tokens), 1), images).view(np.uint8)], axis=1)
    if experts is None:
        return key
    chosen = np.full((len(tokens), *experts.shape[1:]), -1, np.int16)
    chosen[: len(experts)] = experts[: len(tokens)]
    return np.concatenate([key, chosen.view(np.uint8).reshape(len(tokens), -1)], axis=1)


def _common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """Return how many rows ``a`` and ``b`` have in common from the first on."""
    length = min(len(a), len(b))
    differs = (a[:length] != b[:length]).any(1)
    return int(differs.argmax()) if differs.any() else length


def split_by_sample(values: torch.Tensor, micro: MicroBatch) -> list[np.ndarray]:
    """Return a flat response vector [R] as one float32 array per sample, of the whole response, equal on every rank."""
    parts = torch.split(whole_responses(values.detach().float(), micro).cpu(), list(micro.response_lengths))
    return [part.numpy() for part in parts]


# Record the values of each token that the loss reads, for a few samples, for the report.
#
# The rollout side chooses the samples (``TrainShard.recorded``). Their columns are copied on the device while the loss
# is computed, and moved to the host after all steps of the iteration, so that no step waits for that.


class TokenRecorder:
    """Receives the values of every micro-batch of a policy step, and keeps the values of the chosen samples."""

    def __init__(self) -> None:
        self._step = 0
        self._wanted: frozenset[int] = frozenset()
        self._records: dict[tuple[int, int], list[torch.Tensor]] = {}  # columns on the device, fp32 [response]

    def begin(self, step: int, shard: TrainShard | None) -> None:
        """Begin a step, counted from 0 within the iteration. None: nothing of it is recorded."""
        self._step = step
        self._wanted = frozenset() if shard is None else shard.recorded

    def take(self, values: TokenValues) -> None:
        """Keep the columns of the chosen samples of a micro-batch. Collective among the ranks that share it."""
        micro = values.micro
        chosen = [i for i, position in enumerate(micro.positions) if position in self._wanted]
        if not chosen:
            return
        columns = (micro.advantages, values.log_probs, values.log_ratios, values.token_weights)
        wholes = [whole_responses(column.detach().float(), micro) for column in columns]
        if micro.context.rank:
            return
        ends = list(accumulate(micro.response_lengths))
        for i in chosen:
            place = slice(ends[i] - micro.response_lengths[i], ends[i])
            self._records[self._step, micro.positions[i]] = [whole[place].clone() for whole in wholes]

    def read(self) -> dict[tuple[int, int], TokenColumns]:
        """Return what was kept since the last call, by step in the iteration and position in the step."""
        records, self._records = self._records, {}
        return {key: _on_host(columns) for key, columns in records.items()}


def _on_host(columns: list[torch.Tensor]) -> TokenColumns:
    advantages, log_probs, log_ratios, token_weights = (column.cpu().numpy() for column in columns)
    return TokenColumns(advantages, log_probs, np.exp(np.minimum(log_ratios, 40.0)), token_weights)
