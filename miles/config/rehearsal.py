"""Configure a rehearsal: which device is assumed, how long the sequences are, and where its figures go."""

import os
from dataclasses import dataclass
from functools import partial
from typing import Optional

from miles.base.flags import Errors, count, flag

DEVICES = ("a100", "h100", "h200", "b200")

_of_rehearsal = partial(flag, needs="--rehearse")


@dataclass(frozen=True)
class RehearsalArguments:
    """rehearsal: estimate without weights and GPUs what a run will need."""

    rehearse: bool = flag(
        False,
        "print what this command's run will need (memory, arithmetic, traffic, time), traced at real size, then stop",
    )
    rehearse_device: str = _of_rehearsal(
        "h100",
        f"the device of every rank and engine: {', '.join(DEVICES)}, or a JSON file with measured figures",
        metavar="DEVICE",
    )
    gpu_memory: Optional[float] = _of_rehearsal(
        None, "GiB of memory of one device, that a rank must fit in; default: as --rehearse-device has", above=0
    )
    rehearse_prompt_len: Optional[int] = _of_rehearsal(
        None, "assumed tokens of a prompt; default: --rollout-max-prompt-len, at most 512", at_least=1
    )
    rehearse_response_len: Optional[int] = _of_rehearsal(
        None, "assumed tokens of every response; default: --rollout-max-response-len", at_least=1
    )
    rehearse_json: Optional[str] = _of_rehearsal(None, "write all figures to this file as well", file="new file")
    rehearse_page: Optional[str] = _of_rehearsal(
        None, "write a page with pictures to this file as well", file="new file", metavar="FILE.html"
    )


def check_rehearsal(
    rehearsal: RehearsalArguments, max_response_len: int | None, max_context_len: int | None, errors: Errors
) -> None:
    """Check the device, and that the lengths fit.

    Args:
        rehearsal: The section.
        max_response_len: Maximum tokens of a response; None if it is not given.
        max_context_len: Maximum tokens of a prompt with its response; None if it is not given.
        errors: Collects the errors.
    """
    if not rehearsal.rehearse:
        return
    length = rehearsal.rehearse_response_len
    if length is None and max_response_len is None and errors.none_about("rollout_max_response_len"):
        errors.require("rehearse_response_len", None, "the assumed tokens of every response, as no limit is given")
    if length is not None and max_response_len is not None and length > max_response_len:
        rule = f"is more than --rollout-max-response-len {max_response_len}"
        errors.refuse("rehearse_response_len", length, rule, f"give at most {max_response_len}")
    if max_context_len is not None:
        _check_lengths(rehearsal, max_context_len, errors)
    device = rehearsal.rehearse_device
    if device.lower() not in DEVICES and not os.path.isfile(device):
        rule = "is neither a device that is known nor a file"
        errors.refuse("rehearse_device", device, rule, f"give one of {', '.join(DEVICES)}, or a JSON file")
    for name in ("rehearse_json", "rehearse_page"):
        path = getattr(rehearsal, name)
        if path is not None and not os.path.isdir(os.path.dirname(path) or "."):
            errors.refuse(name, path, "its folder does not exist", "create the folder, or give another path")


def _check_lengths(rehearsal: RehearsalArguments, max_context_len: int, errors: Errors) -> None:
    """Check that the assumed prompt and response have room in the longest sequence."""
    prompt, response = rehearsal.rehearse_prompt_len or 1, rehearsal.rehearse_response_len or 1
    names = ("rehearse_prompt_len", "rehearse_response_len")
    if prompt + response <= max_context_len or not errors.none_about("rollout_max_context_len", *names):
        return
    name, other = (names[0], response) if rehearsal.rehearse_prompt_len is not None else (names[1], prompt)
    rule = f"with {count(other, 'token')} alongside it is more than --rollout-max-context-len {max_context_len}"
    errors.refuse(name, getattr(rehearsal, name), rule, f"let both together have at most {max_context_len} tokens")
