"""Train on one iteration, as one rank of any backend.

    shards ── score: log-probs, values ── advantages of tokens ──> per step, for the policy and then for the critic:
        forward and backward over the micro-batches ── sums over ranks ── loss mass ── optimizer, or skip ──> metrics

The models run behind the seam of backend.py; miles/objective computes the losses of a micro-batch.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic

import numpy as np
import torch
import torch.distributed as dist

from miles.base.profiling import span
from miles.batch.collate import TokenRecorder
from miles.batch.convert import postprocessed
from miles.objective.adaptive import Coefficients
from miles.objective.aggregation import is_per_token
from miles.objective.canary import check_loss_mass
from miles.objective.chosen import build_objective
from miles.objective.kl import masked_log_ratio
from miles.objective.loss_types.base import Objective
from miles.objective.output import LossOutput, add_metrics, reported
from miles.objective.settings import LossArguments
from miles.objective.token_advantages import SampleTokens, token_advantages
from miles.objective.value_loss import value_loss_function
from miles.training.backend import LossFunction, PolicyScorer, Scorer, TrainBackend, TrainedModel, ValueScorer
from miles.training.optimizer import ScheduledOptimizer
from miles.training.scoring import TokenSelector, needs_of, score, with_engine_log_probs
from miles.types.groups import gather_step
from miles.types.metrics import Metric
from miles.types.train_batch import MicroBatch, TrainBatch, TrainShard


@dataclass(frozen=True)
class Role(Generic[Scorer]):
    """A model that learns, and the loss that it learns from."""

    model: TrainedModel[Scorer]
    optimizer: ScheduledOptimizer
    loss_function: LossFunction[Scorer]
    prefix: str = ""  # of the optimizer's metrics


def policy_role(
    model: TrainedModel[PolicyScorer], objective: Objective, recorder: TokenRecorder | None = None
) -> Role[PolicyScorer]:
    """Return the policy's role: it learns from the objective of ``--loss-type``."""

    def loss_function(micro: MicroBatch, scorer: PolicyScorer) -> LossOutput:
        output = objective.language_model_loss(micro, scorer(with_entropy=objective.needs.entropy))
        if recorder is not None and output.tokens is not None:
            recorder.take(output.tokens)
        return output

    return Role(model, model.optimizer, loss_function)


def critic_role(model: TrainedModel[ValueScorer], loss: LossArguments) -> Role[ValueScorer]:
    """Return the critic's role: it learns from the value loss, on the policy's micro-batches."""

    def loss_function(micro: MicroBatch, scorer: ValueScorer) -> LossOutput:
        return value_loss_function(loss, micro, scorer())

    return Role(model, model.optimizer, loss_function, prefix="critic_")


