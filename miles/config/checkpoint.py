"""Choose the files that a run saves, and when, and the files that it starts from."""

import hashlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Optional

from miles.base.flags import Errors, flag
from miles.base.secrets import HIDDEN, public
from miles.base.storage import fault_of_url, is_url, protocol_of
from miles.config.evaluation import EvaluationArguments

# Switches that a run does not need to continue from its own checkpoints: with them it would begin from one of another.
NOT_OF_ITS_OWN = ("finetune", "no_load_optim", "no_load_rng")
_CHECKPOINT = re.compile(r"(.+)/(iter_\d{7})/*")  # the URL of one checkpoint

_of_save = partial(flag, needs="--save")
_of_load = partial(flag, needs="--load")


@dataclass(frozen=True)
class CheckpointArguments:
    """checkpoint: saving, resuming and exporting."""

    save: Optional[str] = flag(
        None,
        "folder of the checkpoints; a URL such as s3://bucket/run names one in remote storage",
        needs="a trainer",
        file="new folder",
    )
    save_interval: Optional[int] = _of_save(
        None, "iterations between checkpoints; the last iteration is always saved", at_least=1
    )
    save_keep_last: Optional[int] = _of_save(
        None, "keep only the newest N checkpoints in --save", at_least=1, metavar="N"
    )
    save_retain_interval: Optional[int] = _of_save(
        None,
        "keep the checkpoints after every K-th iteration, and the newest; with --save-keep-last both sets are kept",
        at_least=1,
        metavar="K",
    )
    save_best: Optional[str] = _of_save(
        None,
        "also save a checkpoint after an iteration that is the best so far by this metric, such as "
        "eval/heldout/accuracy or train/kl_loss:min, and keep it until a better one is complete",
        metavar="METRIC[:max|min]",
    )
    async_save: bool = _of_save(
        False, "copy a checkpoint into memory and write it during training; needs memory for one more copy"
    )
    start_over: bool = _of_save(False, "if --save holds checkpoints of another run, save into a new folder inside it")
    load: Optional[str] = flag(
        None,
        "continue from the newest complete checkpoint of this folder or URL; only --save itself may have none yet",
        needs="a trainer",
        file="folder",
    )
    no_load_fallback: bool = _of_load(
        False, "stop if the newest checkpoint in --load is damaged, and take no earlier one"
    )
    no_load_optim: bool = _of_load(
        False, "do not load the optimizer's state; the learning rate's schedule starts again", args=["--no-load-optim"]
    )
    no_load_rng: bool = _of_load(False, "do not load the random state", args=["--no-load-rng"])
    finetune: bool = _of_load(False, "load only the weights, and start at iteration 0")
    save_hf: Optional[str] = flag(
        None,
        "folder or URL of a Hugging Face export, written with each checkpoint of --save and at the end of the run; "
        "{iteration} (or {rollout_id}) in the name is replaced by the number of iterations done",
        needs="a trainer",
        file="new folder",
    )
    storage_options: Optional[str] = flag(
        None,
        "JSON object of arguments of fsspec's file system for the URLs of --save, --load and --save-hf; default: what "
        "its package reads from the environment",
        needs="remote storage",
        metavar="JSON",
        has_lines=True,
    )
    remote_cache: Optional[str] = flag(
        None,
        "local folder of checkpoints on their way to and from remote storage; default: remote/ in --output-dir",
        needs="remote storage",
        file="new folder",
    )

    @property
    def urls(self) -> dict[str, str]:
        """The flags that name a folder in remote storage, with their values."""
        folders = {"save": self.save, "load": self.load, "save_hf": self.save_hf}
        return {name: text for name, text in folders.items() if text is not None and is_url(text)}

    @property
    def file_system_options(self) -> dict[str, Any]:
        """``--storage-options`` as keywords, without secrets that a file of settings has left out."""
        options: dict[str, Any] = {} if self.storage_options is None else json.loads(self.storage_options)
        return {name: value for name, value in options.items() if HIDDEN not in json.dumps(value)}

    def local(self, folder: str) -> Path:
        """Return the path of a folder of these flags on this machine: of a URL, the local copy."""
        if not is_url(folder):
            return Path(folder)
        assert self.remote_cache is not None, "validate() fills remote_cache"
        root, checkpoint = split_checkpoint(str(public("", folder)))  # run.json has it without secrets
        words = re.sub(r"[^\w.-]+", "-", root.partition("://")[2])[-60:].strip("-.")
        local = Path(self.remote_cache) / f"{words}-{hashlib.sha256(root.encode()).hexdigest()[:8]}"
        return local if checkpoint is None else local / checkpoint

    def inside(self, folder: str, name: str) -> str:
        """Return what names the folder or checkpoint ``name`` inside a folder of these flags."""
        return f"{folder.rstrip('/')}/{name}" if is_url(folder) else str(Path(folder) / name)


