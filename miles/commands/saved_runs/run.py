"""The folder of a run (``--output-dir``): its settings, how far it got, whether it runs, and its checkpoints.

Imports no torch, so that listing runs is quick.
"""

import argparse
import atexit
import dataclasses
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_type_hints

from miles.base.locks import NAME as LOCK
from miles.base.locks import is_held, is_locked
from miles.base.secrets import public
from miles.base.storage import RemoteError, RemoteFolder, fault_of_url, is_url
from miles.base.text import InputError
from miles.config.checkpoint import CheckpointArguments
from miles.config.settings import Settings
from miles.observe.metrics_file import MetricsFile, newest_value
from miles.observe.run_files import FILE_NAME, METRICS, RunFiles, RunHeader
from miles.run.best_checkpoint import BestCheckpoint, best_in
from miles.run.remote_checkpoints import RUN_FILES, RemoteCheckpoints
from miles.training.checkpoint_files import DamagedFile, all_in, is_complete, is_only_remote, iterations_of

Step = int | Literal["best"] | None  # which checkpoint of a run: ``SavedRun.checkpoint``


class RunState(StrEnum):
    """The state of a run by its files."""

    RUNNING = "running"  # a launcher that is alive holds the lock of the folder
    FINISHED = "finished"  # its last step is logged and, with --save, the last checkpoint is complete
    STOPPED = "stopped"  # a signal, such as Ctrl-C, ended it before that
    FAILED = "failed"  # it ended before that: by an error or a kill


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint of a run.

    Attributes:
        folder: Its folder.
        iterations: The iterations of the run before it.
        steps: The optimizer steps before it, the ``step`` of the row of metrics.jsonl that was logged last.
        is_complete: Whether every file is there with the size that was saved. The hashes are not compared.
    """

    folder: Path
    iterations: int
    steps: int
    is_complete: bool


class SavedRun:
    """A run as its files describe it.

    Raises:
        InputError: The folder holds no run, or one that this version cannot read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self.header = RunHeader.load(folder)
        except (ValueError, OSError) as error:
            raise InputError(str(error)) from None
        self._metrics = MetricsFile(folder / METRICS)

    @cached_property
    def settings(self) -> Settings:
        """The settings of the run. Raises ``InputError`` if another version wrote them, or they lack what runs have."""
        where = str(self.folder / FILE_NAME)
        settings = settings_from_json(self.header.settings, where)
        if settings.rollout.rollout_batch_size is None or settings.training.global_batch_size is None:
            raise InputError(f"{where}: lacks the settings of a run; copy the run's folder again")
        return settings

    @property
    def steps(self) -> int:
        """The last optimizer step that was logged; 0 before the first."""
        self._metrics.refresh()
        return self._metrics.steps[-1] if self._metrics.steps else 0

    @property
    def iterations(self) -> int:
        """The iterations that are done."""
        return self.steps // self.settings.steps_per_iteration

    @property
    def total_iterations(self) -> int:
        """The iterations that the run was to have."""
        return self.header.total_steps // self.settings.steps_per_iteration

    def last_metrics(self) -> dict[str, float]:
        """Return the newest value of every metric."""
        self._metrics.refresh()
        newest = {name: newest_value(self._metrics.column(name)) for name in self._metrics.names}
        return {name: value for name, value in newest.items() if not math.isnan(value)}

    @property
    def state(self) -> RunState:
        """Whether the run is running, has finished, or ended before that.

        A run that ended early, as no prompts were left for it, has finished with the steps that it has done.
        """
        if is_held(self.folder):
            return RunState.RUNNING
        files = RunFiles(self.folder)
        early = files.ended_early_after
        last_step = self.header.total_steps if early is None else early
        if self.steps < last_step:
            return RunState.STOPPED if files.end is not None and files.end[0] == "stopped" else RunState.FAILED
        if self.settings.checkpoint.save is not None and last_step:
            last = self.newest_complete()
            if last is None or last.steps < last_step:
                return RunState.FAILED
        return RunState.FINISHED

    def checkpoints(self) -> list[SavedCheckpoint]:
        """Return the checkpoints that are there, oldest first."""
        saved_in = self._saved_in
        folders = [] if saved_in is None else all_in(saved_in)
        return [
            SavedCheckpoint(path, done, done * self.settings.steps_per_iteration, is_complete(path))
            for path in folders
            if (done := iterations_of(path)) is not None
        ]

    def best(self) -> BestCheckpoint | None:
        """Return the record of ``--save-best``, or None."""
        saved_in = self._saved_in
        return None if saved_in is None else best_in(saved_in)

    def newest_complete(self) -> SavedCheckpoint | None:
        """Return the newest complete checkpoint, or None."""
        return next((checkpoint for checkpoint in reversed(self.checkpoints()) if checkpoint.is_complete), None)

    def checkpoint(self, step: Step) -> SavedCheckpoint:
        """Return the checkpoint after ``step`` optimizer steps; the newest complete one for None.

        For ``best`` it is the one that ``--save-best`` has recorded.

        Raises:
            InputError: There is none; the message lists those that are there.
        """
        checkpoints = self.checkpoints()
        if step is None:
            newest = self.newest_complete()
            if newest is not None:
                return newest
            what_to_do = "save some with --save, or name an exported folder with --weights"
            raise InputError(f"{self.folder}: no complete checkpoint {self._place()}; {what_to_do}")
        if step == "best":
            best = self.best()
            if best is None:
                raise InputError(f"--step best: no best checkpoint {self._place()}; give its number of optimizer steps")
            step = best.iterations * self.settings.steps_per_iteration
        for each in reversed(checkpoints):  # a replaced checkpoint comes before the one that replaces it
            if each.steps == step:
                return each
        there = ", ".join(str(each.steps) for each in checkpoints)
        what_to_do = f"give one of {there}" if checkpoints else "the run has saved none"
        raise InputError(f"--step {step}: no checkpoint after that optimizer step {self._place()}; {what_to_do}")

    def _place(self) -> str:
        save = self.settings.checkpoint.save
        if save is None:
            return "(the run had no --save)"
        return f"in {save if is_url(save) else self._saved_in}"

    @property
    def _saved_in(self) -> Path | None:
        """The folder of the checkpoints, or the local copy of it if it is in remote storage."""
        section = self.settings.checkpoint
        return None if section.save is None else self.inside(str(section.local(section.save)))

    def inside(self, path: str) -> Path:
        """Return a path of the run's flags; one below --output-dir is found there after the folder was moved."""
        original = Path(path)
        try:
            moved = self.folder / original.relative_to(self.settings.tracking.output_dir)
        except ValueError:
            return original
        return moved if moved.exists() else original


