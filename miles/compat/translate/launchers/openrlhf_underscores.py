"""The flags of OpenRLHF up to 0.10.1, which are written with underscores.

The names are those of ``openrlhf/cli/train_ppo_ray.py`` in the wheels of 0.8.0, 0.9.0, 0.9.10 and 0.10.1.
"""

from __future__ import annotations

from miles.compat.translate.objective import Objective, sequence_mean, token_mean_of_micro_batches
from miles.compat.translate.translation import Row, Translation

SOURCE = "OpenRLHF 0.9.10, openrlhf/models/loss.py and openrlhf/models/utils.py"

MEMORY = "memory and speed only"
PROCESSES = "policy, reference and critic are in the same processes here"
MODELS = "rewards are functions here: no model scores, and none is placed"
ALWAYS = "it is always so here"

# The name of a flag since the names have dots, and its name before.
EARLIER = {
    "--actor.model_name_or_path": "--pretrain",
    "--data.prompt_dataset": "--prompt_data",
    "--data.input_key": "--input_key",
    "--data.label_key": "--label_key",
    "--data.apply_chat_template": "--apply_chat_template",
    "--data.max_len": "--max_len",
    "--rollout.max_new_tokens": "--max_new_tokens",
    "--rollout.n_samples_per_prompt": "--n_samples_per_prompt",
    "--rollout.batch_size": "--rollout_batch_size",
    "--rollout.temperature": "--temperature",
    "--rollout.top_p": "--top_p",
    "--train.batch_size": "--train_batch_size",
    "--train.micro_batch_size": "--micro_train_batch_size",
    "--train.dynamic_batch_enable": "--use_dynamic_batch",
    "--train.max_tokens_per_gpu": "--train_max_tokens_per_gpu",
    "--train.num_episodes": "--num_episodes",
    "--train.max_epochs": "--max_epochs",
    "--train.colocate_all": "--colocate_all_models",
    "--train.seed": "--seed",
    "--train.async_enable": "--async_train",
    "--train.async_queue_size": "--async_queue_size",
    "--train.partial_rollout_enable": "--partial_rollout",
    "--actor.eps_clip": "--eps_clip",
    "--actor.eps_clip_low_high": "--eps_clip_low_high",
    "--actor.dual_clip": "--dual_clip",
    "--actor.entropy_coef": "--entropy_loss_coef",
    "--actor.policy_loss_type": "--policy_loss_type",
    "--actor.num_nodes": "--actor_num_nodes",
    "--actor.num_gpus_per_node": "--actor_num_gpus_per_node",
    "--actor.gradient_checkpointing_enable": "--gradient_checkpointing",
    "--actor.adam.lr": "--actor_learning_rate",
    "--actor.adam.betas": "--adam_betas",
    "--actor.adam.weight_decay": "--l2",
    "--actor.max_norm": "--max_norm",
    "--actor.lr_scheduler": "--lr_scheduler",
    "--actor.lr_warmup_ratio": "--lr_warmup_ratio",
    "--critic.adam.lr": "--critic_learning_rate",
    "--critic.value_clip": "--value_clip",
    "--algo.advantage.estimator": "--advantage_estimator",
    "--algo.advantage.no_std_norm": "--no_advantage_std_norm",
    "--algo.advantage.gamma": "--gamma",
    "--algo.advantage.lambd": "--lambd",
    "--algo.kl.init_coef": "--init_kl_coef",
    "--algo.kl.estimator": "--kl_estimator",
    "--algo.kl.use_loss": "--use_kl_loss",
    "--vllm.num_engines": "--vllm_num_engines",
    "--vllm.tensor_parallel_size": "--vllm_tensor_parallel_size",
    "--vllm.gpu_memory_utilization": "--vllm_gpu_memory_utilization",
    "--vllm.enable_prefix_caching": "--enable_prefix_caching",
    "--vllm.enforce_eager": "--enforce_eager",
    "--vllm.enable_sleep": "--vllm_enable_sleep",
    "--vllm.sync_backend": "--vllm_sync_backend",
    "--ds.zero_stage": "--zero_stage",
    "--ds.adam_offload": "--adam_offload",
    "--ds.packing_samples": "--packing_samples",
    "--ds.attn_implementation": "--attn_implementation",
    "--ckpt.path": "--ckpt_path",
    "--ckpt.output_dir": "--save_path",
    "--ckpt.save_steps": "--save_steps",
    "--eval.steps": "--eval_steps",
    "--logger.wandb.key": "--use_wandb",
    "--logger.wandb.project": "--wandb_project",
    "--reward.model_name_or_path": "--reward_pretrain",
    "--reward.remote_url": "--remote_rm_url",
}

