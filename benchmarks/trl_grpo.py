"""Run GRPO steps with TRL for vs_trl.py, in TRL's own environment, and write their seconds and rewards as JSON."""

from __future__ import annotations

import argparse
import base64
import io
import json
import re
import time
from pathlib import Path

from datasets import Dataset
from PIL import Image
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer


def last_number(completions: list, label: list[str], **_: object) -> list[float]:
    """Return 1.0 if the last number of the answer is the label, else 0.0."""
    texts = [completion[-1]["content"] for completion in completions]
    numbers = [re.findall(r"-?\d+", text) for text in texts]
    return [float(bool(digits) and int(digits[-1]) == int(want)) for digits, want in zip(numbers, label, strict=True)]


def even_length(completions: list, **_: object) -> list[float]:
    """Return 1.0 for an answer of even length, as even_length.py does."""
    return [1.0 - len(completion[-1]["content"]) % 2 for completion in completions]


class TimedTrainer(GRPOTrainer):
    """Add up the seconds of generation, scoring included, and keep the rewards of the step or evaluation."""

    generate_seconds = 0.0

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.rewards: list[float] = []

    def take_reward(self) -> float:
        """Return the mean reward since the last call."""
        rewards, self.rewards = self.rewards, []
        return sum(rewards) / len(rewards)

    def _calculate_rewards(self, *args, **kwargs):
        rewards = super()._calculate_rewards(*args, **kwargs)
        self.rewards += rewards.sum(dim=1).tolist()
        return rewards

    def _generate_and_score_completions(self, *args, **kwargs):
        started = time.perf_counter()
        try:
            return super()._generate_and_score_completions(*args, **kwargs)
        finally:
            self.generate_seconds += time.perf_counter() - started


class StepTimer(TrainerCallback):
    """Time from the end of one optimizer step to the end of the next. Training is the part that is not generation."""

    def __init__(self) -> None:
        self.trainer: TimedTrainer | None = None
        self.steps: list[dict[str, float]] = []
        self.held_out: dict[int, float] = {}
        self._mark = (0.0, 0.0)

    def on_train_begin(self, *_: object, **__: object) -> None:
        self._mark = (time.perf_counter(), 0.0)

    def on_step_end(self, *_: object, **__: object) -> None:
        assert self.trainer is not None
        now, generated = time.perf_counter(), self.trainer.generate_seconds
        step, generate = now - self._mark[0], generated - self._mark[1]
        reward = self.trainer.take_reward()
        self.steps.append({"step": step, "generate": generate, "train": step - generate, "reward": reward})
        self._mark = (now, generated)

    def on_evaluate(self, *_: object, **__: object) -> None:
        assert self.trainer is not None
        self.held_out[len(self.steps)] = self.trainer.take_reward()
        self._mark = (time.perf_counter(), self.trainer.generate_seconds)


def configuration(options: argparse.Namespace) -> GRPOConfig:
    """Return the job of vs_trl.py for TRL: prompts x 8 samples in one optimizer step."""
    return GRPOConfig(
        output_dir=str(options.out.parent / "trl"),
        max_steps=options.steps,
        per_device_train_batch_size=options.micro_batch,
        gradient_accumulation_steps=8 * options.groups // options.micro_batch,
        num_generations=8,
        max_completion_length=options.response_tokens,
        temperature=1.0,
        learning_rate=1e-5,
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        max_grad_norm=1.0,
        beta=0.0,
        loss_type="grpo",
        bf16=not options.images,
        use_cpu=True,
        gradient_checkpointing=False,
        save_strategy="no",
        eval_strategy="steps" if options.held_out else "no",
        eval_on_start=bool(options.held_out),
        eval_steps=options.eval_interval,
        per_device_eval_batch_size=72,
        report_to="none",
        disable_tqdm=True,
        seed=options.seed,
    )


def read(path: Path, images: bool) -> Dataset:
    """Return the rows of a file as TRL's conversations."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    data = [{"prompt": [{"role": "user", "content": row["input"]}], "label": row["label"]} for row in rows]
    if images:
        for entry, row in zip(data, rows, strict=True):
            entry["prompt"][0]["content"] = row["input"].removeprefix("<image>")
            entry["image"] = Image.open(io.BytesIO(base64.b64decode(row["images"][0])))
    return Dataset.from_list(data)


def main() -> None:
    """Train and write ``{steps: [{step, generate, train, reward}, ...], held_out: {step: reward}}``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--micro-batch", type=int, default=16, help="samples per forward pass")
    parser.add_argument("--groups", type=int, default=8, help="prompts of a step")
    parser.add_argument("--response-tokens", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--held-out", type=Path, help="prompts of the evaluations, 8 samples each")
    parser.add_argument("--eval-interval", type=int, help="steps between evaluations")
    parser.add_argument("--even-length", action="store_true", help="reward answers of even length")
    parser.add_argument("--images", action="store_true", help="rows have the column images: PNGs in base64")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()

    timer = StepTimer()
    trainer = TimedTrainer(
        model=options.model,
        reward_funcs=even_length if options.even_length else last_number,
        args=configuration(options),
        train_dataset=read(options.prompts, options.images),
        eval_dataset=read(options.held_out, options.images) if options.held_out else None,
        callbacks=[timer],
    )
    timer.trainer = trainer
    trainer.train()
    options.out.write_text(json.dumps({"steps": timer.steps, "held_out": timer.held_out}))


if __name__ == "__main__":
    main()
