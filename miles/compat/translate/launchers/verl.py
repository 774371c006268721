"""verl: Hydra YAML, and ``key=value`` overrides in a shell script."""

from __future__ import annotations

from miles.compat.translate.launchers.base import Launcher
from miles.compat.translate.names_in_verl import ESTIMATORS_OF_VERL, POLICY_LOSSES_OF_VERL
from miles.compat.translate.objective import (
    Objective,
    Reduction,
    over_longest,
    over_padded_width,
    sequence_mean,
    sequence_mean_of_unmasked_in_micro_batches,
    sequence_sum_mean,
    sequence_sum_mean_of_unmasked_in_micro_batches,
    token_mean,
    token_mean_of_micro_batches,
    token_sum,
)
from miles.compat.translate.translation import Document, Row, Translation, apply, write_estimator, write_kl_in_rewards
from miles.objective.aggregation import Aggregation

SOURCE = "verl 0.9.1, agg_loss in verl/trainer/ppo/core_algos.py"

ACTOR, ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
MEMORY = "memory and speed only"
ENGINE = "the engine's own setting; give the matching --sglang- flag"
FOLLOWS = "its mean follows loss_agg_mode there; a sample mean here"

ROWS = {
    "actor_rollout_ref.model.path": Row("--hf-checkpoint"),
    "data.prompt_key": Row("--input-key", default="prompt"),
    "data.train_batch_size": Row("--rollout-batch-size", kind="number", default=1024),
    "data.max_response_length": Row("--rollout-max-response-len", kind="number", default=512),
    "data.max_prompt_length": Row(
        "--rollout-max-prompt-len", "longer prompts are dropped here; there data.truncation decides", "number", 512
    ),
    "data.truncation": Row("", "prompts are never cut here; longer ones are dropped"),
    "data.filter_overlong_prompts": Row("", "longer prompts are always dropped here", "switch", neutral=(True,)),
    "data.shuffle": Row("--rollout-shuffle", kind="switch"),
    "data.seed": Row("--rollout-seed", kind="number"),
    "data.return_raw_chat": Row("", "prompts are read as chat messages with --apply-chat-template"),
    ROLLOUT + "n": Row("--n-samples-per-prompt", kind="number"),
    ROLLOUT + "temperature": Row("--rollout-temperature", kind="number"),
    ROLLOUT + "top_p": Row("--rollout-top-p", kind="number"),
    ROLLOUT + "top_k": Row("--rollout-top-k", kind="number"),
    ROLLOUT + "tensor_model_parallel_size": Row("--rollout-num-gpus-per-engine", kind="number", default=2),
    ROLLOUT + "gpu_memory_utilization": Row("", ENGINE),
    ROLLOUT + "enforce_eager": Row("", ENGINE),
    ROLLOUT + "free_cache_engine": Row("", ENGINE),
    ROLLOUT + "enable_chunked_prefill": Row("", ENGINE),
    ROLLOUT + "max_num_batched_tokens": Row("", ENGINE),
    ROLLOUT + "max_num_seqs": Row("", ENGINE),
    ROLLOUT + "max_model_len": Row("--rollout-max-context-len", kind="number"),
    ROLLOUT + "load_format": Row("", ENGINE),
    ROLLOUT + "mode": Row("", "engines always run beside the loop here; --async-steps generates ahead"),
    ROLLOUT + "val_kwargs.temperature": Row("--eval-temperature", kind="number"),
    ROLLOUT + "val_kwargs.top_p": Row("--eval-top-p", kind="number"),
    ROLLOUT + "val_kwargs.top_k": Row("--eval-top-k", kind="number"),
    ROLLOUT + "val_kwargs.n": Row("--n-samples-per-eval-prompt", kind="number"),
    ROLLOUT + "val_kwargs.do_sample": Row("", "temperature 0 is greedy here", neutral=(True,)),
    ROLLOUT + "log_prob_micro_batch_size_per_gpu": Row("", MEMORY),
    ROLLOUT + "log_prob_use_dynamic_bsz": Row("", MEMORY),
    ROLLOUT + "log_prob_max_token_len_per_gpu": Row("", MEMORY),
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": Row("", MEMORY),
    "actor_rollout_ref.ref.log_prob_use_dynamic_bsz": Row("", MEMORY),
    "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu": Row("", MEMORY),
    "actor_rollout_ref.ref.fsdp_config.param_offload": Row("", MEMORY),
    "actor_rollout_ref.model.use_remove_padding": Row("", "samples are packed here (--qkv-format thd)"),
    "actor_rollout_ref.model.enable_gradient_checkpointing": Row("--gradient-checkpointing", kind="switch"),
    "actor_rollout_ref.model.lora_rank": Row("", "see --lora-rank in the list of launch scripts", neutral=(0,)),
    ACTOR + "optim.lr": Row("--lr", kind="number"),
    ACTOR + "optim.weight_decay": Row("--weight-decay", kind="number"),
    ACTOR + "optim.lr_warmup_steps": Row("--lr-warmup-iters", kind="number", neutral=(-1,)),
    ACTOR + "optim.lr_warmup_steps_ratio": Row("--lr-warmup-fraction", kind="number", neutral=(0,)),
    ACTOR + "optim.clip_grad": Row("--clip-grad", kind="number"),
    ACTOR + "grad_clip": Row("--clip-grad", kind="number"),
    ACTOR + "strategy": Row("--train-backend", "its own sharding there", neutral=("fsdp2",)),
    ACTOR + "ppo_micro_batch_size_per_gpu": Row("--micro-batch-size", kind="number"),
    ACTOR + "use_dynamic_bsz": Row("--use-dynamic-batch-size", kind="switch"),
    ACTOR + "ppo_epochs": Row("--ppo-epochs", kind="number", neutral=(1,)),
    ACTOR + "entropy_coeff": Row("--entropy-coef", FOLLOWS, "number", neutral=(0,)),
    ACTOR + "ulysses_sequence_parallel_size": Row(
        "--context-parallel-size", "another way to share a sequence", "number"
    ),
    ACTOR + "fsdp_config.param_offload": Row("", MEMORY),
    ACTOR + "fsdp_config.optimizer_offload": Row("", MEMORY),
    ACTOR + "fsdp_config.fsdp_size": Row("", MEMORY, neutral=(-1,)),
    ACTOR + "megatron.tensor_model_parallel_size": Row("--tensor-model-parallel-size", kind="number"),
    ACTOR + "megatron.pipeline_model_parallel_size": Row("--pipeline-model-parallel-size", kind="number"),
    ACTOR + "megatron.context_parallel_size": Row("--context-parallel-size", kind="number"),
    ACTOR + "megatron.expert_model_parallel_size": Row("--expert-model-parallel-size", kind="number"),
    "trainer.n_gpus_per_node": Row("--actor-num-gpus-per-node", kind="number"),
    "trainer.nnodes": Row("--actor-num-nodes", kind="number"),
    "trainer.total_training_steps": Row("--num-rollout", kind="number"),
    "trainer.default_local_dir": Row("--save"),
    "trainer.save_freq": Row("--save-interval", kind="number", neutral=(-1,), needs="--save"),
    "trainer.test_freq": Row("--eval-interval", kind="number", neutral=(-1,)),
    "trainer.project_name": Row("--wandb-project", needs="--use-wandb"),
    "trainer.experiment_name": Row("--wandb-group", needs="--use-wandb"),
    "trainer.critic_warmup": Row("--num-critic-only-steps", "iterations here", "number", neutral=(0,)),
    "trainer.val_before_train": Row("", "evaluation comes first unless --skip-eval-before-train", neutral=(True,)),
    "trainer.balance_batch": Row("--balance-data", kind="switch"),
    "trainer.resume_mode": Row("", "use --load"),
    "critic.optim.lr": Row("--critic-lr", kind="number"),
    "critic.cliprange_value": Row("--value-clip", kind="number"),
    "algorithm.filter_groups.metric": Row("", "the filter of this version looks at the rewards"),
    "algorithm.filter_groups.max_num_gen_batches": Row("", "generation continues until the iteration is full here"),
    "custom_reward_function.path": Row("", "write a function (samples) -> rewards and name it with --custom-rm-path"),
    "custom_reward_function.name": Row("", "see custom_reward_function.path"),
    "reward.custom_reward_function.path": Row("", "write a function (samples) -> rewards for --custom-rm-path"),
    "reward.custom_reward_function.name": Row("", "see reward.custom_reward_function.path"),
}

