"""Check all flags before Ray or torch start anything, and report every error at once.

The stages build on each other: a rule that needs a value is checked only if that value has no separate error, so one
mistake is reported once. The rules are in the files of their sections.

1. Words: each is among the choices of its flag; text is not empty. Rules see the default instead of a wrong one.
2. Flags without effect are set to their defaults, with a note on each (needs.py).
3. Sections: ranges, and rules between flags, section by section.
4. Ranks and engines: sizes divide the devices and the model.
5. Steps and loss: the trajectories of an iteration are divided into steps; flags that are alternative names are
   replaced, and what other flags imply is filled in, so that later code reads one final value.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from miles.base.flags import Errors, fault_of_text
from miles.config import rules
from miles.config.checkpoint import check_checkpoint, fill_remote_cache
from miles.config.cluster import check_cluster, check_offload
from miles.config.evaluation import check_evaluation, fill_evaluation
from miles.config.functions import check_function_paths
from miles.config.inputs import Inputs
from miles.config.lora import check_lora, notes_on_lora, readings_of_lora
from miles.config.megatron.rules import check_megatron
from miles.config.megatron.settings import MegatronArguments
from miles.config.model import check_model
from miles.config.needs import without_effect
from miles.config.notes import Note, overruled
from miles.config.optimizer import check_optimizer, notes_on_warmup
from miles.config.parallel import check_parallel, pad_recurrent_models
from miles.config.profiling import check_profiling
from miles.config.rehearsal import check_rehearsal
from miles.config.rollout import check_async, check_rollout, fill_over_sampling, notes_on_rollout
from miles.config.servers.passed_on import ServerFlags
from miles.config.servers.rules import check_engine, check_rollout_workers, fill_rollout_num_gpus, fill_server_section
from miles.config.settings import SECTIONS, Settings
from miles.config.sglang.rules import check_server_texts
from miles.config.tracking import check_tracking
from miles.config.training import check_training, fill_global_batch_size, notes_on_training
from miles.objective.aggregation import MODE_FLAGS, reconcile_aggregation
from miles.tasks.data.settings import check_data
from miles.tasks.rewards.registry import deciding_part
from miles.tasks.rewards.settings import check_reward
from miles.types.dims import ParallelDims

LARGEST_USUAL_LR = 1e-2


@dataclass(frozen=True)
class Validated:
    """Hold settings where every flag has an effect and no alternative name is left.

    Attributes:
        settings: The settings.
        readings: What was read as something else, or follows from other flags.
        surprises: Notes on settings that are allowed and may surprise.
        accepted: Flags that were accepted and have no effect themselves.
        choice: Which backend and engine were chosen, and why; empty for settings that were not read from a command.
        set_fields: The fields that the command sets.
        replaced: The flags of files that other words of the command replace.
        inputs: The findings of the check of rows and functions; None if it was not made yet.
        explains: Whether the command is to be explained, and not run.
    """

    settings: Settings
    readings: tuple[str, ...] = ()
    surprises: tuple[str, ...] = ()
    accepted: tuple[Note, ...] = ()
    choice: str = ""
    set_fields: frozenset[str] = frozenset()
    replaced: tuple[str, ...] = ()
    inputs: Inputs | None = None
    explains: bool = False

    @property
    def notes(self) -> tuple[str, ...]:
        """The facts that a user has to know before the run: the readings, and the surprises."""
        return (*self.readings, *self.surprises)


def validate(settings: Settings, set_fields: Collection[str] = ()) -> Validated:
    """Check the settings, and replace alternative names. Validated settings are valid, and stay unchanged.

    Args:
        settings: The settings.
        set_fields: The fields that a command sets (``Command.set_fields``). Their values stay, even if they equal
            the defaults.

    Raises:
        FlagError: With one message per error, each naming the flag, its value, the rule and what to do.
    """
    errors = Errors()
    settings, notes_on_flags = without_effect(_check_words(settings, errors))
    for section in SECTIONS:
        errors.declared(getattr(settings, section))
    _check_sections(settings, errors)
    settings = replace(settings, cluster=fill_rollout_num_gpus(settings))
    _check_devices(settings, errors)
    parallel, layout_notes = pad_recurrent_models(settings.parallel, settings.training, settings.model, errors)
    accepted = [*notes_on_flags]
    if settings.loss.custom_pg_loss_reducer_function_path is not None:
        reducer = "--custom-pg-loss-reducer-function-path"
        accepted += overruled(settings.loss, MODE_FLAGS, set_fields, by=reducer)
    settings, notes = _reconcile(replace(settings, parallel=parallel), set_fields, errors)
    errors.raise_if_any()
    readings = (*layout_notes, *notes, *readings_of_lora(settings.lora))
    return Validated(settings, readings, tuple(_surprises(settings)), tuple(accepted))


def _check_words(settings: Settings, errors: Errors) -> Settings:
    """Check choices and texts; return the settings with defaults instead of wrong ones: rules branch on choices."""
    check_server_texts(settings.server_flags, errors)
    if errors.messages:
        settings = replace(settings, server_flags=ServerFlags())
    for name, value in settings.megatron_overrides:
        if isinstance(value, str) and (rule := fault_of_text(value, has_lines=False)) is not None:
            errors.refuse(name, value, rule, "correct the value")
    return replace(settings, **{name: errors.words(getattr(settings, name)) for name in SECTIONS})


def _check_sections(settings: Settings, errors: Errors) -> None:
    rollout, cluster = settings.rollout, settings.cluster
    check_model(settings.model, errors)
    check_lora(settings.lora, settings.training.train_backend, settings.model, errors)
    evaluation = settings.evaluation
    has_eval_sets = evaluation.eval_prompt_data is not None or evaluation.eval_config is not None
    check_data(settings.data, rollout.loads_samples, settings.reads_conversations, has_eval_sets, errors)
    check_rollout(rollout, settings.data.rollout_max_prompt_len, not settings.reads_conversations, errors)
    if settings.reads_conversations and (settings.generates or settings.loss.loss_agg_mode is not None):
        errors.require("rollout_max_response_len", rollout.rollout_max_response_len, "maximum tokens of one response")
    if settings.data.data_source_path is not None and rollout.num_epoch is not None and rollout.num_rollout is None:
        rule = "cannot be counted in the rows of --data-source-path, which has no end"
        errors.refuse("num_epoch", rollout.num_epoch, rule, "give --num-rollout instead")
    rules.check_debug_modes(settings, errors)
    check_function_paths(settings, errors)
    check_cluster(cluster, errors)
    check_async(rollout, cluster, errors)
    rules.check_agents(settings, errors)
    check_reward(settings.reward, settings.generates, errors)
    if errors.none_about("rm_type"):
        rules.check_labels(settings, errors)
    _check_pass_rate(settings, errors)
    check_optimizer(settings.optimizer, errors)
    check_training(settings.training, errors)
    check_checkpoint(settings.checkpoint, settings.evaluation, errors)
    check_evaluation(settings.evaluation, errors)
    rules.check_images(settings, errors)
    rules.check_model_context(settings, errors)
    rules.check_stop_token_ids(settings, errors)
    rules.check_tokens_of_scorers(settings, errors)
    check_tracking(settings.tracking, errors)
    rules.check_export_folder(settings, errors)
    check_rehearsal(settings.rehearsal, rollout.rollout_max_response_len, rollout.rollout_max_context_len, errors)
    if errors.none_about("actor_num_nodes", "actor_num_gpus_per_node", "num_rollout"):
        check_profiling(settings.profiling, rollout.num_rollout, cluster.world_size, errors)


def _check_pass_rate(settings: Settings, errors: Errors) -> None:
    """Refuse to leave prompts out if the rewards do not say whether an answer is right."""
    rate = settings.rollout.max_prompt_pass_rate
    if rate is not None and errors.none_about("rm_type") and _is_undecided(settings):
        rule = f"no reward of --rm-type {settings.reward.rm_type} states whether an answer is right"
        errors.refuse("max_prompt_pass_rate", rate, rule, "add one that reads the prompt's row, such as math:1")


def _is_undecided(settings: Settings) -> bool:
    """Return whether the reward is a sum, and no part decides whether an answer passes."""
    return settings.reward.is_sum and deciding_part(settings.reward.weights) is None


def _check_devices(settings: Settings, errors: Errors) -> None:
    dims = _dims(settings, errors)
    check_megatron(settings, errors)
    max_response_len = settings.rollout.rollout_max_response_len
    check_parallel(settings.parallel, settings.training, dims, max_response_len, errors)
    check_engine(settings, errors)
    check_rollout_workers(settings, errors)
    rules.check_deterministic(settings, errors)
    rules.check_replay(settings, errors)
    check_offload(settings.cluster, errors)


def _dims(settings: Settings, errors: Errors) -> ParallelDims | None:
    """Divide the ranks by the sizes that the backend reads; None if that is not possible."""
    if not settings.backend.reads_megatron_flags:
        settings = replace(settings, megatron=MegatronArguments())
    if errors.none_about("actor_num_nodes", "actor_num_gpus_per_node"):
        with errors.catching():
            return settings.dims
    return None


def _reconcile(settings: Settings, set_fields: Collection[str], errors: Errors) -> tuple[Settings, list[str]]:
    """Check the loss, and replace implied or renamed settings by their meaning; notes name them."""
    rules.check_loss(settings, errors)
    rollout, training = settings.rollout, settings.training
    batch_notes = list[str]()
    if errors.none_about("rollout_batch_size", "n_samples_per_prompt", "global_batch_size", "num_steps_per_rollout"):
        training, batch_notes = fill_global_batch_size(training, rollout, errors)
    loss, loss_notes = reconcile_aggregation(
        settings.loss,
        rollout.rollout_max_response_len,
        training.global_batch_size,
        rollout.n_samples_per_prompt,
        errors,
        is_explicit="loss_aggregation" in set_fields,
    )
    if not errors.messages:
        loss, policy_loss_notes = rules.name_policy_loss(loss)
        loss_notes = [*policy_loss_notes, *loss_notes]
    sglang, pause_notes = fill_server_section(settings)
    filled = replace(
        settings,
        sglang=sglang,
        training=training,
        loss=loss,
        rollout=fill_over_sampling(rollout),
        evaluation=fill_evaluation(settings.evaluation, rollout, settings.data),
        checkpoint=fill_remote_cache(settings.checkpoint, settings.tracking.output_dir),
    )
    return filled, [*loss_notes, *batch_notes, *pause_notes]


def _notes_on_warmup(settings: Settings) -> Iterator[str]:
    if settings.rollout.num_rollout is None or not settings.trains:
        return
    steps = settings.rollout.num_rollout * settings.steps_per_iteration
    optimizer = settings.optimizer
    if settings.loss.type.trains_policy:
        yield from notes_on_warmup(optimizer.warmup_field, optimizer, settings.policy_steps(steps))
    if settings.loss.has_critic:
        yield from notes_on_warmup("critic_lr_warmup_iters", settings.critic_optimizer, steps)


def _surprises(settings: Settings) -> Iterator[str]:
    """Yield notes on settings that are allowed, and may surprise."""
    yield from notes_on_rollout(settings.rollout, settings.loss)
    tensor, per_node = settings.megatron.tensor_model_parallel_size, settings.cluster.actor_num_gpus_per_node
    if settings.cluster.actor_num_nodes > 1 and per_node % tensor:
        yield (
            f"--tensor-model-parallel-size {tensor} does not divide --actor-num-gpus-per-node {per_node}: some ranks "
            "that share each matrix are on two nodes, and wait for the network between them"
        )
    yield from rules.notes_on_model_context(settings)
    longest = settings.rollout.rollout_max_response_len
    if longest is not None:
        yield from notes_on_training(settings.training, settings.parallel.context_parallel_size, longest)
    yield from _notes_on_warmup(settings)
    if settings.trains and settings.optimizer.lr > LARGEST_USUAL_LR:
        yield (
            f"--lr {settings.optimizer.lr:g} is far above what trains a language model, 1e-6 to 1e-4: a few steps may "
            "spoil its weights"
        )
    if settings.training.fp32_lm_head and settings.sglang.rollout_external:
        yield "--fp32-lm-head: the engines of --rollout-external must have been started with --enable-fp32-lm-head"
    if settings.reward.log_passrate and _is_undecided(settings):
        yield (
            f"--log-passrate: no reward of --rm-type {settings.reward.rm_type} states whether an answer is right, "
            "so an answer passes if the sum is 1 or more"
        )
    yield from notes_on_lora(settings.lora, settings.model)