ROWS = {
    "--prompt_max_len": Row("--rollout-max-prompt-len", "longer prompts are cut there, left out here", "number"),
    "--generate_max_len": Row("--rollout-max-response-len", kind="number"),
    "--bf16": Row("--bf16", kind="switch"),
    "--param_dtype": Row("", "--bf16 and --fp32 choose the precision", neutral=("bf16",)),
    "--ring_attn_size": Row("--context-parallel-size", kind="number"),
    "--full_determinism": Row("--deterministic-mode", kind="switch"),
    "--kl_target": Row("--kl-target", kind="number"),
    "--kl_horizon": Row("--kl-horizon", kind="number"),
    "--eval_dataset": Row("--eval-prompt-data", "needs --eval-interval"),
    "--eval_n_samples_per_prompt": Row("--n-samples-per-eval-prompt", "needs --eval-prompt-data", "number"),
    "--eval_temperature": Row("--eval-temperature", "needs --eval-prompt-data", "number"),
    "--wandb_group": Row("--wandb-group", needs="--use-wandb"),
    "--wandb_org": Row("--wandb-team", needs="--use-wandb"),
    "--wandb_run_name": Row("", "W&B's run has the run's title"),
    "--max_ckpt_num": Row("--save-keep-last", kind="number", needs="--save"),
    "--max_ckpt_mem": Row("", "give --save-keep-last, the number of checkpoints"),
    "--save_hf_ckpt": Row("", "--save-hf exports with each checkpoint of --save; miles export does later"),
    "--disable_ds_ckpt": Row("", "leave out --save"),
    "--load_checkpoint": Row("", "give the folder of --save as --load"),
    "--best_metric_key": Row("", "see --save-best"),
    "--max_samples": Row("", "shorten the file of prompts"),
    "--prompt_data_probs": Row("", "see --prompt-mix-weights"),
    "--prompt_split": Row("", "every row of the file is read", neutral=("train",)),
    "--eval_split": Row("", "every row of the file is read", neutral=("train",)),
    "--input_template": Row("", "write the template into the prompts"),
    "--normalize_reward": Row("", "it belongs to reward models, and rewards are functions here"),
    "--reward_clip_range": Row("", "rewards are not clipped here: clip in the reward function"),
    "--agent_func_path": Row("", "see --environment and --agent-command"),
    "--dynamic_filtering": Row("", "see --dynamic-sampling-filter-path"),
    "--dynamic_filtering_reward_range": Row("", "see --dynamic-sampling-filter-path"),
    "--overlong_buffer_len": Row("", "it is a reward here: --rm-type overlong and --overlong-buffer-len"),
    "--overlong_penalty_factor": Row("", "it is a reward here: --rm-type overlong"),
    "--stop_properly_penalty_coef": Row("", "it is a reward here; or --mask-truncated-completions"),
    "--lora_rank": Row("--lora-rank", kind="number", neutral=(0,)),
    "--lora_alpha": Row("--lora-alpha", "needs --lora-rank", "number"),
    "--lora_dropout": Row("--lora-dropout", "needs --lora-rank", "number", neutral=(0,)),
    "--target_modules": Row("--target-modules", "needs --lora-rank", neutral=("all-linear",)),
    "--load_in_4bit": Row("", "weights are not quantized here"),
    "--aux_loss_coef": Row("", "with Megatron: --moe-aux-loss-coeff", "number", neutral=(0,)),
    "--ptx_coef": Row("", "no text of pretraining is mixed in, there neither without its data"),
    "--freezing_actor_steps": Row("", "see --num-critic-only-steps", "number", neutral=(-1,)),
    "--enable_ema": Row("", "no moving average of the weights is kept"),
    "--ema_beta": Row("", "no moving average of the weights is kept"),
    "--critic_pretrain": Row("", "the critic starts from the policy's model here"),
    "--save_value_network": Row("", "checkpoints have the critic"),
    "--enable_vllm_is_correction": Row("", "see --use-tis, --tis-clip-low and --tis-clip"),
    "--vllm_is_truncated_threshold": Row("", "see --tis-clip-low and --tis-clip"),
    "--vllm_is_correction_type": Row("", "see --tis-mode"),
    "--ds_tensor_parallel_size": Row("", "with Megatron: --tensor-model-parallel-size", "number", neutral=(1,)),
    "--logging_steps": Row("", "every step is logged", "number", neutral=(1,)),
    "--use_tensorboard": Row("", ALWAYS),
    "--colocate_actor_ref": Row("", PROCESSES),
    "--colocate_critic_reward": Row("", PROCESSES),
} | {
    name: Row("", why)
    for why, names in {
        PROCESSES: "ref_num_nodes ref_num_gpus_per_node critic_num_nodes critic_num_gpus_per_node",
        MODELS: "reward_num_nodes reward_num_gpus_per_node",
        MEMORY: "micro_rollout_batch_size rollout_max_tokens_per_gpu vllm_generate_batch_size ring_head_stride perf "
        "flash_attn gradient_checkpointing_use_reentrant deepcompile zpg overlap_comm grad_accum_dtype local_rank "
        "use_liger_kernel actor_init_on_gpu ref_reward_offload deepspeed_enable_sleep dataloader_num_workers use_ms "
        "disable_fast_tokenizer vllm_sync_with_ray rollout_tasks_per_gpu use_ds_universal_ckpt value_head_prefix",
    }.items()
    for name in (f"--{flag}" for flag in names.split())
}


def objective_of(translation: Translation) -> Objective:
    """Return the aggregation of these releases, which have no flag for it, and record the flags that ask for ours."""
    if translation.text("--policy_loss_type", "ppo") == "gspo":
        setting, depends = "--policy_loss_type gspo", "fully masked samples: their mean is 0/0 there"
        words = ("--loss-aggregation", "sample_mean")
        translation.differ("the sample mean of gspo", f"depends on {depends}", *words)
        formula = "1/B Σ_i 1/M_i Σ_t m l"
        return Objective(setting, formula, SOURCE, sequence_mean, "sample_mean", words, depends=depends, exact=False)
    depends = "micro-batches and ranks: each divides by its own tokens"
    if translation.switch("--use_dynamic_batch"):
        depends += ", and one of --use_dynamic_batch weighs by its samples"
    words = ("--loss-aggregation", "token_mean")
    translation.differ("the token mean of a micro-batch", f"depends on {depends}", *words)
    return Objective(
        "the token mean of a micro-batch, which no flag changes",
        "mean over ranks and micro-batches of (Σ m l / Σ m) of each",
        SOURCE,
        token_mean_of_micro_batches,
        "token_mean",
        words,
        depends=depends,
        exact=False,
    )
