"""Settings that change nothing in a run, because another setting that they need is missing or takes precedence.

The validator refuses them. Related launchers ignore them, so scripts contain them: here they are set to their default,
and a note says so. ``--strict-flags`` refuses them again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path

from miles.base.flags import changed
from miles.config.abilities import has_servers, reads_megatron_flags
from miles.config.cluster import OFFLOAD_FLAGS
from miles.config.evaluation import OF_SETS
from miles.config.model import readable_config
from miles.config.notes import MEMORY, NO_EFFECT, OTHER_PART, READ_AS, REPORTING, SAME, Note, note_on
from miles.config.parallel import same_budget
from miles.config.rollout import names_iteration
from miles.config.rules.modes import NOTHING_IS_GENERATED, NOTHING_IS_TRAINED, OF_GENERATION, OF_TRAINING
from miles.config.settings import Settings
from miles.config.sglang.flags import SglangArguments
from miles.config.suggest import environment_strings, is_object, set_name
from miles.models.packing import why_not_shared
from miles.objective.chosen import find_objective
from miles.objective.distillation import TEACHER_FLAGS
from miles.objective.estimators import ESTIMATORS
from miles.objective.estimators.base import Estimator
from miles.tasks.rewards.settings import CUSTOM


@dataclass(frozen=True)
class Idle:
    """Say when some fields of a section change nothing.

    Attributes:
        section: The section, a field of ``Settings``.
        names: Its fields.
        applies: Whether they change nothing in this run.
        why: Why not.
        heading: The heading of the note.
    """

    section: str
    names: tuple[str, ...]
    applies: Callable[[Settings], bool]
    why: str
    heading: str = NO_EFFECT


EVALUATION = (
    "custom_eval_rollout_log_function_path",
    "eval_interval",
    "skip_eval_before_train",
    "n_samples_per_eval_prompt",
    "eval_temperature",
    "eval_top_p",
    "eval_top_k",
    "eval_min_p",
    "eval_max_response_len",
    "eval_input_key",
    "eval_label_key",
)
WANDB = (
    "wandb_project",
    "wandb_group",
    "wandb_team",
    "disable_wandb_random_suffix",
    "wandb_run_id",
    "wandb_key",
    "wandb_host",
    "wandb_mode",
    "wandb_dir",
)
_WEIGHT_FILES = ("update_weight_transfer_mode", "update_weight_disk_dir", "update_weight_copy_dir")
OF_ADAPTER = ("lora_alpha", "lora_dropout", "target_modules", "exclude_modules")
OF_OFFLOAD = ("optimizer_cpu_offload", "optimizer_offload_fraction", "overlap_cpu_optimizer_d2h_h2d")
_SHARES_NOTHING = "the trainer and the engines have their own devices, or no SGLang server is started"


def _stops_early(s: Settings) -> bool:
    return s.rollout.partial_rollout or s.rollout.over_sampling_early_stop


def _needs_whole_sequences(s: Settings) -> bool:
    """Return whether FSDP's layers of this model need whole sequences; false if its config is not here."""
    if reads_megatron_flags(s) or s.parallel.context_parallel_size == 1:
        return False
    config = readable_config(s.model)
    return config is not None and why_not_shared(config) is not None


def _leaves(estimator: Estimator, name: str) -> bool:
    """Return whether an estimator leaves a flag of others unread, and names none to give instead."""
    return name not in estimator.reads and name not in estimator.instead


def _is_unread(name: str, s: Settings) -> bool:
    """Return whether the estimator of this run leaves a flag of others unread."""
    return s.loss.type.uses_advantages and _leaves(find_objective(s.loss).estimator, name)


def _readers(name: str) -> str:
    *others, last = ESTIMATORS.readers(name)
    return f"{', '.join(others)} or {last}" if others else last


def _has_no_template(s: Settings) -> bool:
    return not s.data.apply_chat_template and not s.reads_conversations


def _shares(s: Settings) -> bool:
    starts_servers = has_servers(s) and not s.sglang.rollout_external and s.generates
    return s.cluster.colocate and starts_servers


