"""Scores that precede the first step of an iteration: log-probs of the models, and the critic's values."""

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from transformers import PretrainedConfig

from miles.batch.collate import split_by_sample
from miles.objective.kl import masked_log_ratio
from miles.objective.loss_types.base import Objective
from miles.objective.policy_losses.base import StepTokens
from miles.objective.registry import Needs
from miles.objective.token_weights import WeightSum, mean_weight, sum_of_weights, top_entropy_tokens
from miles.training.backend import PolicyScorer, ScoredModel, Scorer, TrainBackend, ValueScorer
from miles.types.groups import gather_step
from miles.types.train_batch import MicroBatch, TrainBatch, TrainShard


def needs_of(objective: Objective, step: int, trains_policy: bool, passes: int = 1) -> Needs:
    """Return what must be scored for optimizer step ``step`` (from 0) of an iteration.

    Log-probs under the weights that the iteration began with are needed from the second step on; in the first they are
    the current ones, unless a part of the objective asks for them or a later pass takes the step again. The inputs of
    the advantages are scored for every step, also if only the critic learns.
    """
    loss, advantages = objective.needs, objective.advantages_need
    return Needs(
        old_log_probs=(trains_policy and (step > 0 or passes > 1 or loss.old_log_probs)) or advantages.old_log_probs,
        ref_log_probs=(trains_policy and loss.ref_log_probs) or advantages.ref_log_probs,
        teacher_log_probs=advantages.teacher_log_probs,
        values=advantages.values,
        sum_squared_probs=advantages.sum_squared_probs,
    )


def with_engine_log_probs(shard: TrainShard) -> TrainShard:
    """Return ``shard`` with the engine's log-probs as the old ones, for ``--use-rollout-logprobs``."""
    return replace(shard, batch=replace(shard.batch, old_log_probs=shard.batch.rollout_log_probs))


def score(backend: TrainBackend, shard: TrainShard, needs: Needs) -> TrainShard:
    """Return ``shard`` with the columns that ``needs`` names. Those that are there already are kept. Collective."""
    batch = shard.batch
    if needs.ref_log_probs and batch.ref_log_probs is None:
        assert backend.reference is not None, "reference log-probs need --use-kl-loss or --kl-coef"
        batch = replace(batch, ref_log_probs=log_probs(backend, backend.reference, shard))
    if needs.teacher_log_probs and batch.teacher_log_probs is None:
        assert backend.teacher is not None, "a teacher in the trainer, or a column of its servers' log-probs"
        batch = replace(batch, teacher_log_probs=log_probs(backend, backend.teacher, shard))
    if needs.old_log_probs and batch.old_log_probs is None:
        batch = replace(batch, old_log_probs=log_probs(backend, backend.policy, shard))
    if needs.sum_squared_probs and batch.sum_squared_probs is None:
        assert batch.old_log_probs is not None, "who needs the sum needs the log-probs"
        batch = replace(batch, sum_squared_probs=sum_squared_probs(backend, backend.policy, shard, batch.old_log_probs))
    if needs.values and batch.values is None:
        assert backend.critic is not None, "values need a critic"
        batch = replace(batch, values=values(backend, backend.critic, shard))
    return replace(shard, batch=batch)


def log_probs(backend: TrainBackend, model: ScoredModel[PolicyScorer], shard: TrainShard) -> list[np.ndarray]:
    """Return the log-probs of each sample's response tokens, float32 [response], on every rank."""
    return _by_sample(backend, model, shard, lambda scorer: scorer(with_entropy=False).log_probs)


def sum_squared_probs(
    backend: TrainBackend, model: ScoredModel[PolicyScorer], shard: TrainShard, log_probs: list[np.ndarray]
) -> list[np.ndarray]:
    """Return the sum over the vocabulary of squared probabilities at each response token, float64 [response].

    ``log_probs`` are the model's log-probs, so that no logits are needed: with logits z, their log-sum-exp L(z) and q
    the probabilities at half the temperature, ``log p = z - L(z)`` and ``log q = 2 z - L(2 z)`` of any token, and the
    sum is ``exp(L(2 z) - 2 L(z)) = p^2 / q``.
    """
    sharper = _by_sample(backend, model, shard, lambda scorer: scorer(with_entropy=False, sharpness=2.0).log_probs)
    pairs = zip(log_probs, sharper, strict=True)
    return [np.exp(2.0 * p.astype(np.float64) - q) for p, q in pairs]


def entropies(backend: TrainBackend, model: ScoredModel[PolicyScorer], shard: TrainShard) -> list[np.ndarray]:
    """Return the entropy of the policy at each response token, in nats, float32 [response], on every rank."""

    def read(scorer: PolicyScorer) -> torch.Tensor:
        entropy = scorer(with_entropy=True).entropy
        assert entropy is not None, "it was asked for"
        return entropy

    return _by_sample(backend, model, shard, read)


def values(backend: TrainBackend, model: ScoredModel[ValueScorer], shard: TrainShard) -> list[np.ndarray]:
    """Return the value of the state where each response token is chosen, float32 [response], on every rank."""
    return _by_sample(backend, model, shard, lambda scorer: scorer())


