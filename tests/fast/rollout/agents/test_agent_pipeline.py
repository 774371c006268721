"""Agent programs in the whole rollout side, from a prompt file to shards, without Ray."""

import json
import shlex
import sys
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from miles.batch.schedule import ShardBuilder
from miles.commands.saved_runs.generation import answer, evaluate_sets
from miles.config.parser import parse
from miles.config.validate import validate
from miles.rollout.agents.server import SessionServer
from miles.rollout.ordering import Start
from miles.rollout.pipeline import build_pipeline
from miles.types.weights import WeightChunk
from tests.fast.support.agent_program import CHAT

torch.set_num_threads(1)
AGENT = (
    CHAT
    + """
row = json.load(sys.stdin)
messages = [{"role": "user", "content": row["input"]}]
messages = [*messages, chat(messages), {"role": "user", "content": "7"}]
chat(messages)
chat([{"role": "user", "content": "in short"}])
print(row["input"])
"""
)


@pytest.fixture
def settings(tiny_model, tmp_path):
    rows = [{"prompt": f"{i} + {i}", "label": f"{i} + {i}"} for i in range(3)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "agent.py").write_text(AGENT)

    def of(*flags):
        command = shlex.join([sys.executable, "-I", "-S", str(tmp_path / "agent.py")])
        data = str(tmp_path / "sums.jsonl")
        words = f"--hf-checkpoint {tiny_model} --prompt-data {data} --input-key prompt --label-key label"
        words += " --rm-type exact_match --num-rollout 2 --rollout-batch-size 2 --n-samples-per-prompt 2"
        words += " --rollout-max-response-len 40 --rollout-max-context-len 100 --apply-chat-template"
        words += f" --global-batch-size 2 --actor-num-gpus-per-node 1 --device cpu --eval-prompt-data held {data}"
        words += " --rollout-engine torch --train-backend fsdp --eval-interval 1"
        return validate(parse([*words.split(), "--agent-command", command, *flags])).settings

    return of


@pytest.mark.parametrize("mode", [[], ["--partial-rollout", "--over-sampling-batch-size", "4"]])
async def test_samples_of_programs_become_shards(settings, tiny_model, mode):
    flags = settings(*mode)
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    weights = [WeightChunk(dict(model.named_parameters()))]
    pipeline = await build_pipeline(flags, SimpleNamespace(device="cpu"))
    for iteration in range(2):
        await pipeline.update_weights(weights, iteration, iteration - 1 if iteration else None)
        async with pipeline.collecting(Start(iteration, iteration - 1 if iteration else None, iteration)) as collected:
            groups = collected.scored.groups
            [shards] = ShardBuilder(flags).build(iteration, groups)
        for group in groups:
            # Two calls are one sample, the third is another: of one trajectory, with its answer and reward.
            assert [len([s for s in group.samples if s.trajectory_id == n]) for n in _ids(group)] == [2, 2]
            assert {(s.response, s.reward) for s in group.samples} == {(group.prompt.label, 1.0)}
        assert [len(set(shard.batch.trajectory_ids)) for shard in shards] == [2, 2]
        assert [len(shard.batch.trajectory_ids) for shard in shards] == [4, 4]
    if not mode:
        assert (await pipeline.evaluate())["eval/held/accuracy"].value == 1.0
    await pipeline.producer.close()


def _ids(group):
    return sorted({sample.trajectory_id for sample in group.samples})


async def test_the_weights_of_a_run_are_evaluated_and_sampled_with_its_program(settings, monkeypatch):
    closed = []
    close = SessionServer.close

    async def noted(server):
        closed.append(server.url)
        await close(server)

    monkeypatch.setattr(SessionServer, "close", noted)
    flags = settings()
    [held] = await evaluate_sets(flags, (), 1)
    assert held.means["response_length"] > 4 and {s.response for s in held.samples} == {f"{i} + {i}" for i in range(3)}
    samples = await answer(flags, "3 + 4", 2, 1, None, None)
    assert {s.response for s in samples} == {"3 + 4"} and len(samples) == 4
    assert len(closed) == 2
