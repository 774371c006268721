"""Measure a step with ``--async-steps 1`` and with 0, if trainer and engine share the cores of one machine.

``python benchmarks/async_on_cpu.py --model outputs/models/SmolLM2-135M-Instruct [--cases tiny judge quickstart]``

Each case runs train.py twice and compares the medians. With K = 0 each phase uses all cores (``--colocate``); with K =
1 trainer and engine use half of them each (run/cpu_tuning.py). So overlap helps only if more threads do not:

``quickstart``  SmolLM2-135M, 12 new tokens: both phases are matrix products, which use every core.
``tiny``        a model of 0.1 million parameters, 96 new tokens: both phases are Python and one thread's work.
``judge``       the tiny model with a reward that waits, as for another host: cores are idle meanwhile.

Prints one JSON object per case. Run it on an idle machine: another job on one core changes the result.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import string
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from miles.commands.quickstart_parts.data import SEED, write_sets

if TYPE_CHECKING:
    from miles.types.sample import Sample

ROOT = Path(__file__).resolve().parents[1]
JUDGE_SECONDS = "JUDGE_SECONDS"  # environment variable of train.py and its workers
WARM_UP = 2  # steps that are not counted
PHASES = ("step", "generate", "rollout", "train", "sync_weights")
LETTERS = string.ascii_lowercase
SHARED = (
    "--device cpu --actor-num-gpus-per-node 1 --rollout-engine torch --rollout-batch-size 8 --n-samples-per-prompt 8 "
    "--lr 1e-5 --lr-decay-style constant --use-dynamic-batch-size --max-tokens-per-gpu 4096 --no-report"
)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face folder, for the case quickstart")
    parser.add_argument("--cases", nargs="+", choices=["quickstart", "tiny", "judge"], default=["tiny", "judge"])
    parser.add_argument(
        "--rollouts", type=int, default=16, help=f"iterations of each run; the first {WARM_UP} are not counted"
    )
    parser.add_argument("--judge-seconds", type=float, default=2.0, help="duration of the reward in the case judge")
    return parser.parse_args()


async def judge(samples: Sequence[Sample]) -> list[float]:
    """Return the share of vowels after a wait, like a reward from another host (``--custom-rm-path``)."""
    await asyncio.sleep(float(os.environ.get(JUDGE_SECONDS, "0")))
    return [sum(letter in "aeiou" for letter in s.response) / max(len(s.response), 1) for s in samples]


def make_tiny(folder: Path) -> None:
    """Write a random Llama over the letters, its tokenizer, and prompts of three letters."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    letters = Tokenizer(models.WordLevel({x: i for i, x in enumerate(["<end>", *LETTERS])}, unk_token="<end>"))
    letters.pre_tokenizer, letters.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=27,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=letters, eos_token="<end>", pad_token="<end>").save_pretrained(folder)
    rows = (json.dumps({"input": 3 * letter}) for letter in LETTERS)
    (folder / "prompts.jsonl").write_text("\n".join(rows))


def flags_of(case: str, options: argparse.Namespace, folder: Path) -> list[str]:
    """Return the flags of train.py for ``case``, without ``--async-steps``."""
    if case == "quickstart":
        write_sets(folder / "data", SEED)
        model, prompts = options.model.absolute(), folder / "data" / "train.jsonl"
        words = "--label-key label --apply-chat-template --rollout-shuffle --rm-type last_number --bf16"
        words += " --rollout-max-response-len 12"
    else:
        model, prompts = folder / "tiny", folder / "tiny" / "prompts.jsonl"
        words = "--custom-rm-path benchmarks.async_on_cpu:judge --rollout-max-response-len 96"
    return f"--hf-checkpoint {model} --prompt-data {prompts} {words} {SHARED}".split()


def medians(case: str, k: int, options: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Run train.py once and return the median seconds of each phase."""
    out = folder / f"{case}-{k}"
    command = [sys.executable, "train.py", *flags_of(case, options, folder), "--num-rollout", str(options.rollouts)]
    command += ["--output-dir", str(out), *(["--async-steps", str(k)] if k else ["--colocate"])]
    seconds = options.judge_seconds if case == "judge" else 0.0
    environment = {**os.environ, JUDGE_SECONDS: str(seconds)}
    subprocess.run(command, cwd=ROOT, check=True, stdout=sys.stderr, env=environment)
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "time/train" in row][WARM_UP:]
    names = [name for name in PHASES if f"time/{name}" in steps[0]]
    return {name: round(statistics.median(row[f"time/{name}"] for row in steps), 3) for name in names}


def main() -> None:
    options = parse()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_tiny(folder / "tiny")
        for case in options.cases:
            synchronous, ahead = (medians(case, k, options, folder) for k in (0, 1))
            gain = round(synchronous["step"] / ahead["step"], 3)
            print(json.dumps({"case": case, "k=0": synchronous, "k=1": ahead, "gain": gain}), flush=True)


if __name__ == "__main__":
    main()
