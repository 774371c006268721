"""Flags that no other test sets: for each, the behavior of the component that reads it, with and without it."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, MagicMock

import pytest
import torch
import torch.distributed as dist
from tiny_llama import tiny_llama
from transformers import LlamaConfig, LlamaForCausalLM

from miles.batch.convert import convert
from miles.compat.border import read_command
from miles.config.parser import judge
from miles.config.settings import Settings
from miles.engine.base import start_engine
from miles.engine.embedded import torch_engine
from miles.engine.servers import engine as servers_engine
from miles.engine.servers.teacher import connect
from miles.engine.sglang import engine as sglang_engine
from miles.objective.aggregation import step_denominators
from miles.objective.policy_losses.ppo_clip import clipped_losses
from miles.observe import sinks
from miles.observe.console import PhaseTimer
from miles.observe.sinks import MlflowSink, SampleTables, WandbSink
from miles.rollout import producer
from miles.rollout.evaluate import load_eval_sets
from miles.rollout.groups import sampling_params
from miles.rollout.pipeline import build_supply, iterations_of
from miles.run import remote_checkpoints, rollout_actor
from miles.run.loop import Drivers
from miles.run.train_actor import TrainActor
from miles.tasks.data.prompts import load_prompts
from miles.tasks.rewards import registry as rewards_registry
from miles.tasks.rewards.registry import get_reward_function
from miles.tasks.rewards.settings import RewardArguments
from miles.training.fsdp import backend as fsdp_backend
from miles.training.fsdp.adapter import adapted_layers, add_adapter
from miles.training.fsdp.backend import FsdpModelBuilder
from miles.training.fsdp.runner import ShardedOptimizer
from miles.training.optimizer import learning_rate
from miles.types.sample import Prompt, PromptGroup, Sample
from tests.fast.config.conftest import MINIMAL
from tests.fast.conftest import byte_tokenizer
from tests.fast.run.test_loop import Recorder, loop_of

STEPS = 6
ROWS, MORE, CUSTOM = "rows.jsonl", "more.jsonl", "custom.yaml"
HEADER: Any = SimpleNamespace(title="t", total_steps=STEPS, public_settings=dict)


def settings_of(words: str) -> Settings:
    return judge(read_command(words.split())).settings


def weights(settings: Settings) -> Any:
    """The weights after steps of FSDP's optimizer, whose gradients grow: clipping them changes their proportions."""
    model = torch.nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
    optimizer = ShardedOptimizer(model, settings.optimizer, STEPS)
    for step in range(STEPS):
        model.weight.grad = torch.tensor([[0.01, -0.02], [0.3, 0.1]]) * (step + 1) ** 2
        optimizer.step()
    return model.weight.tolist()


def critic_rates(settings: Settings) -> Any:
    return [learning_rate(step, settings.critic_optimizer, STEPS) for step in range(STEPS)]


def denominators(settings: Settings) -> Any:
    loss = settings.loss
    return step_denominators(
        loss.loss_aggregation,
        token_counts=[2, 6, 4, 8],
        trajectory_ids=[0, 1, 2, 3],
        group_indices=[0, 0, 1, 1],
        divisor=loss.loss_aggregation_divisor,
        alpha=loss.loss_aggregation_alpha,
    )


def dual_clip(settings: Settings) -> Any:
    return clipped_losses(torch.tensor([3.0]), torch.tensor([-1.0]), settings.loss).losses.tolist()


def eval_sets(settings: Settings) -> Any:
    sets = load_eval_sets(replace(settings, reward=RewardArguments()), byte_tokenizer())
    return [(one.name, [(p.text, p.label) for p in one.prompts], one.samples_per_prompt, one.sampling) for one in sets]


def prompts(settings: Settings) -> Any:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ voice }}" + tokenizer.chat_template
    dataset = load_prompts(ROWS, settings.data, tokenizer)
    return [(prompt.text, prompt.metadata) for prompt in dataset]


def sampling(settings: Settings) -> Any:
    return sampling_params(settings.rollout)


def iterations(settings: Settings) -> Any:
    return iterations_of(settings.rollout, num_prompts=80)


def scores(settings: Settings) -> Any:
    prompt = Prompt("p", (1,), label="7")
    samples = [Sample(prompt, 0, response_ids=[1] * tokens, response="it is 7") for tokens in (10, 50, 90)]
    return asyncio.run(get_reward_function(settings.reward)(samples))


def reward_process(settings: Settings) -> Any:
    """The bound of the processes of a user's function."""
    mock = MagicMock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rewards_registry, "RewardProcess", mock)
        patch.setattr(producer, "start_engine", AsyncMock(side_effect=EOFError))  # the reward comes before the engine
        with pytest.raises(EOFError):
            asyncio.run(producer.start_producer(settings, MagicMock(), None, None))
    return mock.call_args.args[3]