# In this order: a rule sees what the rules before it have left.
IDLE = (
    *(
        Idle(section, names, lambda s: s.rollout.debug_rollout_only, NOTHING_IS_TRAINED)
        for section, names in OF_TRAINING.items()
    ),
    Idle("evaluation", OF_GENERATION, lambda s: s.rollout.debug_train_only, NOTHING_IS_GENERATED),
    Idle(
        "rollout",
        ("async_steps",),
        lambda s: s.is_given_samples,
        "this run reads what it trains on, and generates nothing",
    ),
    Idle(
        "reward",
        ("rm_type", "custom_rm_path"),
        lambda s: s.reads_conversations and not s.evaluation.has_sets,
        "conversations are trained on as they are",
    ),
    Idle("loss", ("kl_loss_coef",), lambda s: not s.loss.use_kl_loss, "without --use-kl-loss"),
    Idle("loss", ("kl_loss_type",), lambda s: not s.loss.needs_reference, "without --use-kl-loss or --kl-coef"),
    Idle(
        "model",
        ("ref_load",),
        lambda s: not s.loss.needs_reference,
        "no reference is read without --use-kl-loss or --kl-coef; initial weights are those of --hf-checkpoint",
    ),
    Idle(
        "reward",
        ("rm_type",),
        lambda s: s.reward.custom_rm_path is not None and not s.reward.names(CUSTOM),
        "--custom-rm-path is the reward",
    ),
    Idle("reward", ("rm_url",), lambda s: not s.reward.names("remote_rm"), "without --rm-type remote_rm"),
    Idle("model", ("ref_update_interval",), lambda s: not s.loss.needs_reference, "no reference is read"),
    *(
        Idle("loss", (name,), partial(_is_unread, name), f"read by --advantage-estimator {_readers(name)}")
        for name in ESTIMATORS.reads
        if any(_leaves(estimator, name) for estimator in ESTIMATORS.values())
    ),
    Idle("loss", ("use_unbiased_kl",), lambda s: not s.loss.adds_kl, "no KL is part of the loss"),
    Idle("loss", ("opsm_delta",), lambda s: not s.loss.use_opsm, "without --use-opsm"),
    Idle(
        "critic",
        ("critic_lr", "critic_lr_warmup_iters", "num_critic_only_steps"),
        lambda s: not s.loss.has_critic,
        "--advantage-estimator has no critic",
    ),
    Idle("loss", ("opd_kl_coef", *TEACHER_FLAGS), lambda s: not s.loss.use_opd, "without --use-opd"),
    Idle("model", ("opd_teacher_load",), lambda s: not s.loss.use_opd, "without --use-opd"),
    Idle("lora", OF_ADAPTER, lambda s: s.lora.lora_rank == 0, "without --lora-rank"),
    Idle(
        "training",
        ("max_tokens_per_gpu",),
        lambda s: not s.training.use_dynamic_batch_size,
        "without --use-dynamic-batch-size",
    ),
    Idle(
        "training",
        ("micro_batch_size",),
        lambda s: s.training.use_dynamic_batch_size,
        "--use-dynamic-batch-size fills micro-batches by tokens",
    ),
    Idle(
        "training",
        ("use_dynamic_batch_size", "max_tokens_per_gpu"),
        lambda s: same_budget(s.parallel, s.training),
        "--dynamic-context-parallel fills micro-batches by tokens, up to --max-seqlen-per-dp-cp-rank on each rank",
        SAME,
    ),
    Idle(
        "training",
        ("global_batch_size",),
        lambda s: s.training.use_dynamic_global_batch_size,
        "--use-dynamic-global-batch-size takes one step over all trajectories of an iteration",
    ),
    Idle("rollout", ("num_epoch",), lambda s: s.rollout.num_rollout is not None, "beside --num-rollout"),
    Idle(
        "rollout",
        ("over_sampling_batch_size",),
        lambda s: s.rollout.dynamic_sampling_filter_path is None and not _stops_early(s),
        "no filter drops groups, so no further prompts are submitted",
    ),
    Idle(
        "rollout",
        ("buffer_filter_path",),
        lambda s: not (s.rollout.partial_rollout or s.rollout.fully_async),
        "without --partial-rollout or --fully-async no group waits for a later iteration",
    ),
    Idle(
        "rollout",
        ("mask_offpolicy_in_partial_rollout",),
        lambda s: not s.rollout.partial_rollout,
        "without --partial-rollout",
    ),
    Idle("evaluation", EVALUATION, lambda s: not s.evaluation.has_sets, "without an evaluation set"),
    Idle(
        "evaluation",
        (*OF_SETS, *EVALUATION),
        lambda s: s.evaluation.eval_interval is None,
        "nothing is evaluated without --eval-interval",
    ),
    Idle(
        "evaluation",
        ("eval_prompt_data",),
        lambda s: s.evaluation.eval_config is not None,
        "--eval-config lists the sets",
    ),
    Idle(
        "checkpoint", ("save_interval", "save_retain_interval"), lambda s: s.checkpoint.save is None, "without --save"
    ),
    Idle(
        "checkpoint",
        ("finetune", "no_load_optim", "no_load_rng"),
        lambda s: s.checkpoint.load is None,
        "without --load",
    ),
    Idle("tracking", WANDB, lambda s: not s.tracking.use_wandb, "without --use-wandb", REPORTING),
    Idle(
        "optimizer",
        ("lr_warmup_iters",),
        lambda s: s.optimizer.lr_warmup_fraction is not None,
        "--lr-warmup-fraction says how long the warm-up is",
    ),
    Idle(
        "optimizer",
        ("min_lr",),
        lambda s: s.optimizer.lr_decay_style == "constant",
        "--lr-decay-style constant does not decay",
    ),
    Idle(
        "optimizer",
        ("lr_decay_iters",),
        lambda s: s.optimizer.lr_decay_style == "constant" and s.optimizer.lr_warmup_fraction is None,
        "--lr-decay-style constant does not decay",
    ),
    Idle(
        "data",
        ("apply_chat_template_kwargs", "tool_key"),
        lambda s: _has_no_template(s) and is_object(s.data.apply_chat_template_kwargs),
        "without --apply-chat-template",
    ),
    Idle("loss", ("tis_clip", "tis_clip_low"), lambda s: not s.loss.use_tis, "without --use-tis"),
    Idle("reward", ("reward_key",), lambda s: s.reward.custom_rm_path is None, "built-in rewards are plain numbers"),
    Idle(
        "parallel",
        ("context_parallel_size",),
        _needs_whole_sequences,
        "layers with recurrent state or sparse attention need whole sequences, so no ranks share one",
        MEMORY,
    ),
    Idle("cluster", OFFLOAD_FLAGS, lambda s: not _shares(s), _SHARES_NOTHING, MEMORY),
    Idle(
        "cluster",
        ("offload_train", "offload_rollout"),
        lambda s: s.cluster.device == "cpu",
        "a run on CPU has no GPU memory to free",
        MEMORY,
    ),
    Idle(
        "cluster",
        ("rollout_num_gpus",),
        lambda s: s.cluster.colocate,
        "with --colocate the engines have the trainer's devices",
    ),
    Idle(
        "cluster",
        ("rollout_num_gpus",),
        lambda s: not has_servers(s),
        "the torch engine runs on one device",
        OTHER_PART,
    ),
    Idle(
        "sglang",
        _WEIGHT_FILES,
        lambda s: not has_servers(s) and not s.sends_deltas,
        "SGLang's, and another engine generates",
        OTHER_PART,
    ),
    Idle(
        "sglang",
        tuple(
            field.name
            for field in fields(SglangArguments)
            if not field.name.startswith(("use_", "rollout_external")) and field.name not in _WEIGHT_FILES
        ),
        lambda s: not has_servers(s),
        "SGLang's, and another engine generates",
        OTHER_PART,
    ),
    Idle(
        "sglang",
        ("update_weight_disk_dir",),
        lambda s: not s.sglang.writes_weights,
        "weights reach the engines without files: see --update-weight-transfer-mode",
    ),
    Idle(
        "sglang",
        ("update_weight_copy_dir",),
        lambda s: not s.sglang.writes_deltas,
        "without --update-weight-transfer-mode disk-delta",
    ),
    Idle(
        "sglang",
        ("num_gpus_per_node",),
        lambda s: s.cluster.colocate or s.sglang.rollout_num_gpus_per_engine <= s.sglang.per_node(s.cluster),
        "no engine is larger than a node, or it has the trainer's devices; Ray knows those of each node",
        SAME,
    ),
    Idle(
        "rollout",
        ("torch_engine_max_batch_size",),
        has_servers,
        "the torch engine's, and --rollout-engine sglang generates",
        OTHER_PART,
    ),
    Idle(
        "megatron",
        (
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "decoder_first_pipeline_num_layers",
            "decoder_last_pipeline_num_layers",
            "num_layers_per_virtual_pipeline_stage",
            "expert_model_parallel_size",
            "expert_tensor_parallel_size",
            "sequence_parallel",
            "use_distributed_optimizer",
            "optimizer_cpu_offload",
            "optimizer_offload_fraction",
            "overlap_cpu_optimizer_d2h_h2d",
            "megatron_to_hf_mode",
            "mtp_num_layers",
        ),
        lambda s: not reads_megatron_flags(s),
        "Megatron's layout, and --train-backend fsdp divides every weight over all ranks",
        OTHER_PART,
    ),
    Idle(
        "megatron",
        (
            "decoder_first_pipeline_num_layers",
            "decoder_last_pipeline_num_layers",
            "num_layers_per_virtual_pipeline_stage",
        ),
        lambda s: s.megatron.pipeline_model_parallel_size == 1,
        "without pipeline stages",
    ),
    Idle(
        "megatron",
        OF_OFFLOAD,
        lambda s: s.cluster.device == "cpu",
        "on CPU the optimizer's state is in host memory anyway",
        MEMORY,
    ),
    Idle(
        "megatron",
        OF_OFFLOAD,
        lambda s: not s.megatron.optimizer_cpu_offload,
        "without --optimizer-cpu-offload",
    ),
    Idle(
        "megatron",
        ("sequence_parallel",),
        lambda s: s.megatron.tensor_model_parallel_size == 1,
        "without tensor parallelism",
    ),
    Idle(
        "megatron",
        ("moe_router_load_balancing_type",),
        lambda s: not s.megatron.moe_aux_loss_coeff,
        "with --moe-aux-loss-coeff 0",
    ),
    Idle(
        "megatron",
        ("mtp_num_layers", "mtp_loss_scaling_factor"),
        lambda s: not s.megatron.enable_mtp_training,
        "without --enable-mtp-training",
    ),
)


