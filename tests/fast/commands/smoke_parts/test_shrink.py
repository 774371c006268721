"""Whatever a training command asks for, its small run is a valid run of the same kind."""

import asyncio
import json
from pathlib import Path

import pytest

from miles.commands.smoke import EVAL_ROWS, MODEL, ROWS, shrink, with_spread
from miles.compat.border import read_command
from miles.config.parser import judge
from miles.config.validate import validate
from miles.models.tiny import shrunk_config
from tests.fast.compat.launch.launch_corpus import read_lines, write_files

DENSE = dict(
    model_type="qwen3",
    architectures=["Qwen3ForCausalLM"],
    vocab_size=151936,
    hidden_size=4096,
    intermediate_size=12288,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=40960,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
    tie_word_embeddings=False,
)
EXPERTS = DENSE | dict(
    model_type="qwen3_moe",
    architectures=["Qwen3MoeForCausalLM"],
    num_experts=128,
    num_experts_per_tok=8,
    moe_intermediate_size=768,
    decoder_sparse_step=1,
    mlp_only_layers=[],
    norm_topk_prob=True,
)
BASE = (
    "--prompt-data {D}/prompts.jsonl --label-key label --rm-type math --num-rollout 3000 --rollout-batch-size 32 "
    "--n-samples-per-prompt 8 --rollout-max-response-len 8192 --lr 1e-6 --actor-num-gpus-per-node 8 "
)
MEGATRON = "--train-backend megatron --use-distributed-optimizer "
LINES = {
    "fsdp": "--actor-num-nodes 4 --num-steps-per-rollout 4 --use-wandb --load {D}/old",
    "evaluation": "--eval-prompt-data a {D}/prompts.jsonl b hf:some/set --eval-interval 20 "
    "--n-samples-per-eval-prompt 16 --eval-max-response-len 16384",
    "saving": "--save {D}/ck --save-interval 20 --save-keep-last 2 --save-hf {D}/hf --max-restarts 3",
    "context": "--context-parallel-size 4 --use-dynamic-batch-size --max-tokens-per-gpu 9216",
    "dynamic context": "--dynamic-context-parallel --max-seqlen-per-dp-cp-rank 4096",
    "ppo": "--advantage-estimator ppo --num-critic-only-steps 10 --critic-lr 1e-5",
    "kl": "--use-kl-loss --kl-loss-coef 0.001 --ref-load {D}/model",
    "adapter": "--train-backend fsdp --lora-rank 16 --target-modules q_proj,v_proj",
    "distillation": "--use-opd --opd-teacher-urls a=http://h:1 b=http://h:2 --opd-teacher-key kind",
    "filter": "--over-sampling-batch-size 64 "
    "--dynamic-sampling-filter-path miles.rollout.filters:check_reward_nonzero_std",
    "partial": "--partial-rollout --over-sampling-batch-size 64",
    "async": "--async-steps 4 --fully-async",
    "sglang": "--rollout-engine sglang --rollout-num-gpus 16 --rollout-num-gpus-per-engine 2 "
    "--sglang-context-length 9000",
    "colocated": "--rollout-engine sglang --colocate --offload-rollout --sglang-server-concurrency 64",
    "tensor and pipeline": MEGATRON + "--tensor-model-parallel-size 4 --sequence-parallel "
    "--pipeline-model-parallel-size 2 --num-layers 36 --hidden-size 4096 --swiglu",
    "pipeline": MEGATRON + "--pipeline-model-parallel-size 4 --actor-num-nodes 2 "
    "--decoder-first-pipeline-num-layers 8 --decoder-last-pipeline-num-layers 8",
    "experts": MEGATRON + "--expert-model-parallel-size 8 --tensor-model-parallel-size 4 --sequence-parallel "
    "--expert-tensor-parallel-size 1 --moe-aux-loss-coeff 1e-3 --num-experts 128",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("big")
    (folder / "prompts.jsonl").write_text(
        "".join(json.dumps({"input": f"{i}", "label": "1"}) + "\n" for i in range(99))
    )
    for name, config in (("model", DENSE), ("experts", EXPERTS)):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("kind", LINES)
def test_the_small_run_is_valid_and_of_the_same_kind(kind, folder, tmp_path):
    model = "experts" if kind == "experts" else "model"
    words = f"--hf-checkpoint {folder / model} {BASE} {LINES[kind]}".replace("{D}", str(folder)).split()
    settings = judge(read_command(words)).settings
    (tmp_path / MODEL).mkdir()
    tiny = shrunk_config(json.loads((folder / model / "config.json").read_text()))
    (tmp_path / MODEL / "config.json").write_text(json.dumps(tiny))
    small, notes = shrink(settings, tmp_path, 2)
    small = validate(small).settings
    assert small.cluster.world_size == 2 and small.trajectories_per_iteration <= 16 and small.rollout.num_rollout == 2
    assert small.steps_per_iteration == min(settings.steps_per_iteration, 2)
    assert small.loss.advantage_estimator == settings.loss.advantage_estimator
    assert small.rollout.rollout_engine == settings.rollout.rollout_engine
    assert small.rollout.dynamic_sampling_filter_path == settings.rollout.dynamic_sampling_filter_path
    assert small.num_engines <= 2
    assert (small.checkpoint.save is None) == (settings.checkpoint.save is None)
    for path in (small.checkpoint.save, small.checkpoint.save_hf, small.tracking.output_dir, small.data.prompt_data):
        assert path is None or path.startswith(str(tmp_path))
    assert lines(small.data.prompt_data) == ROWS
    if kind == "evaluation":
        _, first, _, second = small.evaluation.eval_prompt_data
        assert lines(first) == EVAL_ROWS and second == "hf:some/set"
    parallel = {
        "context": small.parallel.context_parallel_size,
        "tensor and pipeline": small.megatron.tensor_model_parallel_size,
        "pipeline": small.megatron.pipeline_model_parallel_size,
        "experts": small.megatron.expert_model_parallel_size,
    }
    assert parallel.get(kind, 2) == 2
    assert any("8 trainer ranks become 2" in note or "ranks become 2" in note for note in notes)


IN_FAST = (
    "GLM-4.5 with GSPO on eight nodes",
    "DeepSeek-V3 with a named last stage",
    "SFT on conversations",
    "routing replay",
    "determinism",
)
SCRIPTS = [line for line in read_lines() if not line.refuses]


@pytest.mark.parametrize(
    "line", [pytest.param(x, id=x.name, marks=[] if x.name in IN_FAST else [pytest.mark.slow]) for x in SCRIPTS]
)
def test_the_small_run_of_a_launch_script_is_valid(line, tmp_path):
    write_files(tmp_path)
    settings = judge(read_command(line.words(tmp_path))).settings
    folder = tmp_path / "smoke"
    (folder / MODEL).mkdir(parents=True)
    tiny = shrunk_config(json.loads((tmp_path / line.model / "config.json").read_text()))
    (folder / MODEL / "config.json").write_text(json.dumps(tiny))
    small, notes = shrink(settings, folder, 2)
    assert validate(small).settings.cluster.world_size <= 2
    changed = small.rollout.rollout_engine != settings.rollout.rollout_engine
    needs_torch = settings.rollout.use_rollout_routing_replay or settings.training.deterministic_mode
    assert changed == needs_torch == any("torch engine" in n for n in notes)


def lines(path):
    return len(Path(path).read_text().splitlines())


class Answer:
    def __init__(self, response):
        self.response = response
        self.response_ids = [1]


def test_rewards_without_spread_get_some(tmp_path, monkeypatch):
    (tmp_path / "given_rewards.py").write_text(
        "async def equal(samples):\n    return [{'r': 2.0} for s in samples]\n"
        "def differ(samples):\n    return [float(len(s.response)) for s in samples]\n"
        "def wrong(samples):\n    return 'no'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    answers = [Answer("a"), Answer("bb"), Answer("cc")]
    equal = with_spread({"custom_rm_path": "given_rewards:equal", "reward_key": "r"})
    assert asyncio.run(equal(answers)) == [2.0, 3.0, 2.0]
    assert asyncio.run(equal(answers[:1])) == [2.0]
    assert with_spread({"custom_rm_path": "given_rewards:differ"})(answers) == [1.0, 2.0, 2.0]
    wrong = with_spread({"custom_rm_path": "given_rewards:wrong"})
    assert wrong(answers) == "no", "the reward process reports it"
    assert asyncio.run(with_spread({"rm_type": "format:2,repetition:1"})(answers)) == [0.0, 1.0, 0.0]