def recorder(settings: Settings) -> Any:
    """The arguments that the rollout process gives to its recorder of samples."""
    mock = MagicMock()

    async def build(*ignored: Any) -> Any:
        return SimpleNamespace(tokenizer=None, num_iterations=STEPS)

    actor = object.__new__(rollout_actor.RolloutActor)
    actor._settings = settings
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rollout_actor, "build_pipeline", build)
        patch.setattr(rollout_actor, "SampleRecorder", mock)
        asyncio.run(actor.build(MagicMock()))
    return mock.call_args.kwargs["max_bytes"], mock.call_args.kwargs["token_values"]


def drawn(settings: Settings) -> Any:
    """The first prompts of a run."""
    stream = build_supply(settings, byte_tokenizer()).stream
    assert stream is not None
    return [group.prompt.text for group in stream.draw(8)]


def step_sizes(settings: Settings) -> Any:
    """The samples of each step that an iteration is divided into."""
    prompt = Prompt("p", (1,))
    groups = [
        PromptGroup(g, prompt, [Sample(prompt, g, 4 * g + k, [2], "", [1], [0.0], reward=0.0) for k in range(4)])
        for g in range(8)
    ]
    steps = convert(groups, loss=settings.loss, global_batch_size=settings.training.global_batch_size)
    return [len(step) for step in steps]


def trained_model(settings: Settings) -> Any:
    """The rows of logits that a trainer rank computes at once, and the weights of its new adapter."""
    model = tiny_llama(0)
    mock = MagicMock(return_value=SimpleNamespace(language_model=model, tower=None))
    builder = object.__new__(FsdpModelBuilder)
    builder.settings, builder.compute_dtype, builder.mesh = settings, torch.float32, MagicMock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fsdp_backend, "Policy", mock)
        patch.setattr(fsdp_backend, "shard_model", MagicMock())
        patch.setattr(FsdpModelBuilder, "_read", MagicMock())
        patch.setattr(FsdpModelBuilder, "_check", MagicMock())
        builder._load_policy("--hf-checkpoint", "m", torch.float32, settings.lora)
    adapter = {name: weight.tolist() for name, weight in model.named_parameters() if "lora" in name}
    return mock.call_args.args[2], adapter


def embedded_engine(settings: Settings) -> Any:
    """The model of the engine, and its largest batch; none if another engine is started."""
    mock = MagicMock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_engine, "TorchEngine", mock)
        patch.setattr(sglang_engine, "start", AsyncMock())
        asyncio.run(start_engine(settings, MagicMock(device="cpu")))
    return mock.call_args and (mock.call_args.args[0], mock.call_args.args[3])


class Placed(Exception):
    """Ends the start of an engine when the parts of it that a test sees are there."""


def servers(settings: Settings) -> Any:
    """The processes of the first engine: the node of each, and its log file."""
    placements = []

    class Host:
        device = "cuda"

        def place_server(self, number: int, build: Any, seconds: float, node: int) -> Any:
            placements.append((node, build.args[1].max_mb))
            return MagicMock()

        def broadcast_device(self) -> Any:
            raise Placed

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Placed):
        patch.setattr(servers_engine, "read_config", MagicMock())
        patch.setattr(servers_engine, "SpanningServer", MagicMock())
        asyncio.run(sglang_engine.start(settings, Host()))  # type: ignore[arg-type]
    return placements


def weight_files(settings: Settings) -> Any:
    """The folder of the trainer's weights on their way to an engine."""
    mock = MagicMock(side_effect=Placed)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Placed):
        patch.setattr(servers_engine, "WeightSender", mock)
        patch.setattr(servers_engine, "read_config", MagicMock())
        asyncio.run(sglang_engine.start(settings, MagicMock(device="cuda")))
    return mock.call_args.args[1]


def remote_storage(settings: Settings) -> Any:
    mock = MagicMock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(remote_checkpoints, "RemoteFolder", mock)
        remote_checkpoints.RemoteCheckpoints.of(settings.checkpoint, "memory://bucket/run")
    return mock.call_args.args[1]


def asked_teacher(settings: Settings) -> Any:
    """The teacher that scores an answer to a prompt that names one in each of two keys."""

    async def ask() -> str:
        teacher = connect(settings, lambda in_flight: in_flight)
        try:
            return teacher._teacher_of(Sample(Prompt("p", (1,), metadata={"opd_teacher": "a", "kind": "b"}), 0))
        finally:
            await teacher.close()

    return asyncio.run(ask())


