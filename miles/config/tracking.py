"""Choose the files and services for the metrics of a run."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal, Optional

from miles.base.flags import Errors, flag

_of_wandb = partial(flag, needs="--use-wandb")


@dataclass(frozen=True)
class TrackingArguments:
    """tracking: console, files, TensorBoard and Weights & Biases."""

    output_dir: str = flag("outputs/run", "folder of metrics.jsonl, tensorboard/ and report.html", file="new folder")
    no_report: bool = flag(False, "do not write report.html", args=["--no-report"])
    report_samples: int = flag(4, "sampled answers per iteration in report.html", needs="no --no-report", at_least=0)
    report_port: Optional[int] = flag(
        None,
        "serve the live report on this port of the loopback address during the run; 0 takes a free one",
        within="[0, 65535]",
    )
    samples_max_mb: float = flag(
        1000.0, "bound of samples.jsonl in MB, shared by the iterations; 0 stores no answers", at_least=0, metavar="MB"
    )
    metrics_max_mb: float = flag(
        1000.0,
        "bound of metrics.jsonl and of tensorboard/ in MB each; at the bound, metrics.jsonl keeps the newest rows and "
        "fewer and fewer old ones, and tensorboard/ loses its oldest steps",
        at_least=1,
        metavar="MB",
    )
    samples_token_values: Optional[int] = flag(
        None,
        "answers per iteration that are stored with ratio, advantage, correction and the trainer's log-prob of each "
        "token; default: --report-samples; -1: all",
        at_least=-1,
        metavar="N",
    )
    log_format: Literal["text", "json"] = flag(
        "text", "what the launcher prints: text, or one JSON object per line with time, level and event"
    )
    notify_url: Optional[str] = flag(
        None, "post a JSON object to this address when the run ends or fails, and when a health verdict is bad"
    )
    prometheus_port: Optional[int] = flag(
        None,
        "serve the newest metrics for Prometheus on this port of the loopback address; 0 takes a free one "
        "(extra prometheus)",
        within="[0, 65535]",
    )
    use_mlflow: bool = flag(False, "log to MLflow too (extra mlflow)")
    mlflow_tracking_uri: Optional[str] = flag(
        None,
        "MLflow server or folder; default: MLFLOW_TRACKING_URI in the environment, or else the folder mlruns",
        needs="--use-mlflow",
    )
    mlflow_experiment: str = flag("miles", "MLflow experiment", needs="--use-mlflow")
    report_to: Optional[str] = flag(
        None, "log to this service too (extra of its name)", choices=("trackio", "swanlab"), metavar="SERVICE"
    )
    report_project: str = flag("miles", "project in the service of --report-to", needs="--report-to")
    use_wandb: bool = flag(False, "log to Weights & Biases too (extra wandb)")
    wandb_project: Optional[str] = _of_wandb(None, "W&B project")
    wandb_group: Optional[str] = _of_wandb(None, "W&B group")
    wandb_team: Optional[str] = _of_wandb(None, "W&B entity")
    disable_wandb_random_suffix: bool = _of_wandb(
        False, "name the W&B run by the run's title alone, without random letters after it"
    )
    wandb_run_id: Optional[str] = _of_wandb(
        None,
        "id of the W&B run: one that exists is continued, else it is created; default: WANDB_RUN_ID, or the id of the "
        "checkpoint in --load, or a new one",
    )
    wandb_mode: Optional[str] = _of_wandb(
        None,
        "send to the W&B server, write files for wandb sync, or do neither; default: WANDB_MODE, or online",
        choices=("online", "offline", "disabled"),
    )
    wandb_dir: Optional[str] = _of_wandb(
        None, "folder of W&B's files, where wandb/ is made; default: WANDB_DIR, or --output-dir", metavar="DIR"
    )
    wandb_key: Optional[str] = _of_wandb(None, "W&B API key; default: the one in the environment")
    wandb_host: Optional[str] = _of_wandb(None, "W&B server")

    @property
    def samples_max_bytes(self) -> int:
        """``--samples-max-mb`` in bytes."""
        return int(self.samples_max_mb * 1_000_000)

    @property
    def metrics_max_bytes(self) -> int:
        """``--metrics-max-mb`` in bytes."""
        return int(self.metrics_max_mb * 1_000_000)

    @property
    def token_values(self) -> int:
        """How many answers of an iteration get the trainer's values of their tokens; -1: all."""
        return self.report_samples if self.samples_token_values is None else self.samples_token_values


def check_tracking(tracking: TrackingArguments, errors: Errors) -> None:
    """Check the address of notifications, and the id of a W&B run."""
    if tracking.notify_url is not None and not re.fullmatch(r"https?://[^/\s]+(/\S*)?", tracking.notify_url):
        errors.refuse("notify_url", None, "is not an address of the web", "give one that begins with https://")
    if tracking.wandb_run_id is not None and not re.fullmatch(r"[^/\\#?%:;,'\s]{1,128}", tracking.wandb_run_id):
        rule = "is no id of a W&B run: 1 to 128 characters, none of them a space or one of / \\ # ? % : ; , '"
        errors.refuse("wandb_run_id", tracking.wandb_run_id, rule, "give the last part of the run's address")


def explain_tracking(tracking: TrackingArguments) -> Iterator[str]:
    """List the files with the metrics of the run."""
    report = "" if tracking.no_report else ", report.html"
    yield f"{tracking.output_dir}: metrics.jsonl, samples.jsonl, run.yaml, run.json, tensorboard/{report}"
    if tracking.report_port is not None:
        yield f"live report on http://127.0.0.1:{tracking.report_port or '(a free port)'}/ during the run"
    if tracking.prometheus_port is not None:
        yield f"metrics for Prometheus on http://127.0.0.1:{tracking.prometheus_port or '(a free port)'}/metrics"
    if tracking.notify_url is not None:
        yield "--notify-url gets the end of the run, its failure, and bad health verdicts"
    if tracking.use_wandb:
        mode = f" ({tracking.wandb_mode})" if tracking.wandb_mode is not None else ""
        yield f"W&B{mode}: the project {tracking.wandb_project or 'of WANDB_PROJECT, or uncategorized'}"
    if tracking.use_mlflow:
        yield f"MLflow: the experiment {tracking.mlflow_experiment}"
    if tracking.report_to is not None:
        yield f"{tracking.report_to}: the project {tracking.report_project}"
