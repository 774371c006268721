"""A run of a sweep on disk: whether it is finished, how it continues, and the attempts that were made."""

import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from miles.base.flags import LONGEST_VALUE, flag_name
from miles.base.locks import is_held
from miles.base.secrets import public_words
from miles.base.text import InputError, one_line
from miles.commands.saved_runs.run import RunState, SavedRun
from miles.commands.sweeps.definition import CHECKPOINTS, PlannedRun
from miles.config.spelling import group_words
from miles.observe.run_files import FILE_NAME as RUN_HEADER
from miles.training.checkpoint_files import all_in

FILE_NAME = "sweep-run.json"
LOG = "log.txt"
TRAIN = (sys.executable, "-m", "miles", "train")  # the command of a run, before its flags


class RunStart(StrEnum):
    """The action of a sweep when it comes to a run."""

    NEW = "starts"
    FINISHED = "is finished"
    RESUMES = "resumes"
    RESTARTS = "starts again"


@dataclass(frozen=True)
class Attempt:
    """A process that has worked on a run.

    Attributes:
        began: The local time.
        seconds: How long it took.
        status: Its exit status; negative: the signal that ended it.
        last_line: The last line of its log.
    """

    began: str
    seconds: float
    status: int
    last_line: str


class SweptRun:
    """A planned run and the contents of its folder."""

    def __init__(self, planned: PlannedRun) -> None:
        self.planned = planned
        # The run, with what identifies the file that was read.
        self._saved: tuple[tuple[int, int], SavedRun | None] | None = None

    @property
    def name(self) -> str:
        """The run as people read it."""
        return self.planned.name

    @property
    def folder(self) -> Path:
        """Its ``--output-dir``."""
        return self.planned.folder

    @property
    def log(self) -> Path:
        """The file with all that its attempts have printed."""
        return self.folder / LOG

    def fault(self) -> str | None:
        """Say why the run cannot be done in its folder; None if it can."""
        if not self.folder.exists() or not any(self.folder.iterdir()):
            return None
        if is_held(self.folder):
            return f"{self.folder}: a process is writing this run; wait for it to end, or stop it"
        try:
            record = self._record()
        except ValueError as error:
            return str(error)
        if record is None:
            return f"{self.folder}: holds files that no sweep has written; remove them, or give another --out"
        changed = _differences(record["words"], public_words(self.planned.words))
        if changed:
            text = one_line("; ".join(changed), 1000)
            what_to_do = "give the variant another name, remove the folder, or give another --out"
            return f"{self.folder}: was run with other flags ({text}); {what_to_do}"
        files = self._files()
        for flag, digest in record.get("files", {}).items():  # absent in records of earlier versions
            if files.get(flag, digest) != digest:
                what_to_do = "restore it, give the variant another name, remove the folder, or give another --out"
                return f"{self.folder}: was run with another content of the file of {flag}; {what_to_do}"
        return self._fault_of_checkpoints()

    def _fault_of_checkpoints(self) -> str | None:
        """Say why checkpoints that are there keep the run from both resuming and starting again; None if none does."""
        if self.start is not RunStart.RESTARTS or self.planned.settings.checkpoint.start_over:
            return None
        root = self.folder / CHECKPOINTS
        checkpoints = all_in(root) if self.planned.resuming is not None else []
        if not checkpoints:
            return None
        if self._run_on_disk() is None:
            why = f"{self.folder / RUN_HEADER} cannot be read, so the run cannot resume from {checkpoints[-1].name}"
            return f"{root}: {why}; remove {self.folder} to start it again"
        names = one_line(", ".join(path.name for path in checkpoints), LONGEST_VALUE)
        return f"{root}: no checkpoint is complete ({names}), so the run cannot resume; remove {root} to start it again"

    @property
    def start(self) -> RunStart:
        """The action that the run needs."""
        if not (self.folder / FILE_NAME).exists():
            return RunStart.NEW
        saved = self._run_on_disk()
        if saved is not None and saved.state is RunState.FINISHED:
            return RunStart.FINISHED
        return RunStart.RESTARTS if self._checkpoint() is None else RunStart.RESUMES

    @property
    def is_finished(self) -> bool:
        """Whether the run has come to its end."""
        return self.start is RunStart.FINISHED

    def in_words(self) -> str:
        """Describe the action that the run needs, and where it starts."""
        start = self.start
        if start is RunStart.RESUMES:
            return f"{start.value} after iteration {self._checkpoint()}"
        return f"{start.value}, as it has no checkpoint" if start is RunStart.RESTARTS else start.value

    def command(self) -> list[str]:
        """Return the words of the process that starts the run, or continues it."""
        words = self.planned.words
        if self.start is RunStart.RESUMES:
            assert self.planned.resuming is not None, "only a run with --save has checkpoints"
            words = self.planned.resuming
        return [*TRAIN, *words]

    def begin(self) -> None:
        """Make the folder and note its purpose in it. Attempts that were made are kept."""
        self.folder.mkdir(parents=True, exist_ok=True)
        record = self._record() or {"attempts": []}
        self._write(
            {
                "variant": self.planned.variant,
                "seed": self.planned.seed,
                "words": public_words(self.planned.words),
                "files": self._files(),
                "attempts": record["attempts"],
            }
        )

    def _files(self) -> dict[str, str]:
        """Return a hash of each file of further settings, by the flag that names it: its words are not flags."""
        settings = self.planned.settings
        paths = {
            flag_name("custom_config_path"): settings.rollout.custom_config_path,
            flag_name("eval_config"): settings.evaluation.eval_config,
        }
        return {
            flag: hashlib.sha256(Path(path).read_bytes()).hexdigest()
            for flag, path in paths.items()
            if path is not None and Path(path).is_file()
        }

    def note(self, attempt: Attempt) -> None:
        """Keep an attempt in the record."""
        record = self._record()
        assert record is not None, "begin() has written it"
        self._write({**record, "attempts": [*record["attempts"], asdict(attempt)]})

    @property
    def attempts(self) -> list[Attempt]:
        """The attempts that were made, in all calls of the sweep."""
        record = self._record()
        return [] if record is None else [Attempt(**attempt) for attempt in record["attempts"]]

    def fraction(self) -> float:
        """Return the share of its steps that the run has done."""
        saved = self._run_on_disk()
        return 0.0 if saved is None else saved.steps / max(saved.header.total_steps, 1)

    def _checkpoint(self) -> int | None:
        """Return the iterations before the checkpoint that the run would continue from."""
        saved = self._run_on_disk()
        if saved is None or self.planned.resuming is None:
            return None
        newest = saved.newest_complete()
        return None if newest is None else newest.iterations

    def _run_on_disk(self) -> SavedRun | None:
        """Return the run as far as it has come; None before it has written its settings.

        A repeated attempt replaces the file of settings. Otherwise it is read once, and of the metrics only new lines.
        """
        try:
            status = (self.folder / RUN_HEADER).stat()
        except FileNotFoundError:
            return None
        identity = (status.st_ino, status.st_mtime_ns)
        if self._saved is None or self._saved[0] != identity:
            self._saved = (identity, _readable(self.folder))
        return self._saved[1]

    def _record(self) -> dict[str, Any] | None:
        """Return what ``begin`` and ``note`` have written. Raises ``ValueError`` if it is damaged."""
        path = self.folder / FILE_NAME
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        try:
            record = json.loads(text)
            if not isinstance(record, dict) or not {"variant", "seed", "words", "attempts"} <= record.keys():
                raise ValueError("it is no record of a sweep")
            if not isinstance(record.get("files", {}), dict):
                raise ValueError("its files are no object")
            for attempt in record["attempts"]:
                Attempt(**attempt)
        except (ValueError, TypeError) as error:
            what_to_do = "remove the folder, or give another --out"
            raise ValueError(f"{path}: cannot be read ({error}); {what_to_do}") from error
        return record

    def _write(self, record: Mapping[str, Any]) -> None:
        path = self.folder / FILE_NAME
        new = path.with_suffix(".new")
        new.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        new.replace(path)


def _readable(folder: Path) -> SavedRun | None:
    """Return the run of a folder; None if its settings cannot be read: half written, or of another version."""
    try:
        run = SavedRun(folder)
        run.settings  # noqa: B018  # raises
    except InputError:
        return None
    return run


def _differences(before: Sequence[str], now: Sequence[str]) -> list[str]:
    """Return the flags where two commands differ, with both values."""
    old, new = (dict(group_words(words)) for words in (before, now))
    changed = []
    for flag in dict.fromkeys((*old, *new)):
        if old.get(flag) != new.get(flag):
            values = (" ".join(words[flag]) if flag in words else "not given" for words in (old, new))
            changed.append(f"{flag} {' -> '.join(one_line(value, LONGEST_VALUE) for value in values)}")
    return changed