def adapted(settings: Settings) -> Any:
    """The layers that get an adapter."""
    shape = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=8, **shape))
    add_adapter(model, settings.lora, seed=1)
    return sorted(adapted_layers(model))


def turns(settings: Settings) -> Any:
    """The calls of trainer and engine on the memory of GPUs that they share."""
    called = Recorder()
    actors = Drivers(called, called, True, settings.offload("cuda"), PhaseTimer())  # type: ignore[arg-type]
    actors.sync_weights(version=0)
    actors.give_gpus_to_trainer()
    return [call[0] for call in called.calls]


def first_evaluation(settings: Settings) -> Any:
    return loop_of(settings.evaluation).of("evaluate")


def passes(settings: Settings) -> Any:
    """The passes over an iteration's samples that the trainer is built for."""
    mock = MagicMock()
    actor = object.__new__(TrainActor)
    actor.settings, actor.device = settings, torch.device("cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("miles.training.backend.build_backend", MagicMock())
        patch.setattr("miles.training.trainer.Trainer", mock)
        actor.build(STEPS)
    return mock.call_args.args[3]


def loaded(settings: Settings) -> Any:
    """The parts of a checkpoint that a trainer rank asks its backend to read."""
    actor = object.__new__(TrainActor)
    actor.settings, actor.backend, actor.trainer = settings, MagicMock(), MagicMock()
    actor.load(Path("iter_1"))
    return actor.backend.load.call_args


def recorded_ranks(settings: Settings) -> Any:
    return settings.profiling.is_on, settings.profiling.ranks(settings.cluster.world_size)


def table_rows(settings: Settings) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sinks, "_table_row", lambda step, sample: [])
        return len(SampleTables(settings.tracking, HEADER).rows(1, [MagicMock()] * 20))


def service(name: str, sink: Any) -> Callable[[Settings], Any]:
    """The calls that a tracking service receives when a run starts."""

    def received(settings: Settings) -> Any:
        client = MagicMock()
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, name, client)
            sink(settings.tracking, HEADER)
        return [call for call in map(str, client.mock_calls) if ".init" in call or "experiment" in call]

    return received


ADAM = "--lr 0.1 --lr-decay-style constant --clip-grad 0"
DECAY = "--lr 0.1 --min-lr 0.01 --lr-decay-style linear"
SERVERS = "--rollout-engine sglang --device cuda --actor-num-gpus-per-node 2"
OVERLONG = "--rm-type overlong --overlong-max-len 100 --overlong-buffer-len 20"
SHARED = f"{SERVERS} --colocate"
EVAL = f"--eval-prompt-data held_out {ROWS} --eval-interval 1"


@dataclass(frozen=True)
class Change:
    """A flag with its value, its visible effect, and the words that it needs; ``less`` are minimal flags left out."""

    words: str
    seen: Callable[[Settings], Any]
    beside: str = ""
    less: str = ""

    @property
    def field(self) -> str:
        return self.words.split()[0].split("=")[0].removeprefix("--").replace("-", "_")