CLIPPED = ("vanilla", "gspo", "bypass_mode", "clip_cov")  # policy losses that read clip_ratio_low, clip_ratio_high
KL_TYPES = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "low_var_kl", "k3": "low_var_kl"}

# loss_agg_mode -> mode, divisor there and here, reduction, formula, what it is without the counts of the whole batch
MODES: dict[str, tuple[Aggregation, Reduction, str, Reduction]] = {
    "token-mean": ("token_mean", token_mean, "1/T Σ m l", token_mean_of_micro_batches),
    "token-sum": ("constant", token_sum, "Σ m l", token_sum),
    "seq-mean-token-mean": (
        "sample_mean",
        sequence_mean,
        "1/B Σ_i 1/(M_i + 1e-8) Σ_t m l",
        sequence_mean_of_unmasked_in_micro_batches,
    ),
    "seq-mean-token-sum": (
        "constant",
        sequence_sum_mean,
        "1/B Σ_i Σ_t m l",
        sequence_sum_mean_of_unmasked_in_micro_batches,
    ),
    "seq-mean-token-sum-norm": (
        "constant",
        over_longest(sequence_sum_mean),
        "1/(L B) Σ m l, L = loss_scale_factor",
        over_longest(sequence_sum_mean_of_unmasked_in_micro_batches),
    ),
}
LOCAL = "without the whole batch's counts"


