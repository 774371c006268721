"""Rules for flags that concern several sections of ``--help``: the loss, and modes of a whole run."""

import os
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from miles.base.flags import Errors, changed, collect_errors, count, flag_name
from miles.base.host import num_gpus
from miles.base.storage import PLACEHOLDER, is_url
from miles.config.checkpoint import fault_of_nothing, fill_remote_cache, first_iteration
from miles.config.components import ENGINES, TRAIN_BACKENDS, call, names_with
from miles.config.critic import check_critic
from miles.config.host_share import PROMPT, is_on_cpu, text_config
from miles.config.model import (
    ModelArguments,
    fault_of_tokens,
    local_config,
    local_vocab_size,
    ordinary_tokens,
)
from miles.config.rollout import names_iteration, path_of_iteration
from miles.config.servers.passed_on import SERVER, VLLM, has_flag, value_of
from miles.config.settings import Settings
from miles.config.sglang.installed import server_flags
from miles.models.packing import WITH_KNOWN_ROUTERS, longest_generated, longest_trained, model_type, reads_images
from miles.models.reading import READ_AS, WITH_IMAGES
from miles.objective.adaptive import check_adaptive_kl
from miles.objective.chosen import build_objective, check_objective
from miles.objective.estimators.base import Estimator
from miles.objective.registry import StepShape
from miles.objective.settings import LossArguments
from miles.tasks.data.settings import FILE_SUFFIXES
from miles.tasks.environments.chosen import read_choice
from miles.tasks.rewards.settings import ENVIRONMENT


def check_loss(settings: Settings, errors: Errors) -> None:
    """Check the loss section, and the flags of other sections that depend on it."""
    loss = settings.loss
    shape = StepShape(_trajectories_of_step(settings), settings.rollout.n_samples_per_prompt)
    check_objective(loss, shape, errors)
    _check_group(settings, errors)
    check_adaptive_kl(loss, shape.num_trajectories, errors)
    _check_one_makes_advantages(settings, errors)
    _check_old_log_probs(settings, errors)
    _check_teacher(settings, errors)
    _check_reward_parts(settings, errors)
    _check_removed_samples(settings, errors)
    temperature = settings.rollout.rollout_temperature
    if not loss.type.uses_advantages and temperature != 1 and errors.none_about("rollout_temperature"):
        rule = f"would divide the logits whose likelihood --loss-type {loss.loss_type} maximizes"
        errors.refuse("rollout_temperature", temperature, rule, "give 1; evaluation has --eval-temperature")
    if loss.type.uses_advantages and loss.has_critic:
        check_critic(settings.critic, settings.optimizer, loss.type.trains_policy, settings.rollout.num_rollout, errors)


def _check_one_makes_advantages(settings: Settings, errors: Errors) -> None:
    """Check that at most one function of the user's makes the advantages."""
    paths = {
        "custom_convert_samples_to_train_data_path": settings.rollout.custom_convert_samples_to_train_data_path,
        "custom_reward_post_process_path": settings.reward.custom_reward_post_process_path,
        "custom_advantage_function_path": settings.loss.custom_advantage_function_path,
    }
    first, *others = [name for name, path in paths.items() if path is not None] or [""]
    for name in others:
        errors.refuse(name, paths[name], f"makes the advantages, and so does {flag_name(first)}", "keep one of the two")


def _check_group(settings: Settings, errors: Errors) -> None:
    """Refuse groups so small that every advantage is 0, in a run that would learn from the comparison."""
    loss, samples = settings.loss, settings.rollout.n_samples_per_prompt
    if not (settings.trains and loss.type.uses_advantages and build_objective(loss).normalizes_rewards):
        return
    smallest = build_objective(loss).estimator.smallest_group(loss)
    if settings.users_advantages is None and 1 <= samples < smallest:
        rule = (
            f"with --advantage-estimator {loss.advantage_estimator} every advantage is 0 and nothing is learned: it "
            f"compares {smallest} or more answers of a prompt"
        )
        what_to_do = f"give {smallest} or more (8 is usual), or use an estimator that does not compare, such as ppo"
        errors.refuse("n_samples_per_prompt", samples, rule, what_to_do)


