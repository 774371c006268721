"""Choose what is saved, when, and what a run starts from."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Optional

from miles.arguments.cluster import ClusterArguments
from miles.arguments.evaluation import EvaluationArguments
from miles.flags import Errors, flag


@dataclass(frozen=True)
class CheckpointArguments:
    """checkpoint: saving, resuming and exporting."""

    save: Optional[str] = flag(None, "folder of the checkpoints", metavar="DIR")
    save_interval: Optional[int] = flag(None, "iterations between checkpoints; the last iteration is always saved")
    save_keep_last: Optional[int] = flag(None, "keep only the newest N checkpoints in --save", metavar="N")
    save_retain_interval: Optional[int] = flag(
        None,
        "keep the checkpoints after every K-th iteration, and the newest; with --save-keep-last both sets are kept",
        metavar="K",
    )
    save_best: Optional[str] = flag(
        None,
        "also save a checkpoint after an iteration that is the best so far by this metric, such as "
        "eval/heldout/accuracy or train/kl_loss:min, and keep it until a better one is complete",
        metavar="METRIC[:max|min]",
    )
    async_save: bool = flag(
        False, "copy a checkpoint into memory and write it while training goes on; needs memory for one more copy"
    )
    start_over: bool = flag(False, "if --save holds checkpoints of another run, save into a new folder inside it")
    load: Optional[str] = flag(
        None,
        "folder of checkpoints, whose newest complete one is resumed; the run starts fresh if it is empty",
        metavar="DIR",
    )
    no_load_fallback: bool = flag(False, "stop if the newest checkpoint in --load is damaged, and take no earlier one")
    no_load_optim: bool = flag(False, "do not load the optimizer's state", args=["--no-load-optim"])
    no_load_rng: bool = flag(False, "do not load the random state", args=["--no-load-rng"])
    finetune: bool = flag(False, "load only the weights, and start at iteration 0")
    save_hf: Optional[str] = flag(
        None,
        "folder of a Hugging Face export, written with each checkpoint of --save and at the end of the run; "
        "{iteration} (or {rollout_id}) in the name is replaced by the number of iterations done",
        metavar="DIR",
    )


def check_checkpoint(
    checkpoint: CheckpointArguments, evaluation: EvaluationArguments, cluster: ClusterArguments, errors: Errors
) -> None:
    """Check that flags of saving have a folder to save to, and those of loading one to load from."""
    errors.at_least(checkpoint, 1, "save_interval", "save_keep_last", "save_retain_interval")
    if checkpoint.save is None:
        unused = ["save_interval", "save_keep_last", "save_retain_interval", "save_best", "async_save", "start_over"]
        errors.refuse_ignored(checkpoint, unused, "without --save", "add --save DIR")
        if errors.none_about("max_restarts"):
            why = "without --save: there would be no checkpoint to restart from"
            errors.refuse_ignored(cluster, ["max_restarts"], why, "add --save DIR and --save-interval")
    if checkpoint.load is None:
        unused = ["finetune", "no_load_fallback", "no_load_optim", "no_load_rng"]
        errors.refuse_ignored(checkpoint, unused, "without --load", "add --load DIR")
    _check_best(checkpoint, evaluation, errors)


def _check_best(checkpoint: CheckpointArguments, evaluation: EvaluationArguments, errors: Errors) -> None:
    """Check the metric of ``--save-best`` as far as the flags say which metrics there will be."""
    given = checkpoint.save_best
    if given is None:
        return
    name, colon, mode = given.partition(":")
    if colon and mode not in ("max", "min"):
        errors.refuse("save_best", given, f"{mode!r} is neither max nor min", f"give {name}:max or {name}:min")
    elif not re.fullmatch(r"(eval|rollout|train)/.+", name):
        rule = "is no metric of metrics.jsonl: these begin with eval/, rollout/ or train/"
        errors.refuse("save_best", given, rule, "give one such as eval/NAME/accuracy or rollout/reward")
    elif name.startswith("eval/") and not evaluation.has_sets:
        rule = "needs an evaluation set, and the run has none"
        errors.refuse("save_best", given, rule, "add --eval-prompt-data NAME FILE and --eval-interval")


def read_best(given: str) -> tuple[str, Literal["max", "min"]]:
    """Return the metric that ``--save-best`` names, and whether its largest or its smallest value is the best."""
    name, _, mode = given.partition(":")
    return name, "min" if mode == "min" else "max"


def explain_checkpoint(checkpoint: CheckpointArguments) -> list[str]:
    """List what is saved, and when."""
    lines = []
    if checkpoint.save is not None:
        when = f"every {checkpoint.save_interval} iterations and" if checkpoint.save_interval else "only"
        lines.append(f"{checkpoint.save}: checkpoints, {when} after the last iteration{_kept(checkpoint)}")
        if checkpoint.save_best is not None:
            metric, mode = read_best(checkpoint.save_best)
            size = "largest" if mode == "max" else "smallest"
            lines.append(f"{checkpoint.save}: the best checkpoint too, that of the {size} {metric}")
        if checkpoint.async_save:
            lines.append("checkpoints are copied into memory, and written while training goes on")
    if checkpoint.save_hf is not None:
        when = "with each checkpoint and at the end" if checkpoint.save is not None else "at the end"
        lines.append(f"{checkpoint.save_hf}: Hugging Face export {when}")
    return lines


def _kept(checkpoint: CheckpointArguments) -> str:
    """Say which checkpoints stay, if not all do."""
    last, interval = checkpoint.save_keep_last, checkpoint.save_retain_interval
    if last is None and interval is None:
        return ""
    retained = "" if interval is None else f" and those after a multiple of {interval} iterations"
    return f"; the newest {last or 1}{retained} are kept"


def export_folder(save_hf: str, iterations: int) -> Path:
    """Return the folder of ``--save-hf`` after so many iterations."""
    return Path(save_hf.replace("{rollout_id}", str(iterations)).replace("{iteration}", str(iterations)))