class Verl(Launcher):
    """verl's PPO trainer."""

    name = "verl"
    version = "verl 0.9.1"
    reads = ("yaml", "shell")

    def recognizes(self, document: Document) -> bool:
        """By the names of its configuration, or its module in a command."""
        names = ("actor_rollout_ref.", "algorithm.adv_estimator")
        return any(key.startswith(names) for key in document.settings) or any("verl." in w for w in document.words)

    def translate(self, translation: Translation) -> Objective:
        """Translate the settings of ``ppo_trainer.yaml``."""
        for key in list(translation.document.settings):
            if key.startswith("defaults") or key.endswith("_target_") or key in ("--config-path", "--config-name"):
                translation.take([key])
        _logger(translation)
        apply(ROWS, translation)
        _prompts(translation)
        if translation.has("data.train_files"):
            why = "prompts are chat messages, and the answer is a part of a column; its default reward is none of ours"
            words = ["--apply-chat-template", "--label-key", "reward_model.ground_truth"]
            translation.differ("the columns of data.train_files", why, *words)
        _batch(translation)
        _estimator(translation)
        _policy(translation)
        _kl(translation)
        _engine(translation)
        _correction(translation)
        return _objective(translation)


def _logger(translation: Translation) -> None:
    key, why = "trainer.logger", "console, TensorBoard and the report are always written"
    names = translation.raw(key, [] if translation.has(key) else ["console", "wandb"])
    names = names if isinstance(names, list) else [names]
    if "wandb" in names and (translation.has(key) or translation.has("trainer.project_name")):
        translation.differ(key, why, "--use-wandb")
    elif translation.has(key):
        translation.miss(key, why)