def _check_old_log_probs(settings: Settings, errors: Errors) -> None:
    """Check that the engine's log-probs are read, if they are the old ones, and are those that the trainer compares."""
    loss, rollout = settings.loss, settings.rollout
    if not loss.use_rollout_logprobs or not loss.type.uses_advantages:
        return  # what has no advantages refuses it on its own
    objective, flag = build_objective(loss), "use_rollout_logprobs"
    if objective.estimator.needs(loss).sum_squared_probs:
        rule = f"--advantage-estimator {loss.advantage_estimator} reads the trainer's probabilities of all tokens"
        errors.refuse(flag, True, rule, "drop it, or use --advantage-estimator rloo")
    if rollout.truncates_sampling and rollout.no_support_replay:
        rule = "the engine's log-probs are over the tokens that were kept, and the trainer's over the whole vocabulary"
        errors.refuse(flag, True, f"with --no-support-replay {rule}", "drop one of the two")


def _trajectories_of_step(settings: Settings) -> int:
    """Return N, which may be implied; numbers that do not divide are refused elsewhere."""
    rollout, training = settings.rollout, settings.training
    collected = (rollout.rollout_batch_size or 0) * rollout.n_samples_per_prompt
    return training.global_batch_size or collected // max(training.num_steps_per_rollout or 1, 1)


def _check_reward_parts(settings: Settings, errors: Errors) -> None:
    """Check that every sample has the parts of a sum of rewards, if the estimator reads them."""
    loss, reward, rollout = settings.loss, settings.reward, settings.rollout
    if not loss.type.uses_advantages or not build_objective(loss).estimator.reads_reward_parts:
        return
    if reward.custom_reward_post_process_path or rollout.custom_convert_samples_to_train_data_path:
        return  # advantages are the user's
    if reward.is_sum and reward.on_error == "value" and not rollout.loads_samples:
        name = "reward_error_value" if reward.reward_error is None else "reward_error"
        rule = (
            f"gives a failing answer one number, and --advantage-estimator {loss.advantage_estimator} reads each "
            f"reward of --rm-type {reward.rm_type} on its own"
        )
        errors.refuse(name, getattr(reward, name), rule, "use --reward-error drop")


def _check_removed_samples(settings: Settings, errors: Errors) -> None:
    """Check that no sample is removed from groups that the trainer compares: it sees unmasked tokens only."""
    loss, rollout = settings.loss, settings.rollout
    if not loss.type.uses_advantages or not build_objective(loss).estimator.reads_score_norms:
        return
    removing = ["filter_zero_reward_samples", "mask_truncated_completions", "rollout_sample_filter_path"]
    for name in changed(rollout, removing):
        rule = (
            f"removes samples after their rewards were compared, and --advantage-estimator {loss.advantage_estimator} "
            "compares the samples of a group on the trainer, where removed ones have no tokens"
        )
        errors.refuse(name, getattr(rollout, name), rule, "drop it, or use an estimator by sample such as rloo")


def _check_teacher(settings: Settings, errors: Errors) -> None:
    """Check that the trainer's teacher has weights, and that servers can give the values that the trainer compares."""
    loss, rollout = settings.loss, settings.rollout
    if loss.teacher_is_loaded and settings.model.opd_teacher_load is None:
        rule, what_to_do = "needs a teacher", "add --opd-teacher-load PATH, or --opd-teacher-urls URL"
        errors.refuse("use_opd", True, rule, what_to_do)
    if not loss.teacher_is_served:
        return
    if rollout.rollout_temperature != 1:
        rule = "the teacher's servers give log-probs at temperature 1"
        what_to_do = "give 1, or load the teacher with --opd-teacher-load"
        errors.refuse("rollout_temperature", rollout.rollout_temperature, rule, what_to_do)
    if rollout.replays_support:
        [name, *_] = changed(rollout, ["rollout_top_p", "rollout_top_k", "rollout_min_p"])
        rule = "the teacher's servers give log-probs over the whole vocabulary, not over what this keeps"
        what_to_do = "drop it, or load the teacher with --opd-teacher-load"
        errors.refuse(name, getattr(rollout, name), rule, what_to_do)
    why = "with --opd-type server, whose teachers score the samples that are generated"
    names = ["custom_convert_samples_to_train_data_path", "rollout_function_path"]
    for name in changed(rollout, names):
        rule = f"makes samples that no teacher has scored {why}"
        errors.refuse(name, getattr(rollout, name), rule, "load the teacher with --opd-teacher-load")


