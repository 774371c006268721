"""prime-rl: TOML."""

from __future__ import annotations

from miles.compat.translate.launchers.base import Launcher
from miles.compat.translate.objective import Objective, token_mean, token_mean_of_ranks
from miles.compat.translate.translation import Document, Row, Translation, apply

SOURCE = "prime-rl since pull request 2562, src/prime_rl/trainer/rl/train.py"
OLD_SOURCE = "prime-rl d5106a4, src/prime_rl/trainer/rl/train.py"

ENVIRONMENT = "environments are prompts and a reward here: --prompt-data, and --rm-type or --custom-rm-path"

ROWS = {
    "max_steps": Row("--num-rollout", kind="number"),
    "model.name": Row("--hf-checkpoint"),
    "trainer.model.name": Row("--hf-checkpoint"),
    "output_dir": Row("--output-dir"),
    "wandb.project": Row("--wandb-project"),
    "wandb.name": Row("--wandb-group"),
    "orchestrator.group_size": Row("--n-samples-per-prompt", kind="number"),
    "orchestrator.rollouts_per_example": Row("--n-samples-per-prompt", kind="number"),
    "orchestrator.seq_len": Row("--rollout-max-context-len", kind="number"),
    "trainer.model.seq_len": Row("--max-tokens-per-gpu", "tokens of a packed micro-batch", "number"),
    "inference.model.max_model_len": Row("", "--rollout-max-context-len limits prompt and response here"),
    "trainer.optim.lr": Row("--lr", kind="number"),
    "trainer.optim.weight_decay": Row("--weight-decay", kind="number"),
    "trainer.optim.max_norm": Row("--clip-grad", kind="number"),
    "trainer.optim.betas1": Row("--adam-beta1", kind="number"),
    "trainer.optim.betas2": Row("--adam-beta2", kind="number"),
    "trainer.optim.type": Row("", "AdamW is the optimizer here", neutral=("adamw",)),
    "trainer.scheduler.type": Row("--lr-decay-style", default="constant"),
    "trainer.scheduler.warmup_steps": Row("--lr-warmup-iters", kind="number"),
    "trainer.scheduler.min_lr": Row("--min-lr", kind="number"),
    "trainer.ckpt.interval": Row("--save-interval", kind="number", needs="--save"),
    "trainer.max_async_level": Row("--async-steps", kind="number"),
    "trainer.dist_timeout_seconds": Row("", "--distributed-timeout-minutes here"),
    "orchestrator.train.env": Row("", ENVIRONMENT),
    "orchestrator.env": Row("", ENVIRONMENT),
}


class PrimeRl(Launcher):
    """prime-rl's ``rl`` entry point."""

    name = "prime-rl"
    version = "prime-rl 3ad15c3 (settings), 0081765 (trainer)"
    reads = ("toml",)

    def recognizes(self, document: Document) -> bool:
        """By the tables of its processes."""
        return any(key.startswith(("orchestrator.", "trainer.")) for key in document.settings)

    def translate(self, translation: Translation) -> Objective:
        """Translate the settings that were found in its configurations."""
        apply(ROWS, translation)
        if translation.has("trainer.model.seq_len"):
            translation.carry("trainer.model.seq_len", "--use-dynamic-batch-size")
        key, group = "orchestrator.batch_size", "orchestrator.group_size"
        group = group if translation.has(group) else "orchestrator.rollouts_per_example"
        if translation.has(key):
            batch = translation.count(key, 1)
            translation.carry(key, "--global-batch-size", batch)
            size = translation.count(group, 1)
            if translation.has(group) and batch % size == 0:
                translation.differ(key, "samples there, prompts here", "--rollout-batch-size", batch // size)
        for name in translation.document.settings:
            if name.startswith("trainer.loss.") and not name.endswith("ratio_type"):
                translation.miss(
                    name, "its token loss (tokens dropped by their mismatch, without a clip) is not one of ours"
                )
        return _objective(translation)


def _objective(translation: Translation) -> Objective:
    words = ("--loss-aggregation", "token_mean")
    key = "trainer.loss.ratio_type"
    if not translation.has(key):
        return Objective("every RL loss", "1/T Σ m l", SOURCE, token_mean, "token_mean", words)
    if translation.text(key) != "token":
        translation.fail(
            key, "divides by the packed micro-batches, which are not in the file: not evaluated; drop the key"
        )
    depends = "ranks: each divides by its own tokens"
    translation.differ(key, f"depends on {depends}", *words)
    formula = "mean over ranks of (Σ m l / Σ m) of each"
    return Objective(
        f"{key} = token", formula, OLD_SOURCE, token_mean_of_ranks, "token_mean", words, depends=depends, exact=False
    )


PRIME_RL = PrimeRl()
