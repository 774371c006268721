"""Where a run's numbers go."""

from dataclasses import dataclass
from typing import Optional

from miles.flags import flag


@dataclass(frozen=True)
class TrackingArguments:
    """tracking: console, files, TensorBoard and Weights & Biases."""

    output_dir: str = flag("outputs/run", "folder for metrics.jsonl, tensorboard/ and report.html", metavar="DIR")
    no_report: bool = flag(False, "do not write report.html", args=["--no-report"])
    report_samples: int = flag(4, "sampled answers a rollout shown in the report")
    use_wandb: bool = flag(False, "log to Weights & Biases too (extra wandb)")
    wandb_project: Optional[str] = flag(None, "W&B project")
    wandb_group: Optional[str] = flag(None, "W&B group")
    wandb_team: Optional[str] = flag(None, "W&B entity")
    disable_wandb_random_suffix: bool = flag(
        False, "name the W&B run by the run's title alone, without random letters behind it"
    )
    wandb_key: Optional[str] = flag(None, "W&B API key; default: the environment's")
    wandb_host: Optional[str] = flag(None, "W&B server")
