"""What each section must satisfy: ranges, flags that need another one, files that must exist."""

from __future__ import annotations

import json

from miles.arguments.checkpoint import CheckpointArguments
from miles.arguments.cluster import ClusterArguments
from miles.arguments.data import DataArguments
from miles.arguments.evaluation import EvaluationArguments
from miles.arguments.model import ModelArguments
from miles.arguments.optimizer import OptimizerArguments
from miles.arguments.reward import RewardArguments
from miles.arguments.rollout import RolloutArguments
from miles.arguments.tracking import TrackingArguments
from miles.flags import (
    above,
    at_least,
    changed,
    existing_file,
    existing_folder,
    finite,
    flag_name,
    json_object,
    refuse,
    refuse_ignored,
    require,
    within,
)

FILE_SUFFIXES = (".jsonl", ".parquet")


def check_cluster(cluster: ClusterArguments) -> None:
    """Counts, and the environment of the trainer."""
    at_least(
        cluster, 1, "actor_num_nodes", "actor_num_gpus_per_node", "rollout_num_gpus", "distributed_timeout_minutes"
    )
    above(cluster, 0, "worker_timeout")
    for name, value in json_object("train_env_vars", cluster.train_env_vars).items():
        if not isinstance(value, str):
            rule = f"the value of {name} is {json.dumps(value)}, but environment variables are strings"
            refuse("train_env_vars", cluster.train_env_vars, rule, f'write "{name}": "{value}"')


def check_model(model: ModelArguments) -> None:
    """A checkpoint that is there."""
    require("hf_checkpoint", model.hf_checkpoint, "tokenizer, config and initial weights")
    existing_folder("hf_checkpoint", model.hf_checkpoint)
    existing_folder("ref_load", model.ref_load)


def check_data(data: DataArguments, loads_samples: bool) -> None:
    """A prompt set that is there; template arguments only where a template is applied."""
    if not loads_samples:
        require("prompt_data", data.prompt_data, "the training prompts")
    if data.prompt_data is not None:
        check_source("prompt_data", data.prompt_data)
    at_least(data, 1, "rollout_max_prompt_len")
    at_least(data, 0, "rollout_seed")
    json_object("apply_chat_template_kwargs", data.apply_chat_template_kwargs)
    if not data.apply_chat_template:
        refuse_ignored(data, ["apply_chat_template_kwargs"], "without --apply-chat-template", "add that switch")


def check_source(field: str, source: str) -> None:
    """A source that ends as a file does is a file."""
    if source.endswith(FILE_SUFFIXES):
        existing_file(field, source)


def check_reward(reward: RewardArguments, needed: bool) -> None:
    """Exactly one reward where responses are scored."""
    if reward.rm_type is not None and reward.custom_rm_path is not None:
        rule = f"names a second reward, beside --custom-rm-path {reward.custom_rm_path}"
        refuse("rm_type", reward.rm_type, rule, "keep one of the two")
    if needed and reward.rm_type is None and reward.custom_rm_path is None:
        raise ValueError(
            "--rm-type or --custom-rm-path is required: responses must be scored; add one of the two, "
            "such as --rm-type exact_match"
        )
    if reward.rm_type is not None:
        why = f"as --rm-type {reward.rm_type} gives plain numbers"
        refuse_ignored(reward, ["reward_key"], why, "drop it, or use --custom-rm-path")
    finite(reward, "reward_error_value")


def check_sampling(rollout: RolloutArguments) -> None:
    """How many responses are sampled, how long, and from what distribution. Runs first: step arithmetic needs it."""
    require("rollout_batch_size", rollout.rollout_batch_size, "prompts per rollout")
    require("rollout_max_response_len", rollout.rollout_max_response_len, "most tokens of one response")
    at_least(
        rollout,
        1,
        "rollout_batch_size",
        "n_samples_per_prompt",
        "rollout_max_response_len",
        "rollout_max_context_len",
        "torch_engine_max_batch_size",
        "num_rollout",
        "num_epoch",
    )
    at_least(rollout, 0, "rollout_temperature")
    check_truncation(rollout, "rollout_top_p", "rollout_top_k")
    for token in rollout.rollout_stop_token_ids or ():
        if token < 0:
            refuse(
                "rollout_stop_token_ids", token, "token ids are not negative", "give ids of the tokenizer's vocabulary"
            )


