"""Shrink a run to seconds on two cores: few short samples, at most two ranks, everything written into one folder.

What stays is what a run could break on: backend, engine, objective, estimator, reward, filters, custom functions,
precision as far as the machine has it, tensor, context, pipeline or expert parallelism over two ranks, asynchronous
generation, saving and exporting. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

from miles.base.flags import changed, flag_name
from miles.base.host.machine import has_bf16
from miles.commands.smoke_parts.reward import write_module
from miles.config.checkpoint import CheckpointArguments
from miles.config.components import engine_spec
from miles.config.evaluation import EvaluationArguments
from miles.config.megatron.overrides import TRIED
from miles.config.model import ModelArguments
from miles.config.rollout import RolloutArguments
from miles.config.settings import Settings
from miles.config.sglang.server_flags import ServerFlags
from miles.config.tracking import TrackingArguments
from miles.objective.settings import LossArguments
from miles.tasks.data.settings import DataArguments
from miles.tasks.rewards.settings import RewardArguments

PROMPTS = 4
SAMPLES = 4
RESPONSE = 16  # tokens
ROWS = 64  # of a prompt set
EVAL_ROWS = 8
MODEL, RUN, REWARD = "model", "run", "reward"  # folders


def shrink(settings: Settings, folder: Path, iterations: int) -> tuple[Settings, list[str]]:
    """Return the small run, and in words what differs. Prompts and the reward's module are written into ``folder``.

    Args:
        settings: A run that was validated.
        folder: Takes everything that the run reads and writes; the model is expected in its folder ``model``.
        iterations: The iterations of the small run.
    """
    steps = min(settings.steps_per_pass, 2)
    rollout = _rollout(settings, folder, iterations)
    small = replace(
        _on_two_ranks(settings),
        model=ModelArguments(
            hf_checkpoint=str(folder / MODEL),
            opd_teacher_load=str(folder / MODEL) if settings.loss.use_opd else None,
        ),
        loss=_loss(settings.loss),
        data=_data(settings.data, folder),
        reward=_reward(settings.reward, folder),
        rollout=rollout,
        training=replace(
            settings.training,
            global_batch_size=None,
            num_steps_per_rollout=steps,
            bf16=settings.training.bf16 and has_bf16(),
            fp32=not (settings.training.bf16 and has_bf16()),
        ),
        critic=replace(
            settings.critic, num_critic_only_steps=min(settings.critic.num_critic_only_steps, iterations - 1)
        ),
        checkpoint=_checkpoint(settings.checkpoint, folder),
        evaluation=_evaluation(settings.evaluation, folder, iterations),
        tracking=TrackingArguments(
            output_dir=str(folder / RUN),
            report_samples=settings.tracking.report_samples,
            samples_max_mb=settings.tracking.samples_max_mb,
            metrics_max_mb=settings.tracking.metrics_max_mb,
            no_report=settings.tracking.no_report,
        ),
        megatron_overrides=tuple((name, value) for name, value in settings.megatron_overrides if name in TRIED),
        server_flags=ServerFlags(),
    )
    if settings.rollout.loads_samples:  # their number is given
        small = replace(small, training=replace(small.training, num_steps_per_rollout=settings.steps_per_pass))
    return small, list(_notes(settings, small))


def _on_two_ranks(settings: Settings) -> Settings:
    """Return the run on at most two ranks, which share the model by the first kind of parallelism that the run has."""
    sizes, cluster, parallel = settings.megatron, settings.cluster, settings.parallel
    kinds = {
        "tensor_model_parallel_size": sizes.tensor_model_parallel_size,
        "context_parallel_size": parallel.context_parallel_size,
        "pipeline_model_parallel_size": sizes.pipeline_model_parallel_size,
    }
    chosen = next((name for name, size in kinds.items() if size > 1), None)
    size = {name: 2 if name == chosen else 1 for name in kinds}
    experts = 2 if sizes.expert_model_parallel_size > 1 and size["pipeline_model_parallel_size"] == 1 else 1
    has_servers = engine_spec(settings.rollout.rollout_engine).has_servers and not _needs_gpus(settings)
    device_of_engine = 1 if has_servers and settings.generates and not cluster.colocate else None
    return replace(
        settings,
        cluster=replace(
            cluster,
            ray_address=None,
            device="cpu",
            actor_num_nodes=1,
            actor_num_gpus_per_node=min(2, cluster.world_size),
            rollout_num_gpus=device_of_engine,
            offload_train=False,
            offload_rollout=False,
            no_offload_train=False,
            no_offload_rollout=False,
            max_restarts=0,
        ),
        parallel=replace(parallel, context_parallel_size=size["context_parallel_size"]),
        megatron=replace(
            sizes,
            tensor_model_parallel_size=size["tensor_model_parallel_size"],
            pipeline_model_parallel_size=size["pipeline_model_parallel_size"],
            decoder_first_pipeline_num_layers=None,
            decoder_last_pipeline_num_layers=None,
            num_layers_per_virtual_pipeline_stage=None,
            expert_model_parallel_size=experts,
            expert_tensor_parallel_size=1 if experts == 2 else None,
            sequence_parallel=sizes.sequence_parallel and size["tensor_model_parallel_size"] > 1,
        ),
        sglang=replace(
            settings.sglang,
            rollout_num_gpus_per_engine=1,
            rollout_external=False,
            rollout_external_engine_addrs=None,
            update_weight_disk_dir=None,
            update_weight_copy_dir=None,
        ),
    )


def _rollout(settings: Settings, folder: Path, iterations: int) -> RolloutArguments:
    rollout = settings.rollout
    assert rollout.rollout_batch_size is not None
    saved, longest = rollout.save_debug_rollout_data, rollout.rollout_max_response_len
    small = replace(
        rollout,
        num_rollout=iterations,
        num_epoch=None,
        rollout_engine="torch" if _needs_gpus(settings) else rollout.rollout_engine,
        async_steps=min(rollout.async_steps, 1),
        save_debug_rollout_data=None if saved is None else str(folder / "samples_{iteration}.jsonl"),
    )
    if rollout.loads_samples:
        return small
    prompts = min(rollout.rollout_batch_size, PROMPTS)
    return replace(
        small,
        rollout_batch_size=prompts,
        n_samples_per_prompt=min(rollout.n_samples_per_prompt, SAMPLES),
        rollout_max_response_len=None if longest is None else min(longest, RESPONSE),  # None: of conversations
        over_sampling_batch_size=None if rollout.over_sampling_batch_size is None else 2 * prompts,
    )


def _needs_gpus(settings: Settings) -> bool:
    """Return whether the run asks of its engine what SGLang does on GPUs only."""
    asks = settings.rollout.use_rollout_routing_replay or settings.training.deterministic_mode
    return asks and engine_spec(settings.rollout.rollout_engine).has_servers


def _reward(reward: RewardArguments, folder: Path) -> RewardArguments:
    if reward.rm_type is None and reward.custom_rm_path is None:
        return reward
    module = write_module(folder / REWARD, reward)
    return RewardArguments(
        custom_rm_path=module,
        custom_reward_post_process_path=reward.custom_reward_post_process_path,
        reward_error=reward.reward_error,
        reward_error_value=reward.reward_error_value,
        reward_timeout=reward.reward_timeout,
        reward_memory=reward.reward_memory,
        log_passrate=reward.log_passrate,
    )


def _checkpoint(given: CheckpointArguments, folder: Path) -> CheckpointArguments:
    """Save if the run saves, and load nothing."""
    saves = given.save is not None
    return CheckpointArguments(
        save=str(folder / "checkpoints") if saves else None,
        save_interval=1 if saves else None,
        save_keep_last=given.save_keep_last,
        save_retain_interval=given.save_retain_interval,
        save_best=given.save_best if saves else None,
        async_save=given.async_save and saves,
        save_hf=str(folder / "export") if given.save_hf is not None else None,
    )


def _evaluation(evaluation: EvaluationArguments, folder: Path, iterations: int) -> EvaluationArguments:
    if not evaluation.has_sets:
        return evaluation
    words = evaluation.eval_prompt_data
    if words is not None:
        names, sources = words[::2], words[1::2]
        cut = [_cut(source, folder, f"eval_{number}", EVAL_ROWS) for number, source in enumerate(sources)]
        words = tuple(str(word) for pair in zip(names, cut, strict=True) for word in pair)
    longest = evaluation.eval_max_response_len
    return replace(
        evaluation,
        eval_prompt_data=words,
        eval_interval=iterations,
        n_samples_per_eval_prompt=1,
        eval_max_response_len=None if longest is None else min(longest, RESPONSE),
    )


def _data(data: DataArguments, folder: Path) -> DataArguments:
    """Return the prompts with the first rows of each file."""
    mix = data.prompt_mix
    if mix is not None:
        mix = tuple(str(_cut(word, folder, f"prompts_{i}", ROWS)) if i % 2 else word for i, word in enumerate(mix))
    return replace(data, prompt_data=_cut(data.prompt_data, folder, "prompts", ROWS), prompt_mix=mix)


def _cut(source: str | None, folder: Path, name: str, rows: int) -> str | None:
    """Return a source with the first rows of a file; other sources are returned as they are."""
    if source is None or not source.endswith((".jsonl", ".parquet")):
        return source
    path = (folder / name).with_suffix(Path(source).suffix)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".jsonl":
        with open(source, "rb") as lines:
            path.write_bytes(b"".join(islice((line for line in lines if line.strip()), rows)))
        return str(path)
    from pyarrow import Table
    from pyarrow.parquet import ParquetFile, write_table

    with ParquetFile(source) as file:
        write_table(Table.from_batches(islice(file.iter_batches(rows), 1), file.schema_arrow), path)
    return str(path)


def _loss(loss: LossArguments) -> LossArguments:
    """Return the objective with a teacher in the trainer, if there is one."""
    default = LossArguments()
    return replace(
        loss,
        opd_type="trainer" if loss.use_opd else None,
        opd_teacher_urls=None,
        opd_teacher_key=default.opd_teacher_key,
    )


def _notes(given: Settings, small: Settings) -> Iterator[str]:
    """Yield in words what a smaller run does not check."""
    ranks = (given.cluster.world_size, small.cluster.world_size)
    if ranks[0] != ranks[1] or given.dims != small.dims:
        yield f"{ranks[0]} trainer ranks become {ranks[1]}, on CPU, with {_shown(small)}"
    if given.training.bf16 and not small.training.bf16:
        yield "--bf16 becomes --fp32: this CPU has no bf16 arithmetic"
    if given.rollout.rollout_engine != small.rollout.rollout_engine:
        yield "the torch engine generates: SGLang repeats answers, and says which experts it chose, on GPUs only"
    if given.model.ref_load is not None:
        yield "--ref-load is left out: the reference is the tiny model"
    if given.loss.use_opd:
        yield "the teacher is the tiny model, in the trainer"
    if given.checkpoint.load is not None:
        yield "--load is left out: the run starts fresh"
    elsewhere = ["use_wandb", "use_mlflow", "notify_url", "prometheus_port"]
    if left_out := [flag_name(name) for name in changed(given.tracking, elsewhere)]:
        yield f"{', '.join(left_out)}: left out"
    if given.server_flags != ServerFlags():
        yield "--sglang-* and --router-* flags are left out: servers start with the defaults of CPU"
    if given.reward != small.reward:
        yield "if all answers to a prompt get the same reward, every second one gets 1 more: there must be a gradient"


def _shown(settings: Settings) -> str:
    kinds = {
        "tensor": settings.megatron.tensor_model_parallel_size,
        "context": settings.parallel.context_parallel_size,
        "pipeline": settings.megatron.pipeline_model_parallel_size,
        "expert": settings.megatron.expert_model_parallel_size,
    }
    return " and ".join(f"{kind} parallel" for kind, size in kinds.items() if size > 1) or "data parallel"
