"""Scored groups on disk (``--save-debug-rollout-data``): train again from saved samples, without an engine.

There is one file per iteration, in JSON lines with one prompt group per line::

    {"group_index": 0, "prompt": {"text": …, "token_ids": […], …}, "samples": [{"trajectory_id": 0, …}, …]}

A sample whose prompt differs from its group's (a compacted trajectory) has its own ``prompt``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from miles.rollout.collect import ScoredGroups
from miles.rollout.metrics import rollout_metrics
from miles.sample import Prompt, PromptGroup, Sample, SampleStatus

_SAMPLE_FIELDS = (
    "trajectory_id",
    "response_ids",
    "response",
    "loss_mask",
    "rollout_log_probs",
    "reward",
    "weight_versions",
)
_PROMPT_FIELDS = ("text", "label", "metadata", "source")


def rollout_path(template: str, iteration: int) -> Path:
    """Return the file of one iteration: ``{iteration}`` or ``{rollout_id}`` in the template is replaced."""
    return Path(template.replace("{rollout_id}", str(iteration)).replace("{iteration}", str(iteration)))


def save_rollout(path_template: str, iteration: int, groups: Sequence[PromptGroup]) -> None:
    """Write the groups of one iteration. The file appears complete or not at all; missing folders are created.

    Numbers and text are restored exactly. Labels and metadata are restored as JSON has them (tuples as lists).

    Raises:
        ValueError: JSON cannot hold a label or metadata; the message names the prompt.
    """
    path = rollout_path(path_template, iteration)
    lines = [_encode(group) for group in groups]
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("w", encoding="utf-8") as file:
        file.writelines(lines)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def load_rollout(path_template: str, iteration: int) -> list[PromptGroup]:
    """Return the groups that ``save_rollout`` wrote.

    Raises:
        ValueError: The file is missing or empty (the message names the flag), or a line is malformed (the message
            names file and line).
    """
    path = rollout_path(path_template, iteration)
    flag = f"--load-debug-rollout-data {path_template}"
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ValueError(
            f"{flag}: cannot read {path} for iteration {iteration} ({error.strerror}); save it first with "
            "--save-debug-rollout-data, or lower --num-rollout to the number of iterations that were saved"
        ) from error
    groups = [_decode(line, f"{path}:{number}") for number, line in enumerate(lines, start=1) if line.strip()]
    if not groups:
        raise ValueError(f"{flag}: {path} holds no groups; save it again with --save-debug-rollout-data")
    return groups


class Positioned(Protocol):
    """A source of prompts that knows its position."""

    def state(self) -> dict[str, Any]:
        """Return the position in the prompts."""
        ...


class SavedGroups:
    """A ``GroupCollector`` that reads the groups of each iteration from ``--load-debug-rollout-data``."""

    def __init__(self, path_template: str, log_passrate: bool, stream: Positioned | None) -> None:
        self._path_template = path_template
        self._log_passrate = log_passrate
        self._stream = stream

    async def collect(self, iteration: int) -> ScoredGroups:
        """Return the saved groups of ``iteration`` and their metrics; raises what ``load_rollout`` raises."""
        groups = load_rollout(self._path_template, iteration)
        return ScoredGroups(groups, rollout_metrics(groups, groups, 0, self._log_passrate))

    def state(self) -> dict[str, Any]:
        """Return the stream's position, which does not change."""
        return {} if self._stream is None else self._stream.state()

    def weights_changed(self, version: int) -> None:
        """Do nothing: the samples were generated before."""


def _encode(group: PromptGroup) -> str:
    record = {
        "group_index": group.group_index,
        "prompt": _encode_prompt(group.prompt),
        "samples": [_encode_sample(sample, group) for sample in group.samples],
    }
    try:
        return json.dumps(record) + "\n"
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"--save-debug-rollout-data: the label or metadata of prompt {group.prompt.source or group.group_index} "
            f"cannot be written as JSON ({error}); give plain numbers, text, lists and objects"
        ) from error


def _encode_prompt(prompt: Prompt) -> dict[str, Any]:
    return {"token_ids": list(prompt.token_ids)} | {name: getattr(prompt, name) for name in _PROMPT_FIELDS}


def _encode_sample(sample: Sample, group: PromptGroup) -> dict[str, Any]:
    assert sample.group_index == group.group_index, "a sample is in a group that is not its own"
    record = {"status": sample.status.value} | {name: getattr(sample, name) for name in _SAMPLE_FIELDS}
    return record if sample.prompt == group.prompt else record | {"prompt": _encode_prompt(sample.prompt)}


def _decode(line: bytes, where: str) -> PromptGroup:
    try:
        record = json.loads(line)
        prompt = _decode_prompt(record["prompt"])
        group = PromptGroup(int(record["group_index"]), prompt)
        group.samples = [_decode_sample(sample, group) for sample in record["samples"]]
        for sample in group.samples:
            sample.check()
        return group
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        fault = f"lacks {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(
            f"{where}: not a group as --save-debug-rollout-data writes it ({fault}); save the data again"
        ) from error


def _decode_prompt(record: dict[str, Any]) -> Prompt:
    return Prompt(token_ids=tuple(record["token_ids"]), **{name: record[name] for name in _PROMPT_FIELDS})


def _decode_sample(record: dict[str, Any], group: PromptGroup) -> Sample:
    if "trajectory_id" not in record:  # files saved before the field was renamed
        record = record | {"trajectory_id": record["rollout_id"]}
    return Sample(
        prompt=_decode_prompt(record["prompt"]) if "prompt" in record else group.prompt,
        group_index=group.group_index,
        status=SampleStatus(record["status"]),
        **{name: record[name] for name in _SAMPLE_FIELDS},
    )