def _prompts(translation: Translation) -> None:
    files = translation.raw("data.train_files")
    names = files if isinstance(files, list) else [files]
    if len(names) > 1:
        translation.miss("data.train_files", "one file of prompts here: join them, and give it with --prompt-data")
    elif files:
        translation.carry("data.train_files", "--prompt-data", *names)
    files = translation.raw("data.val_files")
    names = files if isinstance(files, list) else [files]
    if files and translation.number("trainer.test_freq", -1) > 0:
        sets = [("val" if len(names) == 1 else f"val{number}", name) for number, name in enumerate(names)]
        translation.carry("data.val_files", "--eval-prompt-data", *(word for pair in sets for word in pair))
    elif files:
        translation.miss("data.val_files", "trainer.test_freq asks for no evaluation during the training")


def _batch(translation: Translation) -> None:
    group, prompts = translation.count(ROLLOUT + "n", 1), translation.count(ACTOR + "ppo_mini_batch_size", 256)
    why = f"prompts there, trajectories here: {prompts} · {group}"
    translation.differ(ACTOR + "ppo_mini_batch_size", why, "--global-batch-size", prompts * group)
    key = ACTOR + "ppo_max_token_len_per_gpu"
    if translation.has(ACTOR + "use_dynamic_bsz") and translation.switch(ACTOR + "use_dynamic_bsz"):
        translation.carry(key, "--max-tokens-per-gpu", translation.count(key, 16384))
    elif translation.has(key):
        translation.miss(key, "without use_dynamic_bsz it has no effect")
    translation.take(["trainer.total_epochs"])
    if not translation.has("trainer.total_training_steps"):
        translation.carry("trainer.total_epochs", "--num-epoch", translation.count("trainer.total_epochs", 30))
    elif translation.has("trainer.total_epochs"):
        translation.miss("trainer.total_epochs", "total_training_steps takes precedence")
    if betas := translation.pair(ACTOR + "optim.betas"):
        translation.carry(ACTOR + "optim.betas", "--adam-beta1", betas[0], "--adam-beta2", betas[1])
    style = translation.text(ACTOR + "optim.lr_scheduler_type", "constant")
    if style in ("constant", "cosine"):
        translation.carry(ACTOR + "optim.lr_scheduler_type", "--lr-decay-style", style)
    else:
        translation.miss(ACTOR + "optim.lr_scheduler_type", "the shapes here are constant, linear, cosine")


def _estimator(translation: Translation) -> None:
    name = translation.text("algorithm.adv_estimator", "gae")
    if name in ESTIMATORS_OF_VERL:
        write_estimator(translation, "algorithm.adv_estimator", *ESTIMATORS_OF_VERL[name].split())
    else:
        translation.miss("algorithm.adv_estimator", f"{name} is not one of verl 0.9.1")
    key = "algorithm.norm_adv_by_std_in_grpo"
    if translation.has(key):
        is_on = translation.switch(key)
        translation.carry(key, *([] if is_on else ["--disable-grpo-std-normalization"]))
    for key, flag in (("algorithm.gamma", "--gamma"), ("algorithm.lam", "--lambd")):
        if translation.has(key):
            reads = name == "gae" or (flag == "--gamma" and name == "reinforce_plus_plus")
            if reads:
                translation.carry(key, flag, translation.number(key, 1.0))
            else:
                translation.miss(key, f"{name} does not read it")
    key = "algorithm.filter_groups.enable"
    if translation.has(key) and translation.switch(key):
        path = "miles.rollout.filters:check_reward_nonzero_std"
        why = "drops groups whose rewards are all equal; there by algorithm.filter_groups.metric"
        translation.differ(key, why, "--dynamic-sampling-filter-path", path)
    elif translation.has(key):
        translation.carry(key)


