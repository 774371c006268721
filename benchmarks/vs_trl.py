"""Compare the seconds per step of miles and TRL 1.16 on one job, measured alternately in one run.

    python benchmarks/vs_trl.py --model FOLDER --prompts train.jsonl --out outputs/vs_trl/result.json
    python benchmarks/vs_trl.py --images 224       an image per prompt, fp32, a random model that is written here

The job: GRPO, 8 prompts x 8 samples, 16 new tokens, bf16, one optimizer step per iteration. ``--groups`` and
``--response-tokens`` change it, and ``--qwen`` trains a random Qwen2 of 0.4 billion parameters.

miles and TRL take turns, so that a busy machine slows both. The first step of every turn is warm-up and not counted.
Prints medians, the ratio TRL / miles, and what both learn: the mean reward of the last five steps of each turn. The
turns begin with the same weights and have the seeds 1, 2, ...

    python benchmarks/vs_trl.py --model FOLDER --prompts train.jsonl --held-out heldout.jsonl --turns 4 --steps 34

shows learning: the mean reward of both on held-out prompts, 8 samples each, before training and every 8 steps.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TRL_VERSION = "1.16.0"
EVAL_INTERVAL = 8  # steps
Steps = list[dict[str, float]]
Curve = dict[str, float]  # mean reward on the held-out prompts after so many steps


def ensure_trl(venv: Path) -> Path:
    """Return TRL's interpreter. Create the environment if it is missing, with the project's pin of torch."""
    python, stamp = venv / "bin" / "python", venv / ".trl-stamp"
    if python.exists() and stamp.exists() and stamp.read_text() == TRL_VERSION:
        return python
    torch = next(x for x in (ROOT / "constraints.txt").read_text().splitlines() if x.startswith("torch=="))
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, torch], check=True)
    subprocess.run([*pip, f"trl=={TRL_VERSION}", torch, "pillow"], check=True)
    vision = next(x for x in (ROOT / "constraints.txt").read_text().splitlines() if x.startswith("torchvision=="))
    subprocess.run([*pip, "--no-deps", vision], check=True)  # it would replace torch
    if subprocess.run([str(python), "-c", "import torchvision"], capture_output=True).returncode:
        subprocess.run([str(python), str(ROOT / "scripts" / "torchvision_operators.py")], check=True)
    stamp.write_text(TRL_VERSION)
    return python


def write_image_job(folder: Path, side: int) -> tuple[Path, Path]:
    """Write a random Qwen2.5-VL of 5.5 million parameters, and prompts with images of side x side tokens."""
    sys.path.insert(0, str(ROOT))
    from examples.small_task import write_rows, write_small_vision_model
    from examples.vision import write

    write.SIDE, write.CELL = side, 28  # cells, and pixels of a cell, which is one token
    rng = random.Random(1)
    cells = (tuple(rng.choices(range(len(write.PALETTE)), k=write.SIDE**2)) for _ in range(256))
    write_rows(folder / "train.jsonl", (write.row([drawn], rng)[0] for drawn in cells))
    write_small_vision_model(folder / "model", 1, hidden=256, layers=4, patch=write.CELL // 2)
    return folder / "model", folder / "train.jsonl"


def write_qwen(folder: Path, tokenizer: str) -> Path:
    """Write a model of the shape of Qwen2.5-0.5B with random weights, and the vocabulary of the tokenizer."""
    import torch
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    words = AutoTokenizer.from_pretrained(tokenizer)
    shape = dict(hidden_size=896, intermediate_size=4864, num_hidden_layers=24, tie_word_embeddings=True)
    heads = dict(num_attention_heads=14, num_key_value_heads=2)
    ends = dict(eos_token_id=words.eos_token_id, pad_token_id=words.pad_token_id)
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=len(words), **shape, **heads, **ends)).to(torch.bfloat16)
    for part in (model, words):
        part.save_pretrained(folder)
    return folder


def run_miles(options: argparse.Namespace, folder: Path, seed: int) -> tuple[Steps, Curve]:
    """Run one turn of miles. Return the seconds of the parts of every iteration with its mean reward, and the curve."""
    flags = (
        f"--hf-checkpoint {options.model} --prompt-data {options.prompts} --label-key label --apply-chat-template "
        f"--rollout-shuffle --rm-type last_number --num-rollout {options.steps} --rollout-batch-size {options.groups} "
        f"--n-samples-per-prompt 8 --rollout-max-response-len {options.response_tokens} --lr 1e-5 "
        "--lr-decay-style constant --adam-beta2 0.95 "
        "--bf16 --use-dynamic-batch-size --max-tokens-per-gpu 4096 --device cpu --actor-num-gpus-per-node 1 "
        f"--colocate --no-report --output-dir {folder} --seed {seed} --rollout-seed {seed}"
    )
    if options.held_out:
        flags += f" --eval-prompt-data held_out {options.held_out} --eval-interval {EVAL_INTERVAL}"
        flags += " --n-samples-per-eval-prompt 8"
    if options.images:
        flags = flags.replace("--bf16", "--fp32") + ' --multimodal-keys {"image":"images"}'
    if options.qwen:
        flags = flags.replace("--rm-type last_number", "--custom-rm-path benchmarks.even_length:even_length")
    subprocess.run([sys.executable, "train.py", *flags.split()], cwd=ROOT, check=True, stdout=sys.stderr)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [
        {name.removeprefix("time/"): value for name, value in row.items() if name.startswith("time/")}
        | {"reward": row["rollout/reward"]}
        for row in rows
        if "rollout/reward" in row
    ]
    curve = "eval/held_out/reward"
    return steps, {str(row["step"]): row[curve] for row in rows if curve in row}


def run_trl(options: argparse.Namespace, folder: Path, seed: int, python: Path) -> tuple[Steps, Curve]:
    """Run one turn of TRL. Return its steps and its curve, as :func:`run_miles`."""
    folder.mkdir(parents=True)
    out = folder / "steps.json"
    command = [str(python), str(ROOT / "benchmarks" / "trl_grpo.py"), "--model", options.model]
    command += ["--prompts", str(options.prompts), "--steps", str(options.steps), "--out", str(out)]
    command += ["--micro-batch", str(options.micro_batch), "--groups", str(options.groups)]
    command += ["--response-tokens", str(options.response_tokens), *["--images"] * bool(options.images)]
    command += ["--even-length"] * options.qwen + ["--seed", str(seed)]
    if options.held_out:
        command += ["--held-out", str(options.held_out), "--eval-interval", str(EVAL_INTERVAL)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run(command, check=True, stdout=sys.stderr, env=environment)
    result = json.loads(out.read_text())
    return result["steps"], result["held_out"]


def mean_curve(curves: list[Curve]) -> Curve:
    """Return the mean over the turns."""
    return {step: statistics.mean(curve[step] for curve in curves) for step in curves[0]}


def medians(turns: list[Steps]) -> dict[str, float]:
    """Return the median of every part over all steps except the first of each turn."""
    steps = [step for turn in turns for step in turn[1:]]
    parts = sorted({part for step in steps for part in step} - {"reward"})
    return {part: statistics.median(step[part] for step in steps if part in step) for part in parts}


def main() -> None:
    """Measure, write the JSON and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="Hugging Face folder")
    parser.add_argument("--prompts", type=Path, help="jsonl with input and label, such as miles quickstart writes")
    parser.add_argument("--held-out", type=Path, help="prompts to evaluate on, such as miles quickstart writes")
    parser.add_argument("--qwen", action="store_true", help="with the tokenizer of --model and random weights")
    parser.add_argument("--groups", type=int, default=8, help="prompts of a step, with 8 samples each")
    parser.add_argument("--response-tokens", type=int, default=16, help="of a sample, at most")
    parser.add_argument("--images", type=int, metavar="PIXELS", help="an image of PIXELS x PIXELS per prompt")
    parser.add_argument("--steps", type=int, default=6, help="steps per turn; the first is warm-up")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--micro-batch", type=int, default=16, help="samples of a forward pass of TRL; miles packs all")
    parser.add_argument("--out", type=Path, default=Path("outputs/vs_trl/result.json"))
    options = parser.parse_args()
    if options.images and options.images % 28:
        parser.error(f"--images {options.images}: the model reads 28 pixels as a token; give a multiple")
    if options.steps < 2:
        parser.error(f"--steps {options.steps}: the first step of a turn is not counted; give 2 or more")
    folder = options.out.resolve().parent
    if options.images:
        options.model, options.prompts = write_image_job(folder, options.images // 28)
    if options.model is None or options.prompts is None:
        parser.error("give --model and --prompts, or --images")
    options.model, options.prompts = str(Path(options.model).resolve()), options.prompts.resolve()
    if options.held_out:
        options.held_out = options.held_out.resolve()
    if options.qwen:
        options.model = str(write_qwen(folder / "qwen", options.model))

    trl_python = ensure_trl(ROOT / ".venv-trl")
    shutil.rmtree(folder / "turns", ignore_errors=True)
    turns: dict[str, list[Steps]] = {"miles": [], "trl": []}
    curves: dict[str, list[Curve]] = {"miles": [], "trl": []}
    for turn in range(options.turns):
        for trainer, (steps, curve) in {
            "miles": run_miles(options, folder / "turns" / f"miles-{turn}", turn + 1),
            "trl": run_trl(options, folder / "turns" / f"trl-{turn}", turn + 1, trl_python),
        }.items():
            turns[trainer].append(steps)
            curves[trainer].append(curve)

    median = {trainer: medians(measured) for trainer, measured in turns.items()}
    shared = sorted(set(median["miles"]) & set(median["trl"]))
    ratios = {part: median["trl"][part] / median["miles"][part] for part in shared if median["miles"][part] > 0}
    rewards = {
        trainer: [step["reward"] for turn in measured for step in turn[-5:]] for trainer, measured in turns.items()
    }
    result = {
        "median_seconds": median,
        "trl_over_miles": ratios,
        "last_rewards": {trainer: statistics.mean(values) for trainer, values in rewards.items()},
        "held_out": {trainer: mean_curve(measured) for trainer, measured in curves.items()},
        "held_out_by_seed": curves,
        "steps": turns,
        "trl": TRL_VERSION,
    }
    options.out.write_text(json.dumps(result, indent=2) + "\n")
    summary = ("median_seconds", "trl_over_miles", "last_rewards", "held_out")
    print(json.dumps({name: result[name] for name in summary}, indent=2))


if __name__ == "__main__":
    main()