class Trainer:
    """One rank of the trainer. Every method is collective."""

    def __init__(
        self, backend: TrainBackend, loss: LossArguments, token_ranks: int, passes: int = 1, args: Any = None
    ) -> None:
        """Build the roles of this rank.

        Args:
            backend: This rank of the backend.
            loss: The flags of the objective.
            token_ranks: How many ranks hold a step between them.
            passes: Over the samples of each iteration (--ppo-epochs).
            args: All flags by their names, for functions of the user's.
        """
        self.backend = backend
        self.loss = loss
        self.token_ranks = token_ranks
        self.passes = passes
        self.args = args
        self.coefficients = Coefficients(loss)
        self.recorder = TokenRecorder()
        self._use(loss)
        self.critic = None if backend.critic is None else critic_role(backend.critic, loss)
        self.selector = TokenSelector(self.objective, backend.token_group)

    def _use(self, loss: LossArguments) -> None:
        """Compute with the weights of ``loss`` from now on."""
        self.objective = replace(build_objective(loss), args=self.args)
        self.policy = policy_role(self.backend.policy, self.objective, self.recorder)

    def restore_coefficients(self, state: Mapping[str, Mapping[str, float]]) -> None:
        """Continue with the weights of a checkpoint (objective/adaptive.py)."""
        self.coefficients.restore(state)
        self._use(self.coefficients.loss)

    def train(
        self, shards: Sequence[TrainShard], trains_policy: bool = True, iteration: int = 0
    ) -> list[dict[str, Metric]]:
        """Take one optimizer step per shard and pass; returns each step's metrics, with seconds under ``time/``.

        Everything that the steps read of the models' first weights is scored before the first step, and advantages are
        made, once for all passes over the shards. The policy goes before the critic, so that neither a wrong loss mass
        nor a gradient that is not finite finds the critic a step ahead. Without ``trains_policy`` only the critic
        learns. ``iteration`` is passed to the user's function of ``--rollout-data-postprocess-path``.

        Raises:
            LossMassError: before any optimizer steps, if the weights of a watched step's tokens do not add up.
            FloatingPointError: if a gradient is not finite; the weights are left as they were.
        """
        started = time.perf_counter()
        if self.loss.use_rollout_logprobs:
            shards = [with_engine_log_probs(shard) for shard in shards]
        with span("score before the first step"):
            scored = [
                score(self.backend, shard, needs_of(self.objective, step, trains_policy, self.passes))
                for step, shard in enumerate(shards)
            ]
            estimated = self._postprocessed([self._with_advantages(shard) for shard in scored], iteration)
            if self.loss.tis_batch_normalize and trains_policy:
                estimated = [self._with_mean_weight(shard, measured) for shard, measured in estimated]
        scoring = time.perf_counter() - started
        in_advantages = self.coefficients.metrics_in_advantages()  # read now: the steps below change them
        steps = []
        for step, (shard, measured) in enumerate(estimated * self.passes):
            metrics = dict(measured)
            if trains_policy:
                is_first_pass = step < len(shards)
                self.recorder.begin(step, shard if is_first_pass else None)  # later passes see the same samples
                with span("select tokens"):
                    selected, selection = self._with_selection(shard, step)
                with span(f"policy step {step}"):
                    metrics |= self._policy_step(self.policy, selected) | selection
                if self.coefficients.adapt:
                    # What was measured before the first step is followed in the first pass only.
                    new = {name: m for name, m in metrics.items() if is_first_pass or name not in measured}
                    metrics |= self._adapt(new, shard) | in_advantages
            if self.critic is not None:
                with span(f"critic step {step}"):
                    metrics |= self._critic_step(self.critic, shard)
            steps.append(metrics)
        if steps:
            steps[0]["time/log_probs"] = Metric(scoring)
        return steps

    def _adapt(self, metrics: Mapping[str, Metric], shard: TrainShard) -> dict[str, Metric]:
        """Let the weights follow a step; returns those that the step was computed with."""
        used = self.coefficients.metrics()
        self.coefficients.follow(metrics, shard.batch.num_trajectories)
        self._use(self.coefficients.loss)
        return used

    def _with_advantages(self, shard: TrainShard) -> tuple[TrainShard, dict[str, Metric]]:
        """Return the shard with advantages of tokens (and returns), if the estimator makes these on the trainer.

        Every rank gets the few numbers per token that the others have, and computes the whole step's: the samples of a
        trajectory may be on several ranks, and whitening needs all of them.
        """
        if not self.objective.estimates_by_token:
            return shard, {}
        batch, group = shard.batch, self.backend.token_group
        sent = shard.samples_sent_by(dist.get_rank(group))
        step = gather_step(
            [(batch.position_in_step[i], _sample_tokens(self.objective.flags, batch, i)) for i in sent], group
        )
        result = token_advantages(self.objective, [tokens for _, tokens in step])
        index = {position: i for i, (position, _) in enumerate(step)}
        in_step = [index[position] for position in batch.position_in_step]
        returns = None if result.returns is None else [result.returns[i] for i in in_step]
        batch = replace(batch, advantages=[result.advantages[i] for i in in_step], returns=returns)
        return replace(shard, batch=batch), _under("train/", result.metrics)

    def _postprocessed(
        self, estimated: list[tuple[TrainShard, dict[str, Metric]]], iteration: int
    ) -> list[tuple[TrainShard, dict[str, Metric]]]:
        """Return the shards as the user's function leaves them, if there is one."""
        path = self.loss.rollout_data_postprocess_path
        if path is None:
            return estimated
        has_advantages = self.loss.type.uses_advantages
        shards = postprocessed([shard for shard, _ in estimated], path, self.args, iteration, has_advantages)
        return [(shard, metrics) for shard, (_, metrics) in zip(shards, estimated, strict=True)]

    def _with_mean_weight(self, shard: TrainShard, metrics: dict[str, Metric]) -> tuple[TrainShard, dict[str, Metric]]:
        """Return the shard with the mean of the step's importance weights, and the metrics with it."""
        shard, mean = self.selector.mean_weight(shard)
        is_measured = shard.batch.num_loss_tokens > 0
        return shard, metrics | ({"train/tis_mean": Metric(mean)} if is_measured else {})

    def _with_selection(self, shard: TrainShard, step: int) -> tuple[TrainShard, dict[str, Metric]]:
        """Return the shard with the tokens that are chosen from the whole step, if any are, and the time it took."""
        if not (self.objective.selects_tokens or self.objective.ranks_entropies):
            return shard, {}
        started = time.perf_counter()
        if self.objective.selects_tokens:
            shard = self.selector.select(self.backend, shard, step)
        if self.objective.ranks_entropies:
            shard = self.selector.rank_entropies(self.backend, shard)
        return shard, {"time/token_selection": Metric(time.perf_counter() - started)}

    def _policy_step(self, policy: Role[PolicyScorer], shard: TrainShard) -> dict[str, Metric]:
        started = time.perf_counter()
        measured = self._accumulate(policy, shard)
        check_loss_mass(shard, measured, self.token_ranks)
        computed = time.perf_counter()
        metrics = _under("train/", measured) | self._update(policy, shard)
        metrics["time/forward_backward"] = Metric(computed - started)
        metrics["time/optimizer"] = Metric(time.perf_counter() - computed)
        return metrics

    def _critic_step(self, critic: Role[ValueScorer], shard: TrainShard) -> dict[str, Metric]:
        started = time.perf_counter()
        unwatched = replace(shard, expected_loss_mass=None)  # the canary is the policy's
        metrics = _under("train/", self._accumulate(critic, unwatched)) | self._update(critic, shard)
        return metrics | {"time/critic": Metric(time.perf_counter() - started)}

    def _accumulate(self, role: Role[Scorer], shard: TrainShard) -> dict[str, Metric]:
        """Accumulate the step's gradient; returns the metrics of the whole step, the same on every rank."""
        results = role.model.forward_backward(shard, role.loss_function)
        totals: dict[str, torch.Tensor] = {}
        for of_micro_batch in results.metrics:
            add_metrics(totals, of_micro_batch)
        sums = {name: totals[name] for name in sorted(totals)}
        mass = role.model.take_loss_mass()
        with span("sum metrics over ranks"):
            reduced = self.backend.sum_over_ranks(sums if mass is None else sums | {"loss_mass": mass})
        loss_mass = reduced.pop("loss_mass", 0.0)  # no gradient: no token's loss has reached the canary
        metrics = reported(reduced, shard.batch, is_per_token(self.loss))
        if shard.expected_loss_mass is not None:
            metrics["loss_mass"] = Metric(loss_mass)
        return metrics | results.inside_model

    def _update(self, role: Role[Scorer], shard: TrainShard) -> dict[str, Metric]:
        """Let the optimizer step, unless the step has no loss token."""
        with span("optimizer"):
            metrics = role.optimizer.step() if shard.batch.num_loss_tokens else role.optimizer.skip()
        return _under(f"train/{role.prefix}", metrics)