def runs_below(folder: Path) -> list[Path]:
    """Return the folders of runs in ``folder`` and below it, by name. Earlier runs of a folder are left out."""
    folders = []
    for path, names, files in os.walk(folder):  # Path.walk is new in Python 3.12
        if FILE_NAME in files:
            folders.append(Path(path))
        names[:] = sorted(name for name in names if not name.startswith((".", "earlier-", "iter_")))
    return sorted(folders)


def settings_from_json(sections: Mapping[str, Mapping[str, Any]], where: str) -> Settings:
    """Return the settings that ``RunHeader.settings`` describes. Secrets are not in it, and stay hidden.

    Args:
        sections: Section to field to value. Missing fields have their defaults.
        where: The file, for messages.

    Raises:
        InputError: A section or field is unknown: a later version wrote the file.
    """
    hints = get_type_hints(Settings)
    unknown = sections.keys() - hints.keys()
    by_section: dict[str, Any] = {}
    for name, values in sections.items():
        if name in unknown:
            continue
        section = hints[name]
        if not dataclasses.is_dataclass(section):  # megatron_overrides: pairs of a name and a value
            by_section[name] = tuple(values.items())
            continue
        known = {field.name for field in dataclasses.fields(section)}
        unknown |= {f"{name}.{field}" for field in values.keys() - known}
        fields = {field: _frozen(value) for field, value in values.items() if field in known}
        assert isinstance(section, type)
        by_section[name] = section(**fields)
    if unknown:
        names = ", ".join(sorted(unknown))
        raise InputError(f"{where}: unknown settings ({names}), of another version of miles; use that version")
    return Settings(**by_section)


def _frozen(value: Any) -> Any:
    """Return a JSON list as the tuple that it was."""
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