def checkpoint_name(iterations_done: int) -> str:
    """Return the name that the checkpoint after so many iterations has in ``--save``."""
    return f"iter_{iterations_done:07d}"


def first_iteration(checkpoint: CheckpointArguments) -> int | None:
    """Return the iteration at which the run starts; None if only remote storage knows it, or nobody can read it."""
    folder = checkpoint.load
    if folder is None or checkpoint.finetune:
        return 0
    if is_url(folder):
        return None
    try:
        return _newest_checkpoint(folder) or 0
    except OSError:  # the launcher refuses to run (base/disk_faults.py)
        return None


def fault_of_nothing(checkpoint: CheckpointArguments, ref_load: str | None) -> tuple[str, str] | None:
    """Return the rule that ``--load`` breaks if it names a folder without a checkpoint, and what to do.

    None if there is one, however damaged; for the first job of a chain, whose ``--load`` is its ``--save``; and if
    ``--ref-load`` gives the weights, as in launch scripts. Of a URL, the local copy of its index is read.
    """
    if checkpoint.load is None or (ref_load is not None and not checkpoint.finetune):
        return None
    folder, save = checkpoint.local(checkpoint.load), checkpoint.save
    is_own = save is not None and checkpoint.local(save).resolve() == folder.resolve()
    if is_own or _is_checkpoint(folder):
        return None
    if not is_url(checkpoint.load) and not os.path.isdir(folder):
        return "there is no such folder", "check the path, or drop --load to start from --hf-checkpoint"
    if os.path.isfile(folder / "config.json"):
        return "is a model, and no checkpoint of a run", "give it to --hf-checkpoint, and drop --load"
    return "holds no checkpoint", "check the path, or drop --load to start from --hf-checkpoint"


def _is_checkpoint(folder: Path) -> bool:
    """Return whether a folder is or holds a checkpoint, complete or not; true if nobody can read it."""
    try:
        names = [folder.name, *os.listdir(folder)]
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False
    except OSError:
        return True
    return "state.json" in names or any(re.fullmatch(r"(\.replaced_)?iter_\d{7}", name) for name in names)


def _newest_checkpoint(folder: str) -> int | None:
    """Return after how many iterations the newest complete checkpoint in a local folder was saved; None without one."""
    complete = [done for path, done in _checkpoints(folder) if os.path.isfile(path / "manifest.json")]
    return max(complete, default=None)


def _checkpoints(folder: str) -> Iterator[tuple[Path, int]]:
    """Yield the checkpoints in a local folder by their names, complete or not, with their iterations.

    Raises ``OSError`` if the folder cannot be read.
    """
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError, ValueError):  # the last for a name that no folder can have
        names = []
    for path in (Path(folder), *(Path(folder) / name for name in names)):  # --load may name one of them
        if (match := re.fullmatch(r"iter_(\d{7})", path.name)) is not None:
            yield path, int(match[1])


def split_checkpoint(url: str) -> tuple[str, str | None]:
    """Return the URL of a folder of checkpoints, and the name of the checkpoint if ``url`` names one in it.

    >>> split_checkpoint("s3://b/run/iter_0000004"), split_checkpoint("s3://b/run/")
    (('s3://b/run', 'iter_0000004'), ('s3://b/run', None))
    """
    match = _CHECKPOINT.fullmatch(url)
    return (url.rstrip("/"), None) if match is None else (match[1].rstrip("/"), match[2])


def check_checkpoint(checkpoint: CheckpointArguments, evaluation: EvaluationArguments, errors: Errors) -> None:
    """Check the metric of ``--save-best``, and that URLs can be reached by the installed packages."""
    _check_best(checkpoint, evaluation, errors)
    urls = checkpoint.urls
    for name, url in urls.items():
        fault = fault_of_url(url, written=name != "load")
        if fault is None and name == "save" and protocol_of(url) == "hf" and not url.startswith("hf://buckets/"):
            fault = (
                "is a repository, which would keep every checkpoint in its history",
                "give hf://buckets/OWNER/NAME, or push the model there with --save-hf",
            )
        if fault is not None:
            errors.refuse(name, url, *fault)
    errors.json_object("storage_options", checkpoint.storage_options)
    protocols = sorted({protocol_of(url) for url in urls.values()})
    if checkpoint.storage_options is not None and len(protocols) > 1:
        rule = f"would be passed to {' and '.join(protocols)} alike"
        errors.refuse("storage_options", None, rule, "set the credentials in the environment instead")