def _under(prefix: str, metrics: dict[str, Metric]) -> dict[str, Metric]:
    return {f"{prefix}{name}": metric for name, metric in metrics.items()}


def _sample_tokens(loss: LossArguments, batch: TrainBatch, i: int) -> SampleTokens:
    """Return what phase 2 of the advantages reads of a sample."""
    return SampleTokens(
        batch.trajectory_ids[i],
        batch.rewards[i],
        batch.loss_masks[i],
        None if batch.values is None else batch.values[i],
        _log_ratio(batch, batch.ref_log_probs, i) if loss.kl_coef else None,
        _log_ratio(batch, batch.teacher_log_probs, i) if loss.use_opd else None,
        batch.group_indices[i],
        _score_norm(batch, i),
    )


def _score_norm(batch: TrainBatch, i: int) -> np.ndarray | None:
    """Return ``1 - 2 p + sum_v p(v)^2`` of each response token, float64, if the sum was scored.

    It is ``(1 - p)^2`` and the squares of the other probabilities, whose sum is between 0 and ``(1 - p)^2``. Near p = 1
    rounding of the scores is larger than that and may make it negative, so it is held to these bounds.
    """
    if batch.sum_squared_probs is None:
        return None
    assert batch.old_log_probs is not None, "both are scored before"
    p = np.exp(batch.old_log_probs[i].astype(np.float64))
    rest = np.square(1.0 - p)
    norm: np.ndarray = np.clip(1.0 - 2.0 * p + batch.sum_squared_probs[i].astype(np.float64), rest, 2.0 * rest)
    return norm


def _log_ratio(batch: TrainBatch, other: list[np.ndarray] | None, i: int) -> np.ndarray:
    """Return the policy's log-probs less another model's, of the response of sample ``i``; masked tokens have 0."""
    assert batch.old_log_probs is not None and other is not None, "both are scored before"
    columns = (batch.old_log_probs[i], other[i], batch.loss_masks[i])
    policy, model, mask = (torch.tensor(column) for column in columns)  # copies: Ray's memory is read-only
    return masked_log_ratio(policy, model, mask).numpy()
