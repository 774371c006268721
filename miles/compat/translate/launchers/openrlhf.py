"""OpenRLHF: the flags of ``openrlhf.cli.train_ppo_ray`` in a shell script. The tables have the names with dots."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from miles.compat.translate.launchers import openrlhf_underscores
from miles.compat.translate.launchers.base import Launcher
from miles.compat.translate.objective import Objective, sequence_mean_of_unmasked, token_mean
from miles.compat.translate.translation import Document, Row, Translation, apply, write_estimator, write_kl_in_rewards
from miles.objective.policy_losses import POLICY_LOSSES

SOURCE = "OpenRLHF 0.11.2, openrlhf/models/loss.py and openrlhf/utils/loss_utils.py"

ENGINE = "the engine's own setting; give the matching --sglang- flag"
MEMORY = "memory and speed only"

ROWS = {
    "--actor.model_name_or_path": Row("--hf-checkpoint"),
    "--data.prompt_dataset": Row("--prompt-data", "a name of the Hub is written hf:NAME here", "prompts"),
    "--data.input_key": Row("--input-key"),
    "--data.label_key": Row("--label-key"),
    "--data.apply_chat_template": Row("--apply-chat-template", kind="switch"),
    "--data.max_len": Row("--rollout-max-context-len", kind="number", default=2048),
    "--rollout.max_new_tokens": Row("--rollout-max-response-len", kind="number"),
    "--rollout.n_samples_per_prompt": Row("--n-samples-per-prompt", kind="number"),
    "--rollout.batch_size": Row("--rollout-batch-size", kind="number", default=1024),
    "--rollout.temperature": Row("--rollout-temperature", kind="number"),
    "--rollout.top_p": Row("--rollout-top-p", kind="number"),
    "--train.batch_size": Row("--global-batch-size", kind="number", default=128),
    "--train.micro_batch_size": Row("--micro-batch-size", kind="number"),
    "--train.dynamic_batch_enable": Row("--use-dynamic-batch-size", kind="switch"),
    "--train.max_tokens_per_gpu": Row("--max-tokens-per-gpu", "used with dynamic batches only", "number"),
    "--train.num_episodes": Row("--num-epoch", kind="number", default=1),
    "--train.max_epochs": Row("", "each sample is trained on once here", "number", neutral=(1,)),
    "--train.seed": Row("--seed", kind="number"),
    "--train.async_enable": Row(
        "--async-steps", "give the number of iterations ahead; --train.async_queue_size", "flag"
    ),
    "--train.partial_rollout_enable": Row("", "see --fully-async, whose responses continue with new weights"),
    "--actor.eps_clip": Row("--eps-clip", kind="number"),
    "--actor.dual_clip": Row("--eps-clip-c", kind="number"),
    "--actor.entropy_coef": Row("--entropy-coef", "a token mean there, a sample mean here", "number"),
    "--actor.adam.lr": Row("--lr", kind="number"),
    "--actor.adam.eps": Row("--adam-eps", kind="number"),
    "--actor.adam.weight_decay": Row("--weight-decay", kind="number", default=0),
    "--actor.max_norm": Row("--clip-grad", kind="number"),
    "--actor.lr_warmup_ratio": Row("--lr-warmup-fraction", kind="number", default=0.03),
    "--actor.num_nodes": Row("--actor-num-nodes", kind="number"),
    "--actor.num_gpus_per_node": Row("--actor-num-gpus-per-node", kind="number"),
    "--actor.gradient_checkpointing_enable": Row("--gradient-checkpointing", kind="switch"),
    "--vllm.tensor_parallel_size": Row("--rollout-num-gpus-per-engine", kind="number"),
    "--vllm.gpu_memory_utilization": Row("", ENGINE),
    "--vllm.enable_prefix_caching": Row("", ENGINE),
    "--vllm.enforce_eager": Row("", ENGINE),
    "--vllm.enable_sleep": Row("", ENGINE),
    "--vllm.sync_backend": Row("", "see --update-weight-transfer-mode"),
    "--ds.zero_stage": Row("", MEMORY),
    "--ds.adam_offload": Row("", MEMORY),
    "--ds.packing_samples": Row("", "samples are always packed here"),
    "--ds.attn_implementation": Row("", MEMORY),
    "--ckpt.path": Row("--save"),
    "--ckpt.output_dir": Row("--save-hf", "at the end of the run there; with each checkpoint of --save too here"),
    "--ckpt.save_steps": Row("--save-interval", kind="number", needs="--save"),
    "--eval.steps": Row("--eval-interval", "needs --eval-prompt-data", "number"),
    "--logger.wandb.project": Row("--wandb-project", needs="--use-wandb"),
    "--reward.model_name_or_path": Row("", "rewards are functions here: --rm-type or --custom-rm-path"),
    "--reward.remote_url": Row("", "rewards are functions here; yours can call a server (--custom-rm-path)"),
}

# What some estimators read alone: the flag, those estimators, and why others do not
OF_ESTIMATORS = {
    "--algo.advantage.gamma": ("--gamma", ("gae", "reinforce"), "it is 1 with this estimator"),
    "--algo.advantage.lambd": ("--lambd", ("gae",), "this estimator does not read it"),
    "--critic.adam.lr": ("--critic-lr", ("gae",), "there is no critic with this estimator"),
    "--critic.value_clip": ("--value-clip", ("gae",), "there is no critic with this estimator"),
}

ESTIMATORS = {
    "gae": ("ppo", "--normalize-advantages"),
    "reinforce": ("reinforce_plus_plus", "--normalize-advantages"),
    "reinforce_baseline": ("reinforce_plus_plus_baseline", "--normalize-advantages"),
    "rloo": ("rloo",),
    "group_norm": ("grpo",),
    "dr_grpo": ("grpo", "--disable-grpo-std-normalization"),
}


class OpenRlhf(Launcher):
    """OpenRLHF's PPO trainer on Ray."""

    name = "openrlhf"
    version = "OpenRLHF 0.11.2, and 0.9.10 for flags with underscores"
    reads = ("shell",)

    def recognizes(self, document: Document) -> bool:
        """By its module in the command."""
        return any(word.startswith("openrlhf.") or "train_ppo_ray" in word for word in document.words)

    def translate(self, translation: Translation) -> Objective:
        """Translate the flags: those with dots, or those of earlier releases."""
        earlier, given = openrlhf_underscores.EARLIER, translation.document.settings
        is_earlier = bool({*earlier.values(), *openrlhf_underscores.ROWS} & given.keys())

        def named(key: str) -> str:
            return earlier.get(key, key) if is_earlier else key

        translation.take([queue := named("--train.async_queue_size")])
        if translation.has(key := named("--train.async_enable")):
            translation.differ(key, f"see {queue} there", "--async-steps", 1)
        _wandb(translation, named)
        rows = {named(key): row for key, row in ROWS.items() if row.kind != "flag"}
        if {"--prompt_max_len", "--generate_max_len"} & given.keys():  # 0.9.0 has no bound of their sum
            rows["--max_len"] = replace(rows["--max_len"], default=None)
        apply(rows, translation)
        if is_earlier:
            apply(openrlhf_underscores.ROWS, translation)
        _estimator(translation, named)
        _kl(translation, named)
        _optimizer(translation, named)
        _engines(translation, named)
        key = named("--actor.eps_clip_low_high")
        if bounds := translation.pair(key):
            translation.carry(key, "--eps-clip", bounds[0], "--eps-clip-high", bounds[1])
        if translation.has(key := named("--actor.policy_loss_type")):
            name = translation.text(key)
            if name in POLICY_LOSSES:
                translation.carry(key, "--policy-loss", name)
            else:
                translation.miss(key, f"{name} is no policy loss here (--custom-policy-loss-function-path)")
        return openrlhf_underscores.objective_of(translation) if is_earlier else _objective(translation)