def check_truncation(section: RolloutArguments | EvaluationArguments, top_p: str, top_k: str) -> None:
    """top_p in (0, 1]; top_k -1 or at least 1."""
    above(section, 0, top_p)
    within(section, 0, 1, top_p)
    k = getattr(section, top_k)
    if k is not None and k != -1 and k < 1:
        refuse(
            top_k, k, "must be -1 (all tokens) or at least 1", f"give {flag_name(top_k)} -1 for the whole vocabulary"
        )


def check_rollout(rollout: RolloutArguments, max_prompt_len: int | None) -> None:
    """How long the run is, room for the sequences, and which groups are kept."""
    if rollout.num_rollout is None and rollout.num_epoch is None:
        raise ValueError("--num-rollout or --num-epoch is required: the length of the run; add one of the two")
    if rollout.num_rollout is not None and rollout.num_epoch is not None:
        rule = f"would be ignored beside --num-rollout {rollout.num_rollout}"
        refuse("num_epoch", rollout.num_epoch, rule, "keep one of the two")
    _check_context(rollout, max_prompt_len)
    _check_over_sampling(rollout)
    _check_debug_files(rollout)


def _check_context(rollout: RolloutArguments, max_prompt_len: int | None) -> None:
    context, response = rollout.rollout_max_context_len, rollout.rollout_max_response_len
    assert response is not None, "check_sampling runs first"
    if context is None:
        return
    if context <= response:
        rule = f"leaves no room for a prompt beside --rollout-max-response-len {response}"
        refuse("rollout_max_context_len", context, rule, f"give more than {response}, or a shorter response")
    if max_prompt_len is not None and max_prompt_len >= context:
        rule = f"leaves no room for a response after --rollout-max-prompt-len {max_prompt_len}"
        refuse("rollout_max_context_len", context, rule, f"give more than {max_prompt_len}, or a shorter prompt")


def _check_over_sampling(rollout: RolloutArguments) -> None:
    size, wanted = rollout.over_sampling_batch_size, rollout.rollout_batch_size
    assert wanted is not None, "check_sampling runs first"
    if size is None:
        return
    if size < wanted:
        rule = f"must be at least --rollout-batch-size {wanted}"
        refuse("over_sampling_batch_size", size, rule, f"give {wanted} or more")
    stops_early = rollout.partial_rollout or rollout.over_sampling_early_stop
    if rollout.dynamic_sampling_filter_path is None and not stops_early:
        rule = "would be ignored without --dynamic-sampling-filter-path or an early stop (--partial-rollout)"
        refuse("over_sampling_batch_size", size, rule, "name a filter, let the rollout stop early, or drop the flag")


def _check_debug_files(rollout: RolloutArguments) -> None:
    save, load = rollout.save_debug_rollout_data, rollout.load_debug_rollout_data
    if save is not None and not _names_iteration(save) and rollout.num_rollout != 1:
        refuse(
            "save_debug_rollout_data", save, "each iteration would overwrite the last", "put {iteration} in the name"
        )
    if load is None:
        return
    if rollout.num_rollout is None:
        rule = "needs --num-rollout: an epoch is counted in prompts, and none are drawn"
        refuse("load_debug_rollout_data", load, rule, "replace --num-epoch by --num-rollout")
    if not _names_iteration(load):
        existing_file("load_debug_rollout_data", load)
    generation = (
        "over_sampling_batch_size",
        "dynamic_sampling_filter_path",
        "over_sampling_early_stop",
        "partial_rollout",
        "async_steps",
        "rollout_function_path",
    )
    refuse_ignored(rollout, generation, "with --load-debug-rollout-data: nothing is generated", "drop that flag")


def _names_iteration(path: str) -> bool:
    """Whether the path of saved rollout data has a placeholder; ``{rollout_id}`` is the ecosystem's name."""
    return "{iteration}" in path or "{rollout_id}" in path


