"""Log to Weights & Biases.

``log_in`` comes before anything of the run starts, and finds what W&B would refuse: the key, the server, the folder.
A run that resumes continues the W&B run of its checkpoint (run/run_checkpoints.py).
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, cast

from miles.base.input_error import InputError
from miles.base.one_line import one_line
from miles.config.tracking import TrackingArguments
from miles.observe.tracking.run_files import SampleRecord
from miles.observe.tracking.run_header import RunHeader
from miles.observe.tracking.sinks import CAUSE_LENGTH, SampleTables, Status


def log_in(tracking: TrackingArguments) -> None:
    """Check the folder of W&B's files and, unless nothing is sent, log in to the server; nothing without --use-wandb.

    Raises:
        InputError: The folder cannot be written, or there is no key.
        ValueError: The server does not answer, or refuses the key.
    """
    if not tracking.use_wandb:
        return
    mode = tracking.wandb_mode or os.environ.get("WANDB_MODE", "online")
    if mode != "disabled":
        _check_folder(*_folder(tracking))
    if mode != "online":
        return
    import wandb

    with _failing_in_one_sentence(tracking):
        if (given := _given_mode(tracking)) is not None:  # WANDB_MODE may say otherwise
            wandb.setup(wandb.Settings(mode=given))
        wandb.login(key=tracking.wandb_key, host=tracking.wandb_host)
    _end_service()


class WandbSink:
    """One W&B run.

    Args:
        tracking: The flags.
        header: The facts of the run.
        earlier: The id of the W&B run that a run which resumes continues, unless ``--wandb-run-id`` or WANDB_RUN_ID
            names another; None begins a new one.

    Raises:
        InputError: W&B refuses a setting.
        ValueError: The server does not answer, or refuses the run.
    """

    def __init__(self, tracking: TrackingArguments, header: RunHeader, earlier: str | None = None) -> None:
        import wandb

        self.status: Status = "FINISHED"
        self._tables, self._table = SampleTables(tracking, header), wandb.Table
        given = tracking.wandb_run_id
        continued = earlier if given is None and not os.environ.get("WANDB_RUN_ID") else None
        run_id = given or continued
        title = header.title if tracking.disable_wandb_random_suffix else f"{header.title}-{secrets.token_hex(3)}"
        with _failing_in_one_sentence(tracking, run_id):
            self._run = wandb.init(
                project=tracking.wandb_project,
                group=tracking.wandb_group,
                entity=tracking.wandb_team,
                name=title if continued is None else None,  # it has its name
                mode=_given_mode(tracking),
                dir=_folder(tracking)[1],
                id=run_id,
                resume=None if run_id is None else "allow",
                config=header.public_settings(),
            )
        if continued is not None and self.run_id is not None:
            print(f"note: continues the W&B run {continued} of the checkpoint in --load; --wandb-run-id names another")

    @property
    def run_id(self) -> str | None:
        """The id of the W&B run; None if W&B is disabled."""
        return None if self._run.disabled else str(self._run.id)

    def resume(self, step: int) -> None:
        """Say which steps W&B has already, of those that are repeated from ``step`` on: it takes none of them again."""
        if (known := self._run.starting_step) > step:
            print(
                f"note: the W&B run {self._run.id} has steps up to {known - 1}, and takes none of {step} to "
                f"{known - 1} again; metrics.jsonl has the repeated ones"
            )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Send one step; several calls for one step are joined by W&B."""
        self._run.log(dict(values), step=step)

    def log_samples(self, step: int, samples: Sequence[SampleRecord]) -> None:
        """Send some answers of an iteration as the table ``samples``."""
        if rows := self._tables.rows(step, samples):
            self._run.log({"samples": self._table(columns=list(SampleTables.columns), data=rows)}, step=step)

    def close(self) -> None:
        """Finish the run: waits until everything is uploaded."""
        try:
            self._run.finish(exit_code=0 if self.status == "FINISHED" else 1)
        finally:
            _end_service()


def _end_service() -> None:
    """End W&B's own process, which the run's guard would kill, unless the user has a W&B run in this process."""
    import wandb

    if wandb.run is None:
        wandb.teardown()


def _given_mode(tracking: TrackingArguments) -> Literal["online", "offline", "disabled"] | None:
    """Return ``--wandb-mode``, which validation has limited to these."""
    return cast(Literal["online", "offline", "disabled"] | None, tracking.wandb_mode)


def _folder(tracking: TrackingArguments) -> tuple[str, str]:
    """Return the flag or variable that names the folder of W&B's files, and the folder."""
    if tracking.wandb_dir is not None:
        return "--wandb-dir", tracking.wandb_dir
    if folder := os.environ.get("WANDB_DIR"):
        return "WANDB_DIR", folder
    return "--output-dir", tracking.output_dir


def _check_folder(name: str, folder: str) -> None:
    """Make the folder of W&B's files. W&B itself would take the folder of temporary files if it cannot write there."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        fault = None if os.access(folder, os.W_OK | os.X_OK) else "it is not writable"
    except OSError as error:
        fault = error.strerror or type(error).__name__
    if fault is not None:
        raise InputError(f"{name} {folder}: W&B cannot write there ({fault}); give a folder that can be written")


@contextmanager
def _failing_in_one_sentence(tracking: TrackingArguments, run_id: str | None = None) -> Iterator[None]:
    """Turn whatever W&B raises into a sentence that names the flags and what to do."""
    import wandb

    try:
        yield
    except Exception as error:
        _end_service()
        cause = one_line(str(error), CAUSE_LENGTH).strip().rstrip(".") or type(error).__name__
        checked = ["the key (WANDB_API_KEY or --wandb-key)"]
        checked += ["--wandb-host"] if tracking.wandb_host is not None else []
        checked += [f"the run {run_id} (--wandb-run-id names another)"] if run_id is not None else []
        message = (
            f"--use-wandb: W&B cannot be used ({cause}); check {', '.join(checked)} and the network, or add "
            "--wandb-mode offline, which writes files for a later wandb sync"
        )
        is_about_input = isinstance(error, wandb.errors.UsageError | ValueError)
        raise InputError(message) if is_about_input else ValueError(message) from error