def _wandb(translation: Translation, named: Callable[[str], str]) -> None:
    key = named("--logger.wandb.key")
    if translation.has(key):
        settings = translation.document.settings
        settings[key] = replace(settings[key], value="(a key of W&B)")
        translation.differ(key, "export the key as WANDB_API_KEY, or log in with wandb login", "--use-wandb")


def _estimator(translation: Translation, named: Callable[[str], str]) -> None:
    key = named("--algo.advantage.estimator")
    name = translation.text(key, "gae")
    if name in ESTIMATORS:
        write_estimator(translation, key, "--advantage-estimator", *ESTIMATORS[name])
    else:
        translation.miss(key, f"{name} is no estimator here (--custom-advantage-function-path)")
    if translation.has(plain := named("--algo.advantage.no_std_norm")):
        whitens = "--normalize-advantages" in ESTIMATORS.get(name, ())
        why = "whitening always divides by the std here" if whitens else f"{name} does not read it"
        translation.miss(plain, why)
    for key, (flag, readers, why) in OF_ESTIMATORS.items():
        if not translation.has(key := named(key)):
            continue
        if name in readers:
            translation.carry(key, flag, translation.number(key, 0))
        else:
            translation.miss(key, why)


def _kl(translation: Translation, named: Callable[[str], str]) -> None:
    weight, kind, in_loss = map(named, ("--algo.kl.init_coef", "--algo.kl.estimator", "--algo.kl.use_loss"))
    coefficient = translation.number(weight, 0.01)
    translation.take([kind, in_loss])
    if coefficient:
        if translation.has(in_loss):
            why = "a token mean there, a sample mean here"
            translation.differ(weight, why, "--use-kl-loss", "--kl-loss-coef", coefficient)
        else:
            write_kl_in_rewards(translation, weight, coefficient)
        translation.carry(kind, "--kl-loss-type", translation.text(kind, "k1"))
    elif translation.has(weight):
        translation.carry(weight)


