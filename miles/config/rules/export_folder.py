"""Check that the export of ``--save-hf`` replaces no folder that the run reads or writes otherwise."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from miles.base.flags import Errors, flag_name
from miles.base.storage import PLACEHOLDER, is_url
from miles.config.checkpoint import fill_remote_cache
from miles.config.settings import Settings

_CHECKPOINT = re.compile(r"(\.replaced_)?iter_\d{7}")
_FILE_URL = re.compile(r"(?:file|local)://(?=/)")


def check_export_folder(settings: Settings, errors: Errors) -> None:
    """Refuse an export that would replace another folder, or a parent of it.

    An export removes the weights of an earlier one, and swaps with its folder (training/checkpoint_files.py).
    Folders are compared through links. ``{iteration}`` in the name stands for any number.
    """
    given = settings.checkpoint.save_hf
    if given is None or not errors.none_about("save_hf"):
        return
    for name, other in _folders(settings):
        if errors.none_about(name) and (rule := _fault(given, flag_name(name), other)) is not None:
            errors.refuse("save_hf", given, rule, "give another folder")
            return


def _folders(settings: Settings) -> Iterator[tuple[str, str]]:
    model, output_dir = settings.model, settings.tracking.output_dir
    checkpoint = fill_remote_cache(settings.checkpoint, output_dir)
    for name, folder in (
        ("hf_checkpoint", model.hf_checkpoint),
        ("ref_load", model.ref_load),
        ("opd_teacher_load", model.opd_teacher_load),
        ("save", checkpoint.save),
        ("load", checkpoint.load),
        ("remote_cache", checkpoint.remote_cache),
        ("output_dir", output_dir),
    ):
        if folder is not None:
            yield name, folder


def _fault(given: str, flag: str, other: str) -> str | None:
    export, folder = _place(given), _place(other)
    pattern = r"\d+".join(re.escape(part) for part in PLACEHOLDER.split(export))
    if re.fullmatch(pattern, folder):
        return f"is the folder of {flag} {other}, and an export removes the weights that are in its folder"
    if is_url(export) or is_url(folder):
        return None
    if re.match(f"{pattern.rstrip('/')}/", folder):
        return f"holds the folder of {flag} {other}, and an export takes the place of its whole folder"
    inside = export.removeprefix(f"{folder.rstrip('/')}/")
    if flag in ("--save", "--load") and inside != export and _CHECKPOINT.fullmatch(inside.split("/")[0]):
        return f"is the place of a checkpoint in {flag} {other}"
    return None


def _place(folder: str) -> str:
    """Return the absolute path of a folder without links; for a URL other than a local folder's, return its text."""
    local = _FILE_URL.sub("", folder)
    return folder.rstrip("/") if is_url(local) else os.path.realpath(local)