def normalize_idle(settings: Settings) -> tuple[Settings, list[Note]]:
    """Set every field that changes nothing to its default; return the settings, and a note for each."""
    notes = list[Note]()
    for rule in IDLE:
        section = getattr(settings, rule.section)
        names = changed(section, rule.names)
        if names and rule.applies(settings):
            notes += [note_on(rule.heading, name, getattr(section, name), rule.why) for name in names]
            defaults = {field.name: field.default for field in fields(section)}
            section = replace(section, **{name: defaults[name] for name in names})
            settings = replace(settings, **{rule.section: section})
    return settings, notes


def normalize_values(settings: Settings) -> tuple[Settings, list[Note]]:
    """Read values that are written in another form: a set without a name, an environment of numbers."""
    notes = list[Note]()
    sets = settings.evaluation.eval_prompt_data
    if sets is not None and len(sets) == 1:
        named = (set_name(sets[0]), sets[0])
        notes.append(note_on(READ_AS, "eval_prompt_data", sets, " ".join(("--eval-prompt-data", *named))))
        settings = replace(settings, evaluation=replace(settings.evaluation, eval_prompt_data=named))
    saved = settings.rollout.save_debug_rollout_data
    if saved is not None and not names_iteration(saved) and settings.rollout.num_rollout != 1:
        path = Path(saved)
        by_iteration = str(path.with_name(f"{path.stem}_{{iteration}}{path.suffix}"))
        notes.append(
            note_on(READ_AS, "save_debug_rollout_data", saved, f"{by_iteration}: each iteration has a file of its own")
        )
        settings = replace(settings, rollout=replace(settings.rollout, save_debug_rollout_data=by_iteration))
    if settings.rollout.debug_rollout_only and settings.cluster.colocate:
        size = settings.cluster.world_size if has_servers(settings) else None
        devices = f"--rollout-num-gpus {size}" if size else "the engine's own device"
        notes.append(note_on(READ_AS, "colocate", True, f"{devices}: no trainer shares it"))
        settings = replace(settings, cluster=replace(settings.cluster, colocate=False, rollout_num_gpus=size))
    strings = _strings(settings.cluster.train_env_vars)
    if strings is not None:
        why = "every value as a string, as environment variables are"
        notes.append(note_on(READ_AS, "train_env_vars", settings.cluster.train_env_vars, why))
        settings = replace(settings, cluster=replace(settings.cluster, train_env_vars=strings))
    return settings, notes


def _strings(text: str | None) -> str | None:
    try:
        return None if text is None else environment_strings(text)
    except ValueError:
        return None  # the validator reports it