def _policy(translation: Translation) -> None:
    mode = translation.text(ACTOR + "policy_loss.loss_mode", "vanilla")
    low, high = (translation.number(ACTOR + f"clip_ratio_{end}", 0.2) for end in ("low", "high"))
    key = ACTOR + "policy_loss.loss_mode"
    if mode == "vanilla":
        translation.carry(key, "--policy-loss", "ppo")
        translation.carry(ACTOR + "clip_ratio_c", "--eps-clip-c", translation.number(ACTOR + "clip_ratio_c", 3.0))
    elif mode == "gspo":
        translation.carry(key, "--policy-loss", "gspo")
    elif mode == "cispo":
        why = "bounds of the ratio are absolute here; they are 1 - clip_ratio_low and 1 + clip_ratio_high there"
        translation.differ(key, why, "--policy-loss", "cispo", "--ratio-max", 1 + high, "--ratio-min", 1 - low)
    elif mode in POLICY_LOSSES_OF_VERL:
        why = "the flags have verl's defaults: settings of this loss are not read (page Objectives of the docs)"
        translation.differ(key, why, *POLICY_LOSSES_OF_VERL[mode].split())
    else:
        translation.miss(key, f"{mode} is not one of verl 0.9.1")
    if translation.has(ACTOR + "clip_ratio"):
        clip = translation.number(ACTOR + "clip_ratio", 0.2)
        if translation.has(ACTOR + "clip_ratio_low") and translation.has(ACTOR + "clip_ratio_high"):
            translation.miss(ACTOR + "clip_ratio", "clip_ratio_low and clip_ratio_high take precedence")
        else:
            why = (
                f"clip_ratio_low and clip_ratio_high are 0.2 by default and take precedence, so {clip:g} has no effect"
            )
            translation.miss(ACTOR + "clip_ratio", why)
    if mode in CLIPPED:
        translation.carry(ACTOR + "clip_ratio_low", "--eps-clip", low)
        translation.carry(ACTOR + "clip_ratio_high", "--eps-clip-high", high)


def _kl(translation: Translation) -> None:
    key, kind_key = ACTOR + "use_kl_loss", ACTOR + "kl_loss_type"
    coefficient = translation.number(ACTOR + "kl_loss_coef", 0.001)
    kind = translation.text(kind_key, "low_var_kl")
    if translation.has(key) and translation.switch(key):
        translation.differ(key, FOLLOWS, "--use-kl-loss")
        translation.carry(ACTOR + "kl_loss_coef", "--kl-loss-coef", coefficient)
        if kind in KL_TYPES:
            translation.carry(kind_key, "--kl-loss-type", KL_TYPES[kind])
        else:
            translation.miss(kind_key, f"{kind} is no estimator of the KL here; give --kl-loss-type")
    else:
        if translation.has(key):
            translation.carry(key)
        translation.miss_given((ACTOR + "kl_loss_coef", kind_key), "without use_kl_loss it has no effect")
    reward, weight = "algorithm.use_kl_in_reward", "algorithm.kl_ctrl.kl_coef"
    if translation.has(reward) and translation.switch(reward):
        if write_kl_in_rewards(translation, weight, translation.number(weight, 0.001)):
            _kl_control(translation)
            _kl_penalty(translation)
        else:
            translation.miss_given((*_KL_CONTROL, _KL_PENALTY), f"it belongs to {weight}")
    else:
        why = "without algorithm.use_kl_in_reward it has no effect"
        translation.miss_given((weight, *_KL_CONTROL, _KL_PENALTY), why)
    if translation.has(reward) and not translation.switch(reward):
        translation.carry(reward)


_KL_PENALTY = "algorithm.kl_penalty"
_KL_CONTROL = tuple(f"algorithm.kl_ctrl.{name}" for name in ("type", "target_kl", "horizon"))


def _kl_penalty(translation: Translation) -> None:
    penalty = translation.text(_KL_PENALTY, "kl")
    if penalty in KL_TYPES:
        translation.carry(_KL_PENALTY, "--kl-loss-type", KL_TYPES[penalty])
    else:
        translation.miss(_KL_PENALTY, f"{penalty} is no estimator of the KL here")