def _by_sample(
    backend: TrainBackend, model: ScoredModel[Scorer], shard: TrainShard, read: Callable[[Scorer], torch.Tensor]
) -> list[np.ndarray]:
    """Return one array per sample, in the order of the shard, whichever micro-batch and ranks it is on."""
    plans = (*shard.micro_batches, *shard.score_only)

    def read_pair(micro: MicroBatch, scorer: Scorer) -> tuple[MicroBatch, torch.Tensor]:
        return micro, read(scorer)

    scored = model.forward(shard, plans, read_pair)
    of_sample: dict[int, np.ndarray] = {}
    for plan, (micro, column) in zip(plans, scored, strict=bool(scored)):  # empty on all pipeline stages but the last
        of_sample |= zip(plan.samples, split_by_sample(column, micro), strict=True)
    return backend.from_last_stage([of_sample[i] for i in sorted(of_sample)], shard.batch.response_lengths)


# Read a whole step before it is taken: tokens that the objective treats apart, and the mean of the weights.


class _Sample(NamedTuple):
    """A sample of the step; columns are of its loss tokens, float64."""

    position: int  # in the step
    trajectory_id: int
    columns: list[np.ndarray]


@dataclass(frozen=True)
class TokenSelector:
    """Scores the policy before a step, and reads the tokens of the whole step. Every method is collective.

    Attributes:
        objective: The run's objective.
        group: The ranks that hold the step's tokens between them, in the order of its shards; None is all ranks.
    """

    objective: Objective
    group: dist.ProcessGroup | None = None

    def select(self, backend: TrainBackend, shard: TrainShard, step: int) -> TrainShard:
        """Return ``shard`` with the column ``selected``, which the policy loss chooses.

        In the first step of an iteration the current log-probs are the old ones, unless those are the engine's. If the
        old ones were not scored, because the loss does not ask for them in that step, nothing is chosen.

        Args:
            backend: This rank's backend.
            shard: This rank's part of the step.
            step: The step's index in its iteration, from 0.
        """
        batch = shard.batch
        old = batch.old_log_probs
        if old is None:
            assert step == 0, "later steps have old log-probs"
            return shard
        is_current = step == 0 and not self.objective.flags.use_rollout_logprobs
        current = old if is_current else log_probs(backend, backend.policy, shard)
        advantages: Sequence[np.ndarray] | None = batch.advantages
        if advantages is None:
            advantages = [np.full(n, reward) for n, reward in zip(batch.response_lengths, batch.rewards, strict=True)]
        samples = self._whole_step(shard, current, old, advantages, _hashes(shard.batch, with_token=True))
        seed = zlib.crc32(np.asarray([step, *(s.trajectory_id for s in samples)], np.int64).tobytes())
        tokens = StepTokens(_scores_of_step(samples), _of_step(samples, 1), _of_step(samples, 2), seed)
        chosen = self.objective.policy_loss.select_tokens(self.objective.flags, tokens)
        return replace(shard, batch=replace(batch, selected=_own_part(shard, samples, chosen)))

    def rank_entropies(self, backend: TrainBackend, shard: TrainShard) -> TrainShard:
        """Return ``shard`` with the column ``top_entropy``: the tokens of ``--top-entropy-quantile``."""
        columns = entropies(backend, backend.policy, shard)
        samples = self._whole_step(shard, columns, _hashes(shard.batch, with_token=False))
        chosen = top_entropy_tokens(_scores_of_step(samples), self.objective.flags.top_entropy_quantile)
        return replace(shard, batch=replace(shard.batch, top_entropy=_own_part(shard, samples, chosen)))

    def mean_weight(self, shard: TrainShard) -> tuple[TrainShard, float]:
        """Return ``shard`` with ``tis_mean``, the mean weight of ``--use-tis`` over the step, and that mean.

        The sums are of one sample each, and exact, so no way of splitting the step changes a bit of it.
        """
        batch, flags = shard.batch, self.objective.flags
        assert batch.old_log_probs is not None, "Truncation asks for them"
        sums: list[tuple[int, WeightSum]] = []
        for i in shard.samples_sent_by(dist.get_rank(self.group)):
            columns = (batch.old_log_probs[i], batch.rollout_log_probs[i], batch.loss_masks[i])
            old, engine, mask = (torch.tensor(column) for column in columns)  # copies: Ray's memory is read-only
            log_ratio = masked_log_ratio(old, engine, mask)[mask != 0]
            sums.append((batch.position_in_step[i], sum_of_weights(flags, log_ratio)))
        mean = mean_weight(weight_sum for _, weight_sum in gather_step(sums, self.group))
        return replace(shard, batch=replace(batch, tis_mean=mean)), mean

    def _whole_step(self, shard: TrainShard, *columns: Sequence[np.ndarray]) -> list[_Sample]:
        """Return all samples of the step in their order, with ``columns``, one array [response] per own sample."""
        batch = shard.batch
        samples = []
        for i in shard.samples_sent_by(dist.get_rank(self.group)):
            mask = batch.loss_masks[i] != 0
            arrays = [column[i][mask].astype(np.float64) for column in columns]
            samples.append(_Sample(batch.position_in_step[i], batch.trajectory_ids[i], arrays))
        return gather_step(samples, self.group)


