"""Measure what rehearsals of large models take: seconds of the command, and resident memory of its largest process.

    python benchmarks/rehearsal_scale.py [--keep FOLDER]
    python benchmarks/rehearsal_scale.py | python benchmarks/records.py add rehearsal_scale "two quiet cores"

The aim is under 60 s and 8 GB for 70B dense and 671B with experts on 1,024 ranks. The models are the shapes of
Llama-3.3-70B and DeepSeek-V3 (their config.json on huggingface.co), and nothing is downloaded. ``--keep`` leaves the
configurations, the reports, the JSON and the pages there.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from transformers import AutoConfig

LLAMA_70B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}
DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 3,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 129280,
    "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000,
    "tie_word_embeddings": False,
}
MODELS = {"70B": LLAMA_70B, "671B": DEEPSEEK_V3}
COMMON = """
    --actor-num-nodes 128 --actor-num-gpus-per-node 8 --bf16 --rehearse-device h100
    --rollout-engine sglang --rollout-num-gpus 512 --rollout-num-gpus-per-engine 16
    --prompt-data reasoning_gym:basic_arithmetic --rm-type exact_match
    --rollout-batch-size 512 --n-samples-per-prompt 16 --global-batch-size 8192 --num-rollout 100
    --rollout-max-response-len 8192 --use-dynamic-batch-size --max-tokens-per-gpu 16384
    --use-kl-loss --kl-loss-coef 0.001
"""
LAYOUTS = {
    "70B, FSDP": ("70B", "--train-backend fsdp --gradient-checkpointing"),
    "70B, TP 8, PP 4": (
        "70B",
        "--train-backend megatron --tensor-model-parallel-size 8 --sequence-parallel --pipeline-model-parallel-size 4 "
        "--use-distributed-optimizer --gradient-checkpointing",
    ),
    "671B, FSDP": ("671B", "--train-backend fsdp --gradient-checkpointing"),
    "671B, TP 8, PP 16, EP 64": (
        "671B",
        "--train-backend megatron --tensor-model-parallel-size 8 --sequence-parallel "
        "--pipeline-model-parallel-size 16 --decoder-first-pipeline-num-layers 3 --decoder-last-pipeline-num-layers 2 "
        "--expert-model-parallel-size 64 --expert-tensor-parallel-size 1 "
        "--use-distributed-optimizer --gradient-checkpointing",
    ),
}


def rehearse(name: str, folder: Path) -> tuple[float, float, float, str]:
    """Return seconds, seconds of processor time, GB of resident memory of the largest process, and the report."""
    model, flags = LAYOUTS[name]
    config = folder / model
    config.mkdir(exist_ok=True)
    (config / "config.json").write_text(json.dumps(MODELS[model], indent=2))
    AutoConfig.from_pretrained(config)  # transformers reads it
    plain = name.replace(", ", "-").replace(" ", "").lower()
    files = ["--rehearse-json", f"{folder / plain}.json", "--rehearse-page", f"{folder / plain}.html"]
    command = [sys.executable, "-m", "miles", "rehearse", "--hf-checkpoint", str(config), *shlex.split(COMMON)]
    began = time.perf_counter()
    process = subprocess.Popen([*command, *shlex.split(flags), *files], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    report = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    took = time.perf_counter() - began
    if status:
        raise SystemExit(f"{name}: the rehearsal ended with status {os.waitstatus_to_exitcode(status)}")
    (folder / f"{plain}.txt").write_text(report)
    return took, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024 / 1e9, report


def main() -> None:
    """Rehearse each layout in a separate process, and print the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, help="the folder for what is written")
    parser.add_argument("names", nargs="*", choices=[*LAYOUTS, []], help="layouts; default: all")
    options = parser.parse_args()
    folder = options.keep or Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    figures: dict[str, dict[str, float]] = {}
    for name in options.names or LAYOUTS:
        took, busy, memory, _ = rehearse(name, folder)
        figures[name] = {"seconds": took, "cpu_seconds": busy, "peak_gb": memory}
        print(f"{name}: {took:.0f} s, {busy:.0f} s of a processor, {memory:.1f} GB", file=sys.stderr)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