def _optimizer(translation: Translation, named: Callable[[str], str]) -> None:
    key = named("--actor.adam.betas")
    if betas := translation.pair(key, [0.9, 0.95]):
        translation.carry(key, "--adam-beta1", betas[0], "--adam-beta2", betas[1])
    key = named("--actor.lr_scheduler")
    name = translation.text(key, "cosine_with_min_lr")
    least = named("--actor.min_lr_ratio")
    ratio = translation.number(least, 0.1)
    if name == "cosine_with_min_lr":
        rate = translation.number(named("--actor.adam.lr"), 1e-6)
        translation.carry(key, "--lr-decay-style", "cosine", "--min-lr", f"{rate * ratio:.12g}")
    elif name.removesuffix("_with_warmup") in ("constant", "linear", "cosine"):
        translation.carry(key, "--lr-decay-style", name.removesuffix("_with_warmup"))
    else:
        translation.miss(key, f"{name} is no --lr-decay-style here")


def _engines(translation: Translation, named: Callable[[str], str]) -> None:
    key, colocate = named("--vllm.num_engines"), named("--train.colocate_all")
    shared = translation.switch(colocate) and not translation.has(named("--train.async_enable"))
    if shared:
        translation.carry(colocate, "--colocate")
    elif translation.has(colocate):
        translation.miss(colocate, "with asynchronous training the engines have devices of their own")
    if not translation.has(key):
        return
    devices = translation.count(key, 1) * translation.count(named("--vllm.tensor_parallel_size"), 1)
    if shared:
        translation.carry(key)  # all devices of the trainer
    else:
        translation.carry(key, "--rollout-num-gpus", devices)


def _objective(translation: Translation) -> Objective:
    key = "--actor.loss_agg_mode"
    name = translation.text(key, "token-mean")
    if name == "token-mean":
        translation.carry(key, "--loss-aggregation", "token_mean")
        return Objective(
            f"{key} {name}",
            "1/T Σ m l",
            SOURCE,
            token_mean,
            "token_mean",
            ("--loss-aggregation", "token_mean"),
        )
    if name != "seq-mean-token-mean":
        translation.fail(key, f"is no mode of {SOURCE}; it has token-mean, seq-mean-token-mean")
    depends = "fully masked samples: they are left out of B'"
    translation.differ(key, f"depends on {depends}", "--loss-aggregation", "sample_mean")
    return Objective(
        f"{key} {name}",
        "1/B' Σ_i 1/(M_i + 1e-8) Σ_t m l, B' = samples with a loss token",
        SOURCE,
        sequence_mean_of_unmasked,
        "sample_mean",
        ("--loss-aggregation", "sample_mean"),
        depends=depends,
        exact=False,
    )


OPENRLHF = OpenRlhf()