CHANGES = [
    Change("--hf-checkpoint another/model", embedded_engine),
    Change("--rollout-engine sglang", embedded_engine, "--rollout-engine torch --device cuda"),
    Change(f"--prompt-data {MORE}", drawn, f"--label-key label --prompt-data {ROWS}", "--prompt-data"),
    Change(
        f"--prompt-mix a {ROWS} b {MORE}", drawn, f"--label-key label --prompt-mix a {ROWS} b {ROWS}", "--prompt-data"
    ),
    Change("--rollout-shuffle", drawn, f"--label-key label --prompt-data {MORE}", "--prompt-data"),
    Change("--rollout-seed 7", drawn, f"--label-key label --prompt-data {MORE} --rollout-shuffle", "--prompt-data"),
    Change("--num-steps-per-rollout 2", step_sizes),
    Change("--log-probs-chunk-size 3", trained_model),
    Change("--seed 5", trained_model, "--lora-rank 2"),
    Change(f"--custom-config-path {CUSTOM}", weights),
    Change("--lr 0.2", weights),
    Change("--adam-beta1 0.5", weights, ADAM),
    Change("--adam-beta2 0.9", weights, ADAM),
    Change("--adam-eps 0.5", weights, ADAM),
    Change("--weight-decay 0.5", weights, ADAM),
    Change("--clip-grad 0.1", weights, "--lr 0.1"),
    Change("--min-lr 0.05", weights, "--lr 0.1 --lr-decay-style linear"),
    Change("--lr-decay-style cosine", weights, "--lr 0.1"),
    Change("--lr-decay-iters 3", weights, DECAY),
    Change("--lr-warmup-iters 3", weights, DECAY),
    Change("--lr-warmup-fraction 0.5", weights, DECAY),
    Change("--critic-lr 0.5", critic_rates, "--advantage-estimator ppo"),
    Change("--critic-lr-warmup-iters 3", critic_rates, "--advantage-estimator ppo"),
    Change("--loss-agg-mode token-mean", denominators),
    Change("--loss-scale-factor 7", denominators, "--loss-agg-mode seq-mean-token-sum-norm"),
    Change("--pg-loss-divisor 9", denominators),
    Change("--loss-aggregation-alpha 0.25", denominators, "--loss-aggregation delta_l --loss-aggregation-divisor 64"),
    Change("--eps-clip-c 3", dual_clip),
    Change(f"--eval-prompt-data held_out {ROWS}", eval_sets, "--eval-interval 1"),
    Change("--n-samples-per-eval-prompt 3", eval_sets, EVAL),
    Change("--eval-temperature 0.5", eval_sets, EVAL),
    Change("--eval-top-p 0.5", eval_sets, EVAL),
    Change("--eval-top-k 5", eval_sets, EVAL),
    Change("--eval-min-p 0.5", eval_sets, EVAL),
    Change("--eval-max-response-len 9", eval_sets, EVAL),
    Change("--eval-input-key other", eval_sets, EVAL),
    Change("--eval-label-key other", eval_sets, EVAL),
    Change("--skip-eval-before-train", first_evaluation, EVAL),
    Change("--apply-chat-template", prompts),
    Change('--apply-chat-template-kwargs {"voice":"loud"}', prompts, "--apply-chat-template"),
    Change("--metadata-key more", prompts),
    Change("--rollout-stop END", sampling),
    Change("--num-epoch 2", iterations, less="--num-rollout", beside="--num-epoch 1"),
    Change("--overlong-max-len 60", scores, OVERLONG, "--rm-type"),
    Change("--overlong-buffer-len 80", scores, OVERLONG, "--rm-type"),
    Change("--rm-type exact_match", scores),
    Change("--reward-memory 3", reward_process, "--custom-rm-path mine:reward", "--rm-type"),
    Change("--samples-max-mb 3", recorder),
    Change("--samples-token-values 5", recorder),
    Change("--torch-engine-max-batch-size 3", embedded_engine),
    Change("--engine-log-max-mb 3", servers, SERVERS),
    Change("--num-gpus-per-node 2", servers, f"{SERVERS} --rollout-num-gpus 4 --rollout-num-gpus-per-engine 4"),
    Change("--update-weight-disk-dir elsewhere", weight_files, f"{SERVERS} --update-weight-transfer-mode disk-delta"),
    Change('--storage-options {"k":1}', remote_storage, "--save memory://bucket/run"),
    Change("--opd-teacher-key kind", asked_teacher, "--use-opd --opd-teacher-urls a=http://h:1 b=http://h:2"),
    Change("--exclude-modules q_proj", adapted, "--lora-rank 2"),
    Change("--no-offload-train", turns, SHARED),
    Change("--no-offload-rollout", turns, SHARED),
    Change("--ppo-epochs 2", passes, "--rollout-engine torch"),
    Change("--no-load-optim", loaded, "--load somewhere"),
    Change("--no-load-rng", loaded, "--load somewhere"),
    Change("--profile-ranks 1", recorded_ranks, "--profile --actor-num-gpus-per-node 2"),
    Change("--use-pytorch-profiler", recorded_ranks),
    Change("--report-samples 3", table_rows),
    Change("--wandb-project other", service("wandb", WandbSink), "--use-wandb"),
    Change("--mlflow-experiment other", service("mlflow", MlflowSink), "--use-mlflow"),
]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"input": f"{n} + 1 =", "label": str(n + 1), "other": "x", "metadata": {"n": n}} for n in range(2)]
    (tmp_path / ROWS).write_text("".join(json.dumps(row) + "\n" for row in rows))
    more = [{"input": f"{n} - 1 =", "label": str(n - 1)} for n in range(8)]
    (tmp_path / MORE).write_text("".join(json.dumps(row) + "\n" for row in more))
    (tmp_path / CUSTOM).write_text("lr: 0.2\n")
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module", autouse=True)
def alone() -> Any:
    """A process group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.field)
def test_the_component_that_reads_a_flag_does_something_else_with_it(change: Change) -> None:
    defaults = " ".join(f"{flag} {value}" for flag, value in MINIMAL.items() if flag not in change.less.split())
    usual = f"--actor-num-gpus-per-node 1 {defaults} {change.beside}"
    assert change.seen(settings_of(usual)) != change.seen(settings_of(f"{usual} {change.words}"))
