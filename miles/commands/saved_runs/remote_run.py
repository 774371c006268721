"""Runs in remote storage: the records of a run that saves to a URL, and its checkpoints, downloaded for one command.

A run with ``--save s3://bucket/run`` copies its settings and metrics there, beside its checkpoints. So ``miles runs``,
``report``, ``eval``, ``export`` and ``sample`` take that URL in place of the folder of a run. They write nothing there.
Credentials come from the environment: run.json holds no secrets.
"""

from __future__ import annotations

import argparse
import atexit
import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from miles.base.folder_lock import NAME as LOCK
from miles.base.input_error import InputError
from miles.base.remote_folder import RemoteError, RemoteFolder, fault_of_url, is_url
from miles.base.remote_lock import is_locked
from miles.base.secret_values import public
from miles.commands.saved_runs.run import runs_below
from miles.config.checkpoint import CheckpointArguments
from miles.observe.tracking.run_header import FILE_NAME
from miles.run.folders.remote_checkpoints import RUN_FILES, RemoteCheckpoints
from miles.training.checkpoint_files import DamagedFile
from miles.training.checkpoint_folder import is_only_remote


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
        records[FILE_NAME] = _found_at(remote.url, records[FILE_NAME], folder)
        if not is_locked(remote):
            records.pop(LOCK, None)
        for name, data in records.items():
            (folder / name).write_bytes(data)
        given = CheckpointArguments(save=remote.url, remote_cache=str(folder / "remote"))
        RemoteCheckpoints(remote, given.local(remote.url)).index()
    except RemoteError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return folder


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


def _found_at(url: str, header: bytes, folder: Path) -> bytes:
    """Return run.json with the place at which the run was found, and where its checkpoints are listed here."""
    try:
        found = json.loads(header)
        found["settings"]["checkpoint"] |= {"save": url, "remote_cache": str(folder / "remote")}
    except (ValueError, KeyError, TypeError):
        return header  # reading the run says what is wrong with it
    return json.dumps(found).encode()


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