# Runs in remote storage: the records of a run that saves to a URL, and its checkpoints, downloaded for one command.
#
# A run with ``--save s3://bucket/run`` copies its settings and metrics there, alongside its checkpoints. So ``miles
# runs``, ``report``, ``eval``, ``export`` and ``sample`` take that URL instead of the folder of a run. They write
# nothing there. Credentials come from the environment: run.json holds no secrets.


def run_folder(run: str) -> Path:
    """Return the folder of a run: of a URL, a copy of its records that lasts as long as this process.

    The type of an argument of a command.

    Raises:
        argparse.ArgumentTypeError: The URL cannot be read, or names no run.
    """
    if not is_url(run):
        return Path(run)
    fault = fault_of_url(run, written=False)
    if fault is not None:
        raise argparse.ArgumentTypeError(f"{public('', run)}: {'; '.join(fault)}")
    remote = RemoteFolder(run)
    try:
        records = remote.read_all([*RUN_FILES, LOCK])
        if FILE_NAME not in records:
            raise argparse.ArgumentTypeError(
                f"{remote}: holds no {FILE_NAME}; give the --save of a run, or the folder that it saved into"
            )
        folder = Path(tempfile.mkdtemp(prefix="miles-run-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        records[FILE_NAME] = _with_url(remote.url, records[FILE_NAME], folder)
        if not is_locked(remote):
            records.pop(LOCK, None)
        for name, data in records.items():
            (folder / name).write_bytes(data)
        section = CheckpointArguments(save=remote.url, remote_cache=str(folder / "remote"))
        RemoteCheckpoints(remote, section.local(remote.url)).index()
    except RemoteError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return folder


def add_run(parser: argparse.ArgumentParser, name: str = "run", **options: Any) -> None:
    """Add RUN to a command."""
    text = "the --output-dir of a run, or the URL of its --save"
    parser.add_argument(name, type=run_folder, metavar="RUN", help=text, **options)


def runs_at(place: str) -> list[tuple[str, Path]]:
    """Return the runs in a folder or at a URL and below it: how each is shown, and its folder.

    Raises:
        InputError: The URL cannot be read.
    """
    if not is_url(place):
        return [(str(folder), folder) for folder in runs_below(Path(place))]
    fault = fault_of_url(place, written=False)
    if fault is not None:
        raise InputError(f"{public('', place)}: {'; '.join(fault)}")
    remote = RemoteFolder(place)
    try:
        names = sorted(name for name in remote.files() if name.rpartition("/")[2] == FILE_NAME)
        urls = [f"{remote.url}/{name.rpartition('/')[0]}".rstrip("/") for name in names]
        return [(str(RemoteFolder(url)), run_folder(url)) for url in urls]
    except (RemoteError, argparse.ArgumentTypeError) as error:
        raise InputError(str(error)) from None


def _with_url(url: str, header: bytes, folder: Path) -> bytes:
    """Return run.json with the URL at which the run was found, and where its checkpoints are listed here."""
    try:
        record = json.loads(header)
        record["settings"]["checkpoint"] |= {"save": url, "remote_cache": str(folder / "remote")}
    except (ValueError, KeyError, TypeError):
        return header  # reading the run states its fault
    return json.dumps(record).encode()


@contextmanager
def on_this_machine(checkpoint: CheckpointArguments, folder: Path) -> Iterator[Path]:
    """Have the files of a checkpoint for the length of the block: the folder itself, or a download of it.

    Args:
        checkpoint: The settings of its run.
        folder: The checkpoint, or its entry in the local copy of a remote folder.

    Raises:
        InputError: It is not complete there, or the storage does not answer.
    """
    if not is_only_remote(folder):
        yield folder
        return
    assert checkpoint.save is not None
    with tempfile.TemporaryDirectory(prefix="miles-checkpoint-") as temporary:
        copy = Path(temporary) / folder.name
        shutil.copytree(folder, copy)
        try:
            remote = RemoteFolder(checkpoint.save, checkpoint.file_system_options)
            RemoteCheckpoints(remote, copy.parent).fetch(copy)
        except DamagedFile as fault:
            raise InputError(f"{public('', checkpoint.save)}: {folder.name} is damaged: {fault}") from None
        except RemoteError as error:
            raise InputError(str(error)) from None
        yield copy
