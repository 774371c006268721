"""Hold all sections of one run, frozen, and derive what depends on several of them."""

from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

from miles.base.flags import changed, collect_errors, flag_name, refuse
from miles.config.checkpoint import CheckpointArguments
from miles.config.cluster import ClusterArguments, Offload
from miles.config.components import EngineSpec, TrainBackendSpec, engine_spec, train_backend_spec
from miles.config.critic import CriticArguments, critic_optimizer
from miles.config.evaluation import EvaluationArguments
from miles.config.lora import LoraArguments
from miles.config.megatron.settings import MegatronArguments, added_losses
from miles.config.model import ModelArguments
from miles.config.optimizer import OptimizerArguments
from miles.config.parallel import ParallelArguments
from miles.config.profiling import ProfilingArguments
from miles.config.rehearsal import RehearsalArguments
from miles.config.rollout import RolloutArguments
from miles.config.servers.flags import SglangArguments
from miles.config.servers.passed_on import ServerFlags
from miles.config.tracking import TrackingArguments
from miles.config.training import TrainingArguments
from miles.config.vllm.flags import VllmArguments
from miles.objective.chosen import AddedLoss
from miles.objective.registry import StepShape, Term
from miles.objective.settings import LossArguments
from miles.tasks.data.settings import DataArguments
from miles.tasks.rewards.settings import RewardArguments
from miles.types.dims import ParallelDims


