"""The rules across sections, checked once, before Ray or torch start anything."""

from __future__ import annotations

from dataclasses import dataclass, replace

from miles.arguments import section_rules as rules
from miles.arguments.batch_rules import reconcile_batch
from miles.arguments.megatron.rules import check_megatron
from miles.arguments.offload_rules import check_offload
from miles.arguments.parallel_rules import check_parallel
from miles.arguments.settings import Settings
from miles.arguments.sglang.rules import check_engines
from miles.arguments.streaming_rules import check_streaming
from miles.objective.aggregation_flags import reconcile_aggregation
from miles.objective.loss_rules import check_loss
from miles.objective.settings import LossArguments


@dataclass(frozen=True)
class Validated:
    """Settings in which every flag has an effect and no alias is left; ``notes`` say what was read as what."""

    settings: Settings
    notes: tuple[str, ...]


def validate(settings: Settings) -> Validated:
    """Check and reconcile. Idempotent: validated settings are valid, and stay as they are.

    Raises ``ValueError`` for the first broken rule, naming the flag, its value, the rule and the way out.
    """
    loads_samples = settings.rollout.load_debug_rollout_data is not None

    rules.check_model(settings.model)
    rules.check_data(settings.data, loads_samples)
    rules.check_sampling(settings.rollout)
    rules.check_rollout(settings.rollout, settings.data.rollout_max_prompt_len)
    check_streaming(settings)
    check_loss(settings)
    rules.check_reward(settings.reward, needed=settings.generates)
    rules.check_cluster(settings.cluster)
    check_megatron(settings)
    assert settings.rollout.rollout_max_response_len is not None, "check_sampling() demands it"
    check_parallel(settings.parallel, settings.training, settings.dims, settings.rollout.rollout_max_response_len)
    check_engines(settings)
    check_offload(settings)
    rules.check_optimizer(settings.optimizer)
    rules.check_checkpoint(settings.checkpoint)
    rules.check_evaluation(settings.evaluation)
    rules.check_tracking(settings.tracking)

    training, batch_notes = reconcile_batch(settings)
    assert training.global_batch_size is not None
    assert settings.rollout.rollout_max_response_len is not None
    loss, loss_notes = reconcile_aggregation(
        settings.loss,
        max_response_len=settings.rollout.rollout_max_response_len,
        trajectories_per_step=training.global_batch_size,
        samples_per_prompt=settings.rollout.n_samples_per_prompt,
    )
    reconciled = replace(settings, training=training, loss=loss)
    return Validated(reconciled, (*loss_notes, *batch_notes, *remarks(reconciled)))


def remarks(settings: Settings) -> list[str]:
    """What is allowed, and worth knowing."""
    rollout, training, cluster = settings.rollout, settings.training, settings.cluster
    said = []
    if (
        rollout.rollout_temperature == 0
        and settings.loss.loss_type == "policy_loss"
        and settings.loss.normalizes_rewards
    ):
        said.append(
            "--rollout-temperature 0 samples greedily: the responses of a group are equal, so their advantages are 0; "
            "log-probs are those of the raw logits"
        )
    if cluster.colocate and cluster.rollout_num_gpus is not None:
        said.append(f"--rollout-num-gpus {cluster.rollout_num_gpus} has no effect with --colocate")
    if rollout.async_steps and settings.loss.loss_type == "policy_loss" and not settings.loss.use_tis:
        said.append(
            f"--async-steps {rollout.async_steps}: samples are by weights of up to so many versions before; --use-tis "
            "corrects for that, by the log-probs that the engine recorded"
        )
    budget, response = training.max_tokens_per_gpu, rollout.rollout_max_response_len
    if budget is not None and response is not None and budget * settings.parallel.context_parallel_size < response:
        said.append(
            f"--max-tokens-per-gpu {budget} is less than --rollout-max-response-len {response}: "
            "a longer sample gets a micro-batch of its own"
        )
    if settings.loss.kl_loss_type != LossArguments.kl_loss_type and not settings.loss.needs_reference:
        said.append(f"--kl-loss-type {settings.loss.kl_loss_type} has no effect without --use-kl-loss or --kl-coef")
    return said