def _of_step(samples: Sequence[_Sample], column: int) -> np.ndarray:
    """Return one column of all samples, float64 [loss tokens of the step]."""
    return np.concatenate([*(sample.columns[column] for sample in samples), np.zeros(0)])


def _hashes(batch: TrainBatch, with_token: bool) -> list[np.ndarray]:
    """Return a hash of all that is before each response token, with the token itself if asked; [response]."""
    columns = []
    for tokens, length in zip(batch.tokens, batch.response_lengths, strict=True):
        powers = np.cumprod(np.full(len(tokens), 0x9E3779B97F4A7C15, np.uint64))  # modulo 2^64
        hashes = np.cumsum((np.asarray(tokens).astype(np.uint64) + np.uint64(1)) * powers)
        end = len(tokens) if with_token else len(tokens) - 1
        columns.append(hashes[end - length : end])
    return columns


def _scores_of_step(samples: Sequence[_Sample]) -> np.ndarray:
    """Return the first column, with one score for all tokens of one hash, the last column.

    They are one number of the model, as at the first tokens of the responses to one prompt. In bf16 they may differ by
    more than their last digits, by the micro-batch that each was scored in.
    """
    _, first, place = np.unique(_of_step(samples, -1), return_index=True, return_inverse=True)
    scores: np.ndarray = _of_step(samples, 0)[first][place]
    return scores


def _own_part(shard: TrainShard, samples: Sequence[_Sample], chosen: np.ndarray) -> list[np.ndarray]:
    """Return ``chosen``, bool [loss tokens of the step], as a 0/1 column of the shard's own samples."""
    ends = np.cumsum([len(sample.columns[0]) for sample in samples])[:-1]
    of_sample = dict(zip((sample.position for sample in samples), np.split(chosen, ends), strict=bool(samples)))
    columns = []
    for position, mask in zip(shard.batch.position_in_step, shard.batch.loss_masks, strict=True):
        column = np.zeros(len(mask), np.float32)
        column[mask != 0] = of_sample[position]
        columns.append(column)
    return columns


# Let the reference follow the policy: ``--ref-update-interval N`` and ``--ref-mixup-alpha``.
#
# After every N-th iteration the weights of the reference become::
#
#     ref <- alpha policy + (1 - alpha) ref
#
# (Gorbatovski et al., "Learn Your Reference Model for Real Good Alignment", arXiv 2404.09656: with alpha 1 its hard
# update, below 1 its soft one. TRL's ``sync_ref_model`` has the same formula, with ``ref_model_mixup_alpha`` and
# ``ref_model_sync_steps``, which counts optimizer steps.) The policy's weights are those that it computes with. With
# alpha below 1, ref stays in fp32: in bf16, a change of less than 1/256 of a weight would be lost each time.


def names_of_state(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters, tied ones once, and the buffers that checkpoints have."""
    yield from model.named_parameters()
    saved = model.state_dict().keys()
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in saved)


def check_can_follow(
    reference: Mapping[str, torch.Tensor], policy: Mapping[str, torch.Tensor], path: str | None
) -> None:
    """Check that reference and policy have the same weights.

    Positions are not weights: a reference keeps its own rotary embedding, so one with another is refused by its config
    (``check_same_positions``).

    Raises:
        ValueError: The model at ``path`` has others.
    """
    for name in (*reference, *policy):
        shapes = [tuple(model[name].shape) if name in model else "none" for model in (reference, policy)]
        if shapes[0] != shapes[1]:
            raise ValueError(
                f"--ref-load {path}: its {name} has the shape {shapes[0]}, and the policy's {shapes[1]}, so the "
                "reference cannot follow the policy; give a model of the policy's shape, or drop --ref-update-interval"
            )


def check_same_positions(reference: PretrainedConfig, policy: PretrainedConfig, path: str | None) -> None:
    """Check that both models encode positions alike.

    Raises:
        ValueError: The model at ``path`` has another rotary embedding, which gives the policy's weights another
            meaning.
    """
    actual, wanted = (getattr(config.get_text_config(), "rope_parameters", None) for config in (reference, policy))
    if actual != wanted:
        raise ValueError(
            f"--ref-load {path}: its rope_parameters are {actual}, and the policy's {wanted}, so the reference cannot "
            "follow the policy; give a model with the policy's, or drop --ref-update-interval"
        )


@torch.no_grad()
def follow(reference: Mapping[str, torch.Tensor], policy: Mapping[str, torch.Tensor], alpha: float) -> None:
    """Set every weight of ``reference`` to ``alpha policy + (1 - alpha) reference``, in place and in its own dtype.

    Args:
        reference: Weights by name, this rank's parts.
        policy: The policy's weights as it computes with them, with these names and maybe more, in the same parts.
        alpha: The part of the policy, in (0, 1].
    """
    for name, weight in reference.items():
        new = policy[name].detach()
        if alpha == 1 or not weight.is_floating_point():
            weight.copy_(new)
        else:
            weight.lerp_(new.to(weight.dtype), alpha)