def _kl_control(translation: Translation) -> None:
    kind, target, horizon = _KL_CONTROL
    if translation.text(kind, "fixed") == "adaptive":
        translation.carry(kind)
        translation.carry(target, "--kl-target", translation.number(target, 0.1))
        translation.carry(horizon, "--kl-horizon", translation.number(horizon, 10000))
        return
    if translation.has(kind):
        translation.carry(kind)
    for name in filter(translation.has, (target, horizon)):
        translation.miss(name, "without kl_ctrl.type=adaptive it has no effect")


def _engine(translation: Translation) -> None:
    key = ROLLOUT + "name"
    if translation.has(key):
        name = translation.text(key)
        if name == "sglang":
            translation.carry(key, "--rollout-engine", "sglang")
        else:
            translation.differ(key, "SGLang generates here", "--rollout-engine", "sglang")
    hybrid = "actor_rollout_ref.hybrid_engine"
    if translation.switch(hybrid, True):
        translation.carry(hybrid, "--colocate")
    else:
        translation.carry(hybrid)


def _correction(translation: Translation) -> None:
    key, bound = "algorithm.rollout_correction.rollout_is", "algorithm.rollout_correction.rollout_is_threshold"
    if translation.has(key):
        level = translation.text(key)
        if level not in ("token", "sequence"):
            translation.miss(key, "the levels here are token, sequence and geometric (--tis-level)")
        else:
            translation.carry(key, "--use-tis", "--tis-level", level)
            translation.carry(bound, "--tis-clip", translation.number(bound, 2.0))
    elif translation.has(bound):
        translation.miss(bound, "without rollout_is it has no effect")


def _objective(translation: Translation) -> Objective:
    key, factor = ACTOR + "loss_agg_mode", ACTOR + "loss_scale_factor"
    name = translation.text(key, "token-mean")
    if name not in MODES:
        translation.fail(key, f"is no mode of {SOURCE}; it has {', '.join(MODES)}")
    mode, reduce, formula, local = MODES[name]
    n = translation.count(ACTOR + "ppo_mini_batch_size", 256) * translation.count(ROLLOUT + "n", 1)
    words, divisor, depends, remarks, exact = ["--loss-aggregation", mode], 8.0, "", [], True
    if name == "token-sum":
        words += ["--loss-aggregation-divisor", repr(1 / n)]
        remarks.append(f"L = 1/N = 1/{n}: it moves with the size of the step, and so does the gradient.")
    elif name == "seq-mean-token-sum":
        words += ["--loss-aggregation-divisor", "1"]
        divisor = 1.0
    elif name == "seq-mean-token-sum-norm":
        if translation.has(factor):
            words += ["--loss-aggregation-divisor", str(translation.raw(factor))]
            translation.number(factor, 1)
            translation.carry(factor)
        else:
            longest = translation.count("data.max_response_length", 512)
            words += ["--loss-aggregation-divisor", str(longest)]
            reduce, exact = over_padded_width, False
            formula = "1/B Σ_micro-batches 1/W Σ m l, W = padded width of the micro-batch's responses"
            depends = "padding and micro-batches, because loss_scale_factor is not set"
    if translation.has(factor) and name != "seq-mean-token-sum-norm":
        translation.miss(factor, f"{name} does not read it")
    if name.startswith("seq"):
        remarks.append(
            "B is the configured mini-batch. Without a global batch size (one rank, own loop) the mean leaves fully "
            "masked responses out, and each micro-batch has its own."
        )
    remarks.append("Entropy and KL terms follow the mode there; here they are sample means.")
    if exact:
        translation.carry(key, *words)
    else:
        translation.differ(key, f"depends on {depends}", *words)
    variants = {} if name == "token-sum" or not exact else {LOCAL: local}
    return Objective(
        f"{key} = {name}",
        formula,
        SOURCE,
        reduce,
        mode,
        tuple(words),
        None if name == "token-sum" else divisor,
        depends,
        variants,
        exact,
        tuple(remarks),
    )


VERL = Verl()