def name_policy_loss(loss: LossArguments) -> tuple[LossArguments, list[str]]:
    """Fill in ``policy_loss`` with the estimator's own in a run that has one; add a note if it is not the usual one.

    The flags must be valid. Under a loss type without one, and with a custom policy loss, there is none to name.
    """
    if loss.policy_loss is not None or not loss.type.uses_policy_loss or loss.custom_policy_loss_function_path:
        return loss, []
    estimator = build_objective(loss).estimator
    name = estimator.default_policy_loss
    notes = []
    if name != Estimator.default_policy_loss:
        notes = [f"--policy-loss is {name}: the default of --advantage-estimator {loss.advantage_estimator}"]
    return replace(loss, policy_loss=name), notes


# Check the flags of what makes trajectories by calls of the model: an agent program, or an environment.


def check_agents(settings: Settings, errors: Errors) -> None:
    """Check that program or environment can be read, and that the calls can be rendered and bounded."""
    rollout = settings.rollout
    with errors.catching():
        if rollout.environment is None and ENVIRONMENT in settings.reward.weights:
            what_to_do = "add --environment, or name another reward"
            errors.refuse("rm_type", settings.reward.rm_type, "reads the reward of an environment", what_to_do)
    if rollout.agent_command is not None:
        _check_maker(settings, "agent_command", errors)
    if rollout.environment is not None:
        with errors.catching():  # there may be no such environment
            choice = read_choice(rollout.environment)
            if choice is not None and not choice[0].has_reward and ENVIRONMENT in settings.reward.weights:
                rule = f"reads the reward of an environment, and {choice[0].name} gives none"
                what_to_do = "name another reward, such as math, or --custom-rm-path"
                errors.refuse("rm_type", settings.reward.rm_type, rule, what_to_do)
        _check_maker(settings, "environment", errors)
        if rollout.agent_command is not None:
            rule = "generates trajectories, and so does --agent-command"
            errors.refuse("environment", rollout.environment, rule, "keep one of the two")


def _check_maker(settings: Settings, name: str, errors: Errors) -> None:
    """Check what makes the trajectories, the flag ``name``, alongside the other flags."""
    rollout = settings.rollout
    value = str(getattr(rollout, name))
    if name == "agent_command":
        try:
            words = shlex.split(value)
        except ValueError as error:
            errors.refuse(name, value, f"cannot be split into words ({error})", "quote it as for a shell")
            return
        if not any(words[:1]):
            errors.refuse(name, value, "names no program", "give a command, as python agent.py")
    if rollout.custom_generate_function_path is not None:
        rule = "generates trajectories, and so does --custom-generate-function-path"
        errors.refuse(name, value, rule, "keep one of the two")
    if not settings.data.apply_chat_template:
        rule = "calls with chat messages, which are rendered by the tokenizer's chat template"
        errors.refuse(name, value, rule, "add --apply-chat-template")
    if rollout.rollout_max_context_len is None:
        rule = "makes conversations that grow, and nothing bounds their prompts"
        errors.refuse(name, value, rule, "add --rollout-max-context-len")


# Check that a response fits into the model's context alongside a prompt: engines refuse such requests.


_CONTEXT = "--context-length"  # SGLang's flag
_MODEL_LEN = "--max-model-len"  # vLLM's
_UNKNOWN = sys.maxsize
_CUT = "--rollout-max-context-len"
# Flags of SGLang that change its limit from the one in the model's configuration, or make it refuse no request.
_OTHER_LIMITS = ("--json-model-override-args", "--allow-auto-truncate")
# What may ask for fewer tokens than --rollout-max-response-len.
_MAY_ASK_FOR_LESS = ("custom_generate_function_path", "rollout_function_path", "agent_command", "thinking_max_len")


def check_model_context(settings: Settings, errors: Errors) -> None:
    """Refuse a context that the model has not, and a longest response that leaves no room for a prompt in it."""
    if not errors.none_about("hf_checkpoint", "sglang_context_length"):
        return
    with errors.catching():
        limit, name = sequence_limit(settings)
        within = settings.rollout.rollout_max_context_len
        if settings.generates and within is not None and within > limit:
            errors.refuse("rollout_max_context_len", within, f"is more than {name} {limit}", f"give {limit} or less")
        for field, length in _lengths(settings, limit):
            if length >= limit and errors.none_about(field):
                rule = f"leaves no room for a prompt in {name} {limit}"
                errors.refuse(field, length, rule, f"give {_CUT} {limit}, which ends responses there")