@dataclass(frozen=True)
class Settings:
    """Hold every section of a run. Below ``build_*`` and cluster level, components receive only what they need."""

    cluster: ClusterArguments = ClusterArguments()
    model: ModelArguments = ModelArguments()
    lora: LoraArguments = LoraArguments()
    data: DataArguments = DataArguments()
    reward: RewardArguments = RewardArguments()
    rollout: RolloutArguments = RolloutArguments()
    sglang: SglangArguments = SglangArguments()
    vllm: VllmArguments = VllmArguments()
    loss: LossArguments = LossArguments()
    critic: CriticArguments = CriticArguments()
    optimizer: OptimizerArguments = OptimizerArguments()
    training: TrainingArguments = TrainingArguments()
    parallel: ParallelArguments = ParallelArguments()
    checkpoint: CheckpointArguments = CheckpointArguments()
    evaluation: EvaluationArguments = EvaluationArguments()
    tracking: TrackingArguments = TrackingArguments()
    megatron: MegatronArguments = MegatronArguments()
    rehearsal: RehearsalArguments = RehearsalArguments()
    profiling: ProfilingArguments = ProfilingArguments()
    megatron_overrides: tuple[tuple[str, Any], ...] = ()  # fields of Megatron's own dataclasses that flags set
    server_flags: ServerFlags = ServerFlags()

    @property
    def backend(self) -> TrainBackendSpec:
        """The abilities of the training backend."""
        return train_backend_spec(self.training.train_backend)

    @property
    def engine(self) -> EngineSpec:
        """The abilities of the generation engine."""
        return engine_spec(self.rollout.rollout_engine)

    @property
    def trajectories_per_iteration(self) -> int:
        """Trajectories that an iteration generates: prompts times samples per prompt. Valid after validation."""
        assert self.rollout.rollout_batch_size is not None
        return self.rollout.rollout_batch_size * self.rollout.n_samples_per_prompt

    @property
    def global_batch_size(self) -> int:
        """N: trajectories of one optimizer step. Valid after validation."""
        assert self.training.global_batch_size is not None, "validate() fills global_batch_size"
        return self.training.global_batch_size

    @property
    def steps_per_iteration(self) -> int:
        """Optimizer steps per iteration, in all passes over its samples."""
        return self.steps_per_pass * self.training.ppo_epochs

    @property
    def steps_per_pass(self) -> int:
        """Optimizer steps of one pass over the samples of an iteration."""
        return self.trajectories_per_iteration // self.global_batch_size

    @property
    def step_shape(self) -> StepShape:
        """The facts of a run that the objective knows alongside its own flags. Valid after validation."""
        return StepShape(
            num_trajectories=self.global_batch_size,
            samples_per_prompt=self.rollout.n_samples_per_prompt,
            steps_per_iteration=self.steps_per_iteration,
            critic_only_iterations=self.critic.num_critic_only_steps,
            users_advantages=self.users_advantages,
        )

    @property
    def users_advantages(self) -> Term | None:
        """The call of the user's function that makes the advantages of samples, if one of these flags names it."""
        for path, module in (
            (self.rollout.custom_convert_samples_to_train_data_path, "miles.rollout.hooks"),
            (self.reward.custom_reward_post_process_path, "miles.batch.convert"),
        ):
            if path is not None:
                return Term(f"{path}(...)", module, path)
        return None

    @property
    def added_losses(self) -> tuple[AddedLoss, ...]:
        """The losses that the model's layers add to the objective."""
        return tuple(added_losses(self.megatron))

    def trains_policy(self, iteration: int) -> bool:
        """Return whether the policy learns in ``iteration``, or only the critic."""
        return self.loss.type.trains_policy and iteration >= self.critic.num_critic_only_steps

    def refreshes_reference(self, iteration: int) -> bool:
        """Return whether the reference follows the policy after ``iteration``."""
        interval = self.model.ref_update_interval
        return interval is not None and (iteration + 1) % interval == 0

    def policy_steps(self, total_steps: int) -> int:
        """Return the optimizer steps of the policy in a run of ``total_steps``; its learning rate decays over these.

        Raises:
            ValueError: The critic takes all of them. ``--num-epoch`` is a number of steps only when the prompts are
                counted, so validation cannot check this.
        """
        alone = self.critic.num_critic_only_steps
        if not alone:
            return total_steps
        iterations = total_steps // self.steps_per_iteration
        if alone >= iterations:
            rule = f"leaves none of the {iterations} iterations to the policy"
            what_to_do = "give fewer, or more of --num-epoch, or train only the critic with --loss-type value_loss"
            refuse("num_critic_only_steps", alone, rule, what_to_do)
        return total_steps - alone * self.steps_per_iteration

    @property
    def critic_optimizer(self) -> OptimizerArguments:
        """The policy's optimizer with the critic's learning rate and warm-up."""
        return critic_optimizer(self.critic, self.optimizer)

    @property
    def dims(self) -> ParallelDims:
        """The arithmetic of the trainer's ranks. Raises ``ValueError`` naming a flag that cannot divide them.

        Valid for every backend: the sizes of ``megatron`` are 1 under those that do not read them.
        """
        return ParallelDims(
            world_size=self.cluster.world_size,
            context_parallel_size=self.parallel.context_parallel_size,
            dynamic_context_parallel=self.parallel.dynamic_context_parallel,
            tensor_model_parallel_size=self.megatron.tensor_model_parallel_size,
            pipeline_model_parallel_size=self.megatron.pipeline_model_parallel_size,
            expert_model_parallel_size=self.megatron.expert_model_parallel_size,
            expert_tensor_parallel_size=self.megatron.expert_tensor_parallel_size,
        )

    @property
    def reads_conversations(self) -> bool:
        """Whether the run trains on the conversations of ``--prompt-data``, as supervised fine-tuning does."""
        return not self.loss.type.uses_advantages and not self.rollout.loads_samples

    @property
    def reads_samples(self) -> bool:
        """Whether the samples to train on are read, and not generated."""
        return self.rollout.loads_samples or self.reads_conversations

    @property
    def generates(self) -> bool:
        """Whether anything is generated; it is not if samples are given and nothing is evaluated."""
        return not self.rollout.debug_train_only and (not self.reads_samples or self.evaluation.has_sets)

    @property
    def trains(self) -> bool:
        """Whether there is a trainer."""
        return not self.rollout.debug_rollout_only

    @property
    def num_engines(self) -> int:
        """Servers that the run starts; 0 with an embedded engine, and with external engines."""
        if not self.engine.has_servers or self.sglang.rollout_external or not self.generates:
            return 0
        return self.engine_devices // self.sglang.rollout_num_gpus_per_engine

    @property
    def nodes_per_engine(self) -> int:
        """How many nodes the devices of one server are on. Valid after validation."""
        return max(1, self.sglang.rollout_num_gpus_per_engine // self.sglang.per_node(self.cluster))

    @property
    def engine_devices(self) -> int:
        """Devices of all servers that the run starts together. Valid after validation."""
        if self.cluster.colocate:
            return self.cluster.world_size
        assert self.cluster.rollout_num_gpus is not None, "validate() fills rollout_num_gpus"
        return self.cluster.rollout_num_gpus

    @property
    def weights_folder(self) -> Path:
        """Where weights on the way to an engine are written as files."""
        if self.sglang.update_weight_disk_dir is not None:
            return Path(self.sglang.update_weight_disk_dir)
        return Path(self.tracking.output_dir).absolute() / "weights"

    @property
    def sends_deltas(self) -> bool:
        """Whether engines are sent what has changed in the weights, and not all of them."""
        return self.generates and self.sglang.writes_deltas

    def offload(self, device: str) -> Offload:
        """Return whether trainer and engines offload on ``device`` (cpu or cuda). On shared GPUs, both do by default.

        Raises:
            ValueError: An offload is asked for on CPU.
        """
        if device == "cpu":
            with collect_errors() as errors:
                for name in changed(self.cluster, ("offload_train", "offload_rollout")):
                    errors.refuse(name, True, "frees GPU memory, and this run is on CPU", f"drop {flag_name(name)}")
            return Offload(train=False, rollout=False)
        shares = self.cluster.colocate and self.num_engines > 0
        return Offload(
            train=shares and not self.cluster.no_offload_train,
            rollout=shares and not self.cluster.no_offload_rollout,
        )


# The sections of our own flags, by name; flags that are passed on to SGLang or Megatron have none.
SECTIONS: dict[str, type] = {
    name: hint
    for name, hint in get_type_hints(Settings).items()
    if hasattr(hint, "__dataclass_fields__") and hint is not ServerFlags
}


@cache
def section_of() -> dict[str, str]:
    """Return the section of each flag, by field name. Names are unique over all sections."""
    return {field.name: name for name, section in SECTIONS.items() for field in fields(section)}
