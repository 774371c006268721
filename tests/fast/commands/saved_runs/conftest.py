"""A run on the tiny model that has saved one checkpoint."""

from __future__ import annotations

import json

import pytest
import torch.distributed.checkpoint as dcp
from transformers import AutoModelForCausalLM

from miles.commands.saved_runs.run import SavedRun
from miles.compat.border import read_command
from miles.config.parser import judge
from miles.observe.run_files import RunHeader
from miles.training.checkpoint_files import publish, staging, write_run_state
from miles.training.checkpoint_io import write_random_state
from miles.training.one_process import one_rank


@pytest.fixture
def run(tiny_model, tmp_path):
    """Return a run on the tiny model that has saved one checkpoint, of other weights."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"input": f"{i} + 1 = ", "label": str(i + 1)}) + "\n" for i in range(3)))
    flags = f"--hf-checkpoint {tiny_model} --prompt-data {prompts} --label-key label --rm-type length --num-rollout 2"
    flags += " --rollout-batch-size 2 --n-samples-per-prompt 2 --rollout-max-response-len 6"
    flags += f" --fp32 --device cpu --output-dir {tmp_path / 'run'}"
    flags += f" --save {tmp_path / 'run' / 'saved'} --eval-prompt-data own {prompts} --eval-interval 1"
    settings = judge(read_command(flags.split())).settings
    (tmp_path / "run").mkdir()
    RunHeader.from_sections("miles", settings, "", "", 2).save(tmp_path / "run")
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    weights = {name: parameter.detach() + 1 for name, parameter in model.state_dict().items()}
    folder = staging(tmp_path / "run" / "saved", 1)
    with one_rank():
        dcp.save({"model": weights}, checkpoint_id=folder)
        write_random_state(folder)
        write_run_state(folder, "fsdp", {"rollouts_done": 1, "prompts": {}}, {"steps_done": 1})
    publish(tmp_path / "run" / "saved", 1)
    return SavedRun(tmp_path / "run")