def notes_on_model_context(settings: Settings) -> Iterator[str]:
    """Say which prompts would end the run, if such prompts are not rare."""
    limit, name = sequence_limit(settings)
    prompt = settings.data.rollout_max_prompt_len or min(PROMPT, limit // 4)
    for field, length in _lengths(settings, limit):
        if prompt + length > limit:
            yield (
                f"{flag_name(field)} {length}: a prompt of more than {limit - length} tokens would end the run, since "
                f"the response does not fit into {name} {limit}; {_CUT} {limit} ends responses there"
            )


def _lengths(settings: Settings, limit: int) -> Iterator[tuple[str, int]]:
    """Yield the longest responses that engines are asked for, if nothing cuts them to ``limit``."""
    rollout, evaluation = settings.rollout, settings.evaluation
    within = rollout.rollout_max_context_len
    if not settings.generates or (within is not None and within <= limit):
        return
    longest = rollout.rollout_max_response_len
    asks = not settings.reads_samples and not changed(rollout, _MAY_ASK_FOR_LESS)
    if asks and longest is not None:
        yield "rollout_max_response_len", longest
    of_evaluation = evaluation.eval_max_response_len
    if of_evaluation is None:
        of_evaluation = longest
    if not evaluation.has_sets or evaluation.eval_function_path is not None or of_evaluation is None:
        return
    if not (asks and of_evaluation == longest):  # to yield it once is enough
        yield "rollout_max_response_len" if of_evaluation == longest else "eval_max_response_len", of_evaluation


def sequence_limit(settings: Settings) -> tuple[int, str]:
    """Return the most tokens of a sequence, and the setting that limits them; an unlimited number if it is not known.

    Raises:
        FlagError: The configuration of the model cannot be read.
    """
    config = text_config(settings) or {}
    generated = _limit_of_engine(settings, config)
    is_trained = settings.trains and settings.backend.long_samples_change_others
    trained = longest_trained(config) if is_trained else None
    if trained is None or generated[0] <= trained[0]:
        return generated
    return trained[0], f"the model's {trained[1]}"


def _limit_of_engine(settings: Settings, config: dict[str, Any]) -> tuple[int, str]:
    if settings.engine.has_servers:
        words = settings.server_flags.server
        flag, length = SERVER + _CONTEXT[2:], value_of(words, _CONTEXT)
        if length is None:
            flag, length = VLLM + _MODEL_LEN[2:], value_of(settings.server_flags.vllm, _MODEL_LEN)
        if settings.sglang.rollout_external or has_flag(words, *_OTHER_LIMITS):
            return _UNKNOWN, ""
        if length is not None:
            return int(length) if length.isdecimal() else _UNKNOWN, flag
        if _is_stretched(config):
            return _UNKNOWN, ""
        longest, name = config.get("max_position_embeddings"), "max_position_embeddings"
    else:
        longest, name = longest_generated(config)
    return longest if isinstance(longest, int) else _UNKNOWN, f"the model's {name}"


def _is_stretched(config: dict[str, Any]) -> bool:
    """Return whether the configuration scales positions: SGLang may then take more of them."""
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(scaling, dict):
        return True
    parts = (scaling, *(part for part in scaling.values() if isinstance(part, dict)))  # models may have one per kind
    return any("factor" in part for part in parts)


# Check token ids against the model's vocabulary, and the tokens of the models that score its answers.


def check_images(settings: Settings, errors: Errors) -> None:
    """Refuse images for a model that reads none, and for a backend that trains none."""
    data = settings.data
    config = None
    if errors.none_about("hf_checkpoint"):
        with errors.catching():
            config = local_config(settings.model, "hf_checkpoint")
    backend = settings.training.train_backend
    if settings.trains and data.multimodal_keys is not None and not settings.backend.trains_images:
        rule = f"--train-backend {backend} trains no images: it would need vision towers and 3-D rotary positions"
        errors.refuse("multimodal_keys", data.multimodal_keys, rule, "give --train-backend fsdp")
    elif data.multimodal_keys is not None and config is not None and not reads_images(config):
        what_to_do = f"give a model of the type {', '.join(WITH_IMAGES)}, or train on the text columns"
        rule = f"a {config.get('model_type')} reads no images here"
        errors.refuse("multimodal_keys", data.multimodal_keys, rule, what_to_do)


def check_stop_token_ids(settings: Settings, errors: Errors) -> None:
    """Refuse ids that the model cannot generate, if its configuration is here and states how many it has."""
    ids = settings.rollout.stop_token_ids
    if not ids or not errors.none_about("hf_checkpoint", "rollout_stop_token_ids"):
        return
    with errors.catching():
        size = local_vocab_size(settings.model)
        if size is None:
            return
        beyond = tuple(token for token in ids if token >= size)
        if beyond:
            rule = f"the model has the token ids 0 to {size - 1}, by the vocab_size of its config.json"
            errors.refuse("rollout_stop_token_ids", beyond, rule, "give ids of its tokenizer's vocabulary")


def check_tokens_of_scorers(settings: Settings, errors: Errors) -> None:
    """Refuse a reference or a teacher to which the token ids of ``--hf-checkpoint`` are other text, or no tokens.

    They score the ids that the policy chose. Folders with a ``config.json`` here are compared, and their tokenizers if
    both have one.
    """
    policy = settings.model.hf_checkpoint
    if policy is None or not errors.none_about("hf_checkpoint"):
        return
    for field in ("ref_load", "opd_teacher_load"):
        path = getattr(settings.model, field)
        if path is None or not errors.none_about(field):
            continue
        with errors.catching():
            fault = _fault_of_size(settings.model, field) or fault_of_tokens(path, policy)
            if fault is not None:
                what_to_do = "it scores the ids that the policy chose, so give a model with the same tokenizer"
                errors.refuse(field, path, fault, what_to_do)


def _fault_of_size(model: ModelArguments, field: str) -> str | None:
    """Return that the model of ``field`` has fewer tokens than the policy can choose, as part of a sentence."""
    size, own_size = local_vocab_size(model, field), local_vocab_size(model)
    if size is None or (own_size is not None and own_size <= size):
        return None
    assert model.hf_checkpoint is not None, "the caller has looked"
    last = max((ordinary_tokens(model.hf_checkpoint) or {}).values(), default=0)
    if own_size is not None:
        last = min(last, own_size - 1)  # a tokenizer may have tokens that its model does not know
    if last < size:
        return None
    return f"has the token ids 0 to {size - 1}, and the tokenizer of --hf-checkpoint has ids up to {last}"


# Check that rewards which compare with a reference answer are given one.


OWN_LABELS = ("reasoning_gym:", "verifiers:")  # of sources whose rows have their labels in fixed columns
# Code of the user that may give samples labels or rewards.
OF_USER = ("custom_generate_function_path", "rollout_function_path", "agent_command", "environment")


def check_labels(settings: Settings, errors: Errors) -> None:
    """Refuse a reward that needs the label of each row, if no flag names the labels' column: it could score nothing."""
    reward, data = settings.reward, settings.data
    scores_rows = settings.generates and not settings.reads_samples and not changed(settings.rollout, OF_USER)
    if not scores_rows or reward.on_error in ("value", "drop") or data.label_key is not None:
        return
    if data.prompt_data is None or data.prompt_data.startswith(OWN_LABELS):
        return
    if needing := reward.needing_labels:
        rule = f"{', '.join(needing)} compares answers with a reference answer, and no flag states which column has it"
        errors.refuse("rm_type", reward.rm_type, rule, "add --label-key COLUMN")


# Check the runs that are only half of a run: ``--debug-rollout-only`` and ``--debug-train-only``.


def check_saved_samples(settings: Settings, errors: Errors) -> None:
    """Check that the first file of ``--load-debug-rollout-data`` is there."""
    path = settings.rollout.load_debug_rollout_data
    if path is None or not names_iteration(path):
        return
    first = first_iteration(settings.checkpoint)
    if first is not None and not os.path.isfile(file := path_of_iteration(path, first)):
        rule = f"no such file: {file}, of the first iteration of the run"
        errors.refuse("load_debug_rollout_data", path, rule, "check the path")


def notes_on_saved_samples(settings: Settings) -> Iterator[str]:
    """Yield a note on the first iteration of ``--load-debug-rollout-data`` that has no file."""
    path, last = settings.rollout.load_debug_rollout_data, settings.rollout.num_rollout
    first = first_iteration(settings.checkpoint)
    if path is None or last is None or first is None or not names_iteration(path):
        return
    files = (path_of_iteration(path, iteration) for iteration in range(first, last))
    missing = next((file for file in files if not os.path.isfile(file)), None)
    if missing is not None:
        yield (
            f"--load-debug-rollout-data {path}: {missing} is missing, so the run will stop there, before the "
            f"{last} iterations of --num-rollout"
        )


def check_debug_modes(settings: Settings, errors: Errors) -> None:
    """Check that one mode is chosen, and that no flag is given for the half that does not run."""
    rollout = settings.rollout
    if rollout.debug_rollout_only and rollout.debug_train_only:
        errors.refuse("debug_train_only", True, "contradicts --debug-rollout-only", "keep one of the two")
        return
    if rollout.debug_train_only and not settings.reads_samples:
        what_to_do = (
            "name a file of them with --load-debug-rollout-data, or use --loss-type sft_loss with conversations"
        )
        errors.refuse("debug_train_only", True, "needs samples to train on", what_to_do)
    if rollout.debug_rollout_only:
        if settings.reads_samples:
            rule = "would generate nothing: this run reads the samples that it trains on"
            what_to_do = "drop it, or drop --load-debug-rollout-data and --loss-type sft_loss"
            errors.refuse("debug_rollout_only", True, rule, what_to_do)
        if settings.cluster.colocate:
            rule = "has no trainer to share devices with, with --debug-rollout-only, which trains and saves nothing"
            errors.refuse("colocate", True, rule, "give the engines --rollout-num-gpus instead")


# Check ``--deterministic-mode``: two runs of one command give the same weights, bit for bit.


# Modes that let the order of completion decide which answers an iteration has.
BY_COMPLETION = ("partial_rollout", "over_sampling_early_stop", "fully_async")


def check_deterministic(settings: Settings, errors: Errors) -> None:
    """Check that nothing which two runs may do differently decides which data are trained on."""
    if not settings.training.deterministic_mode:
        return
    why = "with --deterministic-mode: the order in which answers complete would decide which are trained on"
    for name in BY_COMPLETION:
        if getattr(settings.rollout, name):
            errors.refuse(name, True, f"is not possible {why}", "drop one of the two")
    if settings.sglang.rollout_external and settings.generates:
        rule = "names engines that others start, which --deterministic-mode cannot have repeat their answers"
        errors.refuse("rollout_external", True, rule, "drop one of the two")
    if settings.cluster.device == "cpu":
        check_deterministic_on_cpu(settings, errors)


def check_deterministic_on_cpu(settings: Settings, errors: Errors) -> None:
    """Refuse servers on CPU, which draw other answers in each run."""
    name = settings.rollout.rollout_engine
    if settings.training.deterministic_mode and settings.generates and settings.engine.has_servers:
        others = " or ".join(engine for engine, spec in ENGINES.items() if not spec.has_servers)
        rule = f"needs answers that repeat, and --rollout-engine {name} repeats them on GPUs only"
        errors.refuse("deterministic_mode", True, rule, f"use --rollout-engine {others}, or drop it")


# Refuse settings that need more than a run in one process without Ray (run/one_process/drivers.py).


def check_one_process(settings: Settings) -> None:
    """Refuse a run that needs more than one process.

    Raises:
        FlagError: With one message per flag.
    """
    cluster, checkpoint, rollout = settings.cluster, settings.checkpoint, settings.rollout
    able = names_with(TRAIN_BACKENDS, "trains_without_ray")
    is_many = settings.trains and cluster.world_size > 1
    faults = {
        f"--device {cluster.device}": not is_on_cpu(settings) and "computes on CPU; give --device cpu",
        "--actor-num-gpus-per-node": is_many and f"has one trainer rank, not {cluster.world_size}; give 1, on one node",
        "--debug-rollout-only": not settings.trains and "trains; drop it",
        f"--rollout-engine {rollout.rollout_engine}": settings.num_engines and "starts no servers; give torch",
        f"--num-rollout-workers {rollout.num_rollout_workers}": (
            rollout.num_rollout_workers > 1 and "has no further processes; drop it"
        ),
        f"--train-backend {settings.training.train_backend}": (
            not settings.backend.trains_without_ray and f"trains with {able}; give {able}"
        ),
        f"--ray-address {cluster.ray_address}": cluster.ray_address and "uses no Ray; drop it",
        "--update-weight-transfer-mode": settings.sends_deltas and "passes whole weights; drop it",
        f"--save {checkpoint.save}": checkpoint.save and "neither saves nor resumes; drop --save",
        f"--load {checkpoint.load}": checkpoint.load and "neither saves nor resumes; drop --load",
        f"--save-hf {checkpoint.save_hf}": checkpoint.urls and "uploads nothing; give a folder",
        "--profile": settings.profiling.is_on and "is not recorded; drop it",
    }
    with collect_errors() as errors:
        for flag, fault in faults.items():
            if fault:
                errors.add(f"{flag}: a run in one process {fault}")


# Check routing replay: the model has experts, the engine reports which it chose, and the trainer can be given them.


def check_replay(settings: Settings, errors: Errors) -> None:
    """Check ``--use-rollout-routing-replay`` and ``--use-routing-replay``."""
    rollout, training = settings.rollout, settings.training
    switches = {
        "use_rollout_routing_replay": rollout.use_rollout_routing_replay,
        "use_routing_replay": training.use_routing_replay,
    }
    for name, is_on in switches.items():
        if not is_on:
            continue
        if settings.reads_conversations:
            errors.refuse(name, True, "has nothing to repeat: conversations are not generated", "drop it")
        elif errors.none_about("hf_checkpoint"):
            with errors.catching():
                _check_model(name, settings, errors)
        if settings.megatron.mtp_heads:
            rule = "heads of multi-token prediction have experts that no engine chooses"
            errors.refuse(name, True, f"cannot be obeyed with --mtp-num-layers: {rule}", "drop one of the two")
    if rollout.use_rollout_routing_replay and not settings.reads_samples:
        _check_engine(settings, errors)
        if settings.cluster.device == "cpu":
            check_replay_on_cpu(settings, errors)


def check_replay_on_cpu(settings: Settings, errors: Errors) -> None:
    """Refuse servers on CPU: SGLang 0.5.23 keeps experts in page-locked memory, which only a GPU's driver gives."""
    wants = settings.rollout.use_rollout_routing_replay and not settings.reads_samples
    if wants and settings.engine.has_servers and not settings.sglang.rollout_external:
        rule = f"--rollout-engine {settings.rollout.rollout_engine} reports which experts it chose on GPUs only"
        what_to_do = "use --rollout-engine torch, or replay the trainer's own with --use-routing-replay"
        errors.refuse("use_rollout_routing_replay", True, rule, what_to_do)


def _check_engine(settings: Settings, errors: Errors) -> None:
    """Check that the engine can return the experts that it chose; SGLang can if its servers know the flag for that."""
    known = server_flags()
    if not settings.engine.reports_experts:
        rule = f"--rollout-engine {settings.rollout.rollout_engine} does not report which experts it chose"
        errors.refuse("use_rollout_routing_replay", True, rule, f"use {names_with(ENGINES, 'reports_experts')}")
    is_ours = settings.engine.has_servers and not settings.sglang.rollout_external
    if is_ours and known and "--enable-return-routed-experts" not in known:
        rule = "the installed SGLang does not report which experts it chose"
        what_to_do = "install SGLang 0.5.23, or replay the trainer's own with --use-routing-replay"
        errors.refuse("use_rollout_routing_replay", True, rule, what_to_do)


def _check_model(name: str, settings: Settings, errors: Errors) -> None:
    """Check the model, if its configuration can be read without a network."""
    config = local_config(settings.model, "hf_checkpoint")
    if config is None:
        return
    kind = model_type(config)
    if READ_AS.get(kind, kind) not in WITH_KNOWN_ROUTERS:
        rule = f"{', '.join(WITH_KNOWN_ROUTERS)} have routers that can be given experts, and this model is {kind}"
        errors.refuse(name, True, rule, "drop it, or choose another model")


# Check what only a start needs and a plan does without: the devices of this host, and the checkpoint to load.


def check_load(settings: Settings, errors: Errors) -> None:
    """Refuse a ``--load`` without a checkpoint: a run with a misspelt path would train from the beginning."""
    checkpoint = settings.checkpoint
    if "load" in checkpoint.urls:  # the launcher asks the remote storage
        return
    if (fault := fault_of_nothing(checkpoint, settings.model.ref_load)) is not None:
        errors.refuse("load", checkpoint.load, *fault)


def check_sources(settings: Settings, errors: Errors) -> None:
    """Refuse files of rows that are not there."""
    data, held_out = settings.data, settings.evaluation.eval_prompt_data
    of_flags = {
        "prompt_data": (data.prompt_data or "",),
        "prompt_mix": (data.prompt_mix or ())[1::2],
        "eval_prompt_data": (held_out or ())[1::2],
    }
    for name, sources in of_flags.items():
        for source in sources:
            if source.endswith(FILE_SUFFIXES) and not os.path.exists(source):
                errors.existing_file(name, source)


def check_devices(settings: Settings, errors: Errors) -> None:
    """Refuse valid settings that need more than this host has. Ray would wait minutes for it.

    A cluster that the run joins may have it, now or later.
    """
    cluster = settings.cluster
    there = num_gpus()
    if cluster.ray_address:
        return
    if settings.trains and cluster.actor_num_nodes > 1:
        rule = "the run starts its own Ray on this host, which is 1 node"
        what_to_do = "give 1, or join the Ray cluster of the nodes with --ray-address"
        errors.refuse("actor_num_nodes", cluster.actor_num_nodes, rule, what_to_do)
        return
    if is_on_cpu(settings) or there is None or (cluster.device == "auto" and there == 0):  # PyTorch then sees no GPU
        return
    of_trainer = cluster.world_size if settings.trains else 0
    of_engines = settings.num_engines * settings.sglang.rollout_num_gpus_per_engine or 1
    needed = of_trainer + (0 if cluster.colocate else of_engines)
    if needed > there:
        parts = "" if cluster.colocate else f" ({of_trainer} for the trainer, {of_engines} for generation)"
        rule = f"the run needs {count(needed, 'GPU')}{parts}, and this host has {there or 'none'}"
        fewer = "fewer with --actor-num-gpus-per-node and --rollout-num-gpus" if there else "--device cpu"
        errors.refuse("device", cluster.device, rule, f"give {fewer}, or join a Ray cluster with --ray-address")


def check_engine_is_there(settings: Settings, errors: Errors) -> None:
    """Refuse an engine whose program is not on this host, and flags that it refuses."""
    rules = settings.engine.start_rules
    if rules and settings.generates:
        call(rules, settings, errors)


# Check that the export of ``--save-hf`` replaces no folder that the run reads or writes otherwise.


_CHECKPOINT = re.compile(r"(\.replaced_)?iter_\d{7}")
_FILE_URL = re.compile(r"(?:file|local)://(?=/)")


def check_export_folder(settings: Settings, errors: Errors) -> None:
    """Refuse an export that would replace another folder, or a parent of it.

    An export removes the weights of an earlier one, and swaps with its folder (training/checkpoint_files.py).
    Folders are compared through links. ``{iteration}`` in the name stands for any number.
    """
    model, save, export = settings.model.hf_checkpoint, settings.checkpoint.save, settings.checkpoint.save_hf
    if save is not None and errors.none_about("save", "hf_checkpoint") and _place(save) == _place(str(model)):
        mixed = "is the folder of --hf-checkpoint, which checkpoints would mix with"
        errors.refuse("save", save, mixed, "give another folder")
    if export is None or not errors.none_about("save_hf"):
        return
    checkpoint = fill_remote_cache(settings.checkpoint, settings.tracking.output_dir)
    folders = {name: getattr(settings.model, name) for name in ("hf_checkpoint", "ref_load", "opd_teacher_load")}
    folders |= {name: getattr(checkpoint, name) for name in ("save", "load", "remote_cache")}
    for name, other in (folders | {"output_dir": settings.tracking.output_dir}).items():
        if other is not None and errors.none_about(name) and (rule := _fault(export, flag_name(name), other)):
            errors.refuse("save_hf", export, rule, "give another folder")
            return


def _fault(path: str, flag: str, other: str) -> str | None:
    export, folder = _place(path), _place(other)
    pattern = r"\d+".join(re.escape(part) for part in PLACEHOLDER.split(export))
    if re.fullmatch(pattern, folder):
        return f"is the folder of {flag} {other}, and an export removes the weights that are in its folder"
    if is_url(export) or is_url(folder):
        return None
    if re.match(f"{pattern.rstrip('/')}/", folder):
        return f"holds the folder of {flag} {other}, and an export takes the place of its whole folder"
    inside = export.removeprefix(f"{folder.rstrip('/')}/")
    if flag in ("--save", "--load") and inside != export and _CHECKPOINT.fullmatch(inside.split("/")[0]):
        return f"is the place of a checkpoint in {flag} {other}"
    return None


def _place(folder: str) -> str:
    """Return the absolute path of a folder without links; for a URL other than a local folder's, return its text."""
    local = _FILE_URL.sub("", folder)
    return folder.rstrip("/") if is_url(local) else os.path.realpath(local)