def fill_remote_cache(checkpoint: CheckpointArguments, output_dir: str) -> CheckpointArguments:
    """Fill in ``--remote-cache`` if a flag names a folder in remote storage."""
    if checkpoint.remote_cache is not None or not checkpoint.urls:
        return checkpoint
    return replace(checkpoint, remote_cache=str(default_remote_cache(output_dir)))


def default_remote_cache(output_dir: str) -> Path:
    """Return the folder that ``--remote-cache`` names by default."""
    return Path(output_dir) / "remote"


def _check_best(checkpoint: CheckpointArguments, evaluation: EvaluationArguments, errors: Errors) -> None:
    """Check the metric of ``--save-best`` as far as the flags say which metrics there will be."""
    metric = checkpoint.save_best
    if metric is None:
        return
    name, colon, mode = metric.partition(":")
    if colon and mode not in ("max", "min"):
        errors.refuse("save_best", metric, f"{mode!r} is neither max nor min", f"give {name}:max or {name}:min")
    elif not re.fullmatch(r"(eval|rollout|train)/.+", name):
        rule = "is no metric of metrics.jsonl: these begin with eval/, rollout/ or train/"
        errors.refuse("save_best", metric, rule, "give one such as eval/NAME/accuracy or rollout/reward")
    elif name.startswith("eval/") and not evaluation.has_sets:
        rule = "needs an evaluation set, and the run has none"
        errors.refuse("save_best", metric, rule, "add --eval-prompt-data NAME FILE and --eval-interval")


def read_best(metric: str) -> tuple[str, Literal["max", "min"]]:
    """Return the metric that ``--save-best`` names, and whether its largest or its smallest value is the best."""
    name, _, mode = metric.partition(":")
    return name, "min" if mode == "min" else "max"


def explain_checkpoint(checkpoint: CheckpointArguments) -> list[str]:
    """List the files that are loaded and saved, and when."""
    lines = []
    if checkpoint.load is not None and not is_url(checkpoint.load):
        lines.append(f"{checkpoint.load}: {_loaded(checkpoint, checkpoint.load)}")
    if checkpoint.save is not None:
        when = f"every {checkpoint.save_interval} iterations and" if checkpoint.save_interval else "only"
        lines.append(f"{checkpoint.save}: checkpoints, {when} after the last iteration{_retention(checkpoint)}")
        if checkpoint.save_best is not None:
            metric, mode = read_best(checkpoint.save_best)
            size = "largest" if mode == "max" else "smallest"
            lines.append(f"{checkpoint.save}: the best checkpoint too, with the {size} {metric}")
        if checkpoint.async_save:
            lines.append("checkpoints are copied into memory, and written during training")
        if is_url(checkpoint.save):
            lines.append(f"{checkpoint.local(checkpoint.save)}: checkpoints before they are uploaded, and the newest")
    if checkpoint.save_hf is not None:
        when = "with each checkpoint and at the end" if checkpoint.save is not None else "at the end"
        lines.append(f"{checkpoint.save_hf}: Hugging Face export {when}")
    return lines


def _loaded(checkpoint: CheckpointArguments, folder: str) -> str:
    try:
        newest = _newest_checkpoint(folder)
    except OSError as error:
        return f"cannot be read ({error.strerror}), so the run is refused"
    if newest is None and any(_checkpoints(folder)):
        return "no checkpoint is complete by its manifest; the run checks its files, and stops if none can be loaded"
    if newest is None:
        return "holds no checkpoint, so the run starts at iteration 0"
    if checkpoint.finetune:
        return f"the run starts at iteration 0, with the weights of {checkpoint_name(newest)}"
    return f"the run starts at iteration {newest}, from {checkpoint_name(newest)}"


def _retention(checkpoint: CheckpointArguments) -> str:
    """Say which checkpoints stay, if not all do."""
    last, interval = checkpoint.save_keep_last, checkpoint.save_retain_interval
    if last is None and interval is None:
        return ""
    retained = "" if interval is None else f" and those after a multiple of {interval} iterations"
    return f"; the newest {last or 1}{retained} are kept"