def check_optimizer(optimizer: OptimizerArguments) -> None:
    """Ranges, and a schedule in which every flag has a part."""
    above(optimizer, 0, "lr", "adam_eps")
    at_least(optimizer, 0, "min_lr", "lr_warmup_iters", "weight_decay", "clip_grad")
    at_least(optimizer, 1, "lr_decay_iters")
    within(optimizer, 0, 1, "lr_warmup_fraction")
    within(optimizer, 0, 1, "adam_beta1", "adam_beta2", open_high=True)
    if optimizer.min_lr > optimizer.lr:
        rule = f"the decay would end above --lr {optimizer.lr:g}"
        refuse("min_lr", f"{optimizer.min_lr:g}", rule, "give at most --lr")
    if optimizer.lr_warmup_fraction is not None and optimizer.lr_warmup_iters:
        rule = f"sets the warm-up twice, beside --lr-warmup-iters {optimizer.lr_warmup_iters}"
        refuse("lr_warmup_fraction", optimizer.lr_warmup_fraction, rule, "keep one of the two")
    if optimizer.lr_decay_style == "constant":
        why = "by --lr-decay-style constant"
        refuse_ignored(optimizer, ["min_lr"], why, "choose linear or cosine")
        if optimizer.lr_warmup_fraction is None:
            refuse_ignored(optimizer, ["lr_decay_iters"], why, "choose linear or cosine")


def check_checkpoint(checkpoint: CheckpointArguments) -> None:
    """Switches of saving need a folder to save to, those of loading one to load from."""
    at_least(checkpoint, 1, "save_interval")
    if checkpoint.save is None:
        refuse_ignored(checkpoint, ["save_interval"], "without --save", "add --save DIR")
    if checkpoint.load is None:
        refuse_ignored(checkpoint, ["finetune", "no_load_optim", "no_load_rng"], "without --load", "add --load DIR")


def check_evaluation(evaluation: EvaluationArguments) -> None:
    """NAME SOURCE pairs, an interval, and no evaluation flag without a set."""
    pairs = evaluation.eval_prompt_data
    if not evaluation.has_sets:
        ignored = [name for name in vars(evaluation) if name not in ("eval_prompt_data", "eval_config")]
        why = "without an evaluation set"
        refuse_ignored(evaluation, ignored, why, "add --eval-prompt-data NAME SOURCE")
        return
    if pairs is not None:
        _check_eval_pairs(pairs)
    if evaluation.eval_config is not None:
        refuse_ignored(evaluation, ["eval_prompt_data"], "beside --eval-config", "list the set in that file")
        existing_file("eval_config", evaluation.eval_config)
    require("eval_interval", evaluation.eval_interval, "there are evaluation sets; rollouts between evaluations")
    at_least(evaluation, 1, "eval_interval", "n_samples_per_eval_prompt", "eval_max_response_len")
    at_least(evaluation, 0, "eval_temperature")
    check_truncation(evaluation, "eval_top_p", "eval_top_k")


def _check_eval_pairs(words: tuple[str, ...]) -> None:
    given = " ".join(words)
    if len(words) % 2:
        rule = f"{len(words)} words are not NAME SOURCE pairs"
        refuse("eval_prompt_data", given, rule, "write a name before each source: --eval-prompt-data test FILE.jsonl")
    names = words[::2]
    for name, source in zip(names, words[1::2], strict=True):
        if names.count(name) > 1:
            refuse("eval_prompt_data", given, f"the name {name} stands twice", "give each set its own name")
        check_source("eval_prompt_data", source)


def check_tracking(tracking: TrackingArguments) -> None:
    """W&B flags need W&B, report flags a report."""
    at_least(tracking, 0, "report_samples")
    if tracking.no_report:
        refuse_ignored(tracking, ["report_samples"], "with --no-report", "drop that switch")
    if not tracking.use_wandb:
        wandb = [name for name in vars(tracking) if "wandb_" in name]
        for name in changed(tracking, wandb):
            # the value is not shown: it may be a key
            refuse(name, None, "would be ignored without --use-wandb", f"add that switch, or drop {flag_name(name)}")
