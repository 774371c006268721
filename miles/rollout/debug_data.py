"""Scored groups on disk (``--save-debug-rollout-data``): train again from saved samples, without an engine.

There is one file per iteration, in JSON lines with one prompt group per line::

    {"group_index": 0, "prompt": {"text": …, "token_ids": […], …}, "samples": [{"trajectory_id": 0, …}, …]}

A sample whose prompt differs from its group's (a compacted trajectory) has its own ``prompt``. One of truncated
sampling has its ``support``, the columns of ``TokenSets``. Bits, and the ``experts`` of routing replay, are in base64.
"""

from __future__ import annotations

import base64
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence, Set
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from miles.base import strict_json
from miles.base.disk_faults import naming_disk
from miles.base.text import InputError, one_line
from miles.config.rollout import path_of_iteration
from miles.rollout.collect import GroupCollector, ScoredGroups
from miles.rollout.metrics import rollout_metrics
from miles.tasks.data.stream import TrainingStream
from miles.types.replay import WHOLE, TokenSets
from miles.types.sample import NO_WEIGHTS, Prompt, PromptGroup, Sample, SampleStatus

if TYPE_CHECKING:
    from miles.types.images import PromptImages

_RESPONSE_FIELDS = ("response_ids", "response", "loss_mask", "rollout_log_probs")
_SAMPLE_FIELDS = ("trajectory_id", *_RESPONSE_FIELDS, "reward", "weight_versions")
_PROMPT_FIELDS = ("text", "label", "metadata", "source", "prompt_set")
_GROUP_KEYS = {"group_index", "prompt", "samples", "dropped_trajectories", "baseline_reward", "baseline_tokens"}
_IMAGE_FIELDS = ("sizes", "counts", "starts", "placeholder_id", "model")
_PROMPT_KEYS = {"token_ids", "images", *_PROMPT_FIELDS}
_SAMPLE_KEYS = {*_SAMPLE_FIELDS, "status", "prompt", "teacher_log_probs", "reward_parts", "support", "experts"}
_LARGEST_LOG_PROB = 1e-4  # a log-softmax of low precision may round to more than 0
_LARGEST = 2**63 - 1
_LARGEST_VOCABULARY = 2**31


def save_rollout(path_template: str, iteration: int, groups: Sequence[PromptGroup]) -> None:
    """Write the groups of one iteration. The file appears complete or not at all; missing folders are created.

    Numbers and text are restored exactly. Labels and metadata are restored as JSON has them (tuples as lists).

    Raises:
        ValueError: JSON cannot hold a label or metadata; the message names the prompt.
        WriteFailed: The disk is full, or cannot be written for another reason.
    """
    path = Path(path_of_iteration(path_template, iteration))
    lines = [_encode(group) for group in groups]
    partial = path.with_name(f"{path.name}.partial")
    with naming_disk(path, partial):
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("w", encoding="utf-8") as file:
            file.writelines(lines)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)


def load_rollout(path_template: str, iteration: int, vocab_size: int | None = None) -> list[PromptGroup]:
    """Return the groups that ``save_rollout`` wrote. Token ids are below ``vocab_size``, if that is known.

    Raises:
        InputError: The file is missing or empty (the message names the flag), or a line is malformed (the message
            names file and line).
    """
    path = Path(path_of_iteration(path_template, iteration))
    flag = f"--load-debug-rollout-data {path_template}"
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        fault = f"cannot read {path} for iteration {iteration} ({error.strerror})"
        raise InputError(
            f"{one_line(f'{flag}: {fault}', 800)}; save it first with --save-debug-rollout-data, or lower "
            f"--num-rollout to the number of iterations that were saved"
        ) from error
    groups: list[PromptGroup] = []
    line_of_group: dict[int, int] = {}
    line_of_trajectory: dict[int, int] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            group = _decode(line, vocab_size)
            _check_unique([group.group_index], "group_index", line_of_group, number)
            trajectories = {sample.trajectory_id for sample in group.samples if sample.trajectory_id is not None}
            _check_unique(trajectories, "trajectory_id", line_of_trajectory, number)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            fault = f"it lacks {error}" if isinstance(error, KeyError) else one_line(str(error), 300)
            raise InputError(
                f"{path}:{number}: not a group as --save-debug-rollout-data writes it ({fault}); save the data again"
            ) from error
        groups.append(group)
    if not groups:
        raise InputError(f"{flag}: {path} holds no groups; save it again with --save-debug-rollout-data")
    return groups


def _check_unique(indices: Iterable[int], name: str, line_of: dict[int, int], number: int) -> None:
    for index in sorted(indices):
        if index in line_of:
            raise ValueError(f"{name} {index} is in line {line_of[index]} too")
        line_of[index] = number


class SavedGroups(GroupCollector):
    """Reads the groups of each iteration from ``--load-debug-rollout-data``."""

    def __init__(
        self, path_template: str, log_passrate: bool, stream: TrainingStream | None, vocab_size: int | None
    ) -> None:
        super().__init__(stream)
        self._path_template = path_template
        self._vocab_size = vocab_size
        self._log_passrate = log_passrate

    async def collect(self, iteration: int) -> ScoredGroups:
        """Return the saved groups of ``iteration`` and their metrics; raises the errors of ``load_rollout``."""
        groups = load_rollout(self._path_template, iteration, self._vocab_size)
        return ScoredGroups(groups, rollout_metrics(groups, groups, 0, self._log_passrate))


def _encode(group: PromptGroup) -> str:
    record = {
        "group_index": group.group_index,
        "prompt": _encode_prompt(group.prompt),
        "samples": [_encode_sample(sample, group) for sample in group.samples],
    }
    if group.dropped_trajectories:
        record["dropped_trajectories"] = group.dropped_trajectories
    if group.baseline_reward is not None:
        record |= {"baseline_reward": group.baseline_reward, "baseline_tokens": group.baseline_tokens}
    try:
        return json.dumps(record) + "\n"
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"--save-debug-rollout-data: the label or metadata of prompt {group.prompt.source or group.group_index} "
            f"cannot be written as JSON ({error}); give plain numbers, text, lists and objects"
        ) from error


def _encode_prompt(prompt: Prompt) -> dict[str, Any]:
    record = {"token_ids": list(prompt.token_ids)} | {name: getattr(prompt, name) for name in _PROMPT_FIELDS}
    if (images := prompt.images) is not None:
        files = [base64.b64encode(file).decode() for file in images.files]
        record["images"] = {name: getattr(images, name) for name in _IMAGE_FIELDS} | {"files": files}
    return record


def _encode_sample(sample: Sample, group: PromptGroup) -> dict[str, Any]:
    assert sample.group_index == group.group_index, "a sample names another group than the one that it is in"
    record = {"status": sample.status.value} | {name: getattr(sample, name) for name in _SAMPLE_FIELDS}
    if sample.teacher_log_probs:
        record["teacher_log_probs"] = sample.teacher_log_probs
    if sample.reward_parts:
        record["reward_parts"] = sample.reward_parts
    if (sets := sample.support) is not None:
        columns = {"vocab_size": sets.vocab_size, "sizes": sets.sizes.tolist(), "ids": sets.ids.tolist()}
        record["support"] = columns | {"bits": base64.b64encode(sets.bits.tobytes()).decode()}
    if (experts := sample.experts) is not None:
        numbers = base64.b64encode(experts.tobytes()).decode()
        record["experts"] = {"shape": list(experts.shape), "dtype": experts.dtype.name, "numbers": numbers}
    return record if sample.prompt == group.prompt else record | {"prompt": _encode_prompt(sample.prompt)}


def _decode(line: bytes, vocab_size: int | None) -> PromptGroup:
    try:
        record = _object(strict_json.loads(line.decode("utf-8")), "the line")
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8") from None
    _check_keys(record, _GROUP_KEYS, "the group")
    end = _LARGEST if vocab_size is None else vocab_size
    group_index = _integers([record["group_index"]], "group_index", 0, _LARGEST)[0]
    group = PromptGroup(group_index, _decode_prompt(_object(record["prompt"], "prompt"), end))
    dropped = record.get("dropped_trajectories", 0)
    group.dropped_trajectories = _integers([dropped], "dropped_trajectories", 0, _LARGEST)[0]
    if "baseline_reward" in record:
        group.baseline_reward = _numbers([record["baseline_reward"]], "baseline_reward")[0]
        group.baseline_tokens = _integers([record.get("baseline_tokens", 0)], "baseline_tokens", 0, _LARGEST)[0]
    samples = _list(record["samples"], "samples")
    if not samples:
        raise ValueError("it has no samples")
    for number, sample in enumerate(samples, start=1):
        try:
            group.samples.append(_decode_sample(_object(sample, "it"), group, end))
        except KeyError as error:
            raise ValueError(f"sample {number} lacks {error}") from None
        except ValueError as error:
            raise ValueError(f"sample {number}: {error}") from None
    return group


def _decode_prompt(record: dict[str, Any], end: int) -> Prompt:
    _check_keys(record, _PROMPT_KEYS, "the prompt")
    token_ids = _integers(record["token_ids"], "token_ids of the prompt", 0, end)
    if not token_ids:
        raise ValueError("token_ids of the prompt is empty")
    return Prompt(
        text=_text(record["text"], "text of the prompt"),
        token_ids=tuple(token_ids),
        label=_label(record["label"]),
        metadata=_object(record["metadata"], "metadata of the prompt"),
        source=_text(record["source"], "source of the prompt"),
        prompt_set=_text(record.get("prompt_set", ""), "set of the prompt"),  # absent in earlier files
        images=_decode_images(_object(record["images"], "images"), end) if "images" in record else None,
    )


def _decode_images(record: dict[str, Any], end: int) -> PromptImages:
    from miles.types.images import PromptImages

    _check_keys(record, {*_IMAGE_FIELDS, "files"}, "images of the prompt")
    files = [
        base64.b64decode(_text(file, "a file of images"), validate=True) for file in _list(record["files"], "files")
    ]
    sizes = [tuple(_integers(size, "sizes of images", 1, _LARGEST)) for size in _list(record["sizes"], "sizes")]
    counts = _integers(record["counts"], "counts of images", 1, end)
    starts = _integers(record["starts"], "starts of images", 0, _LARGEST)
    if not len(files) == len(sizes) == len(counts) == len(starts) or any(len(size) != 2 for size in sizes):
        raise ValueError(
            f"images have {len(files)} files, {len(sizes)} sizes, {len(counts)} counts, {len(starts)} starts"
        )
    return PromptImages(
        tuple(files),
        tuple((width, height) for width, height in sizes),
        tuple(counts),
        tuple(starts),
        _integers([record["placeholder_id"]], "placeholder_id of images", 0, end)[0],
        _text(record["model"], "model of images"),
    )


def _decode_sample(record: dict[str, Any], group: PromptGroup, end: int) -> Sample:
    if "trajectory_id" not in record and "rollout_id" in record:  # files saved before the field was renamed
        record = record | {"trajectory_id": record["rollout_id"]}
        del record["rollout_id"]
    _check_keys(record, _SAMPLE_KEYS, "it")
    parts = _object(record.get("reward_parts", {}), "reward_parts")
    sample = Sample(
        prompt=_decode_prompt(_object(record["prompt"], "prompt"), end) if "prompt" in record else group.prompt,
        group_index=group.group_index,
        trajectory_id=_integers([record["trajectory_id"]], "trajectory_id", 0, _LARGEST)[0],
        response_ids=_integers(record["response_ids"], "response_ids", 0, end),
        response=_text(record["response"], "response"),
        loss_mask=_integers(record["loss_mask"], "loss_mask", 0, 2),
        rollout_log_probs=_log_probs(record["rollout_log_probs"], "rollout_log_probs"),
        teacher_log_probs=_log_probs(record.get("teacher_log_probs", []), "teacher_log_probs"),
        status=SampleStatus(record["status"]),
        reward=_numbers([record["reward"]], "reward")[0],
        reward_parts=dict(zip(parts, _numbers(list(parts.values()), "reward_parts"), strict=True)),
        weight_versions=_integers(record["weight_versions"], "weight_versions", NO_WEIGHTS, _LARGEST),
        support=_decode_support(_object(record["support"], "support"), end) if "support" in record else None,
        experts=_decode_experts(_object(record["experts"], "experts")) if "experts" in record else None,
    )
    sample.check()
    return sample


def _decode_support(record: dict[str, Any], end: int) -> TokenSets:
    vocab_size = _integers([record["vocab_size"]], "vocab_size of support", 1, _LARGEST_VOCABULARY)[0]
    if end < _LARGEST and vocab_size != end:
        raise ValueError(f"vocab_size of support is {vocab_size}, and the model's is {end}")
    sizes = np.array(_integers(record["sizes"], "sizes of support", WHOLE, vocab_size + 1), np.int32)
    ids = np.array(_integers(record["ids"], "ids of support", 0, vocab_size), np.uint32)
    width = -(-vocab_size // 8)
    packed = base64.b64decode(_text(record["bits"], "bits of support"), validate=True)
    if len(packed) % width:
        raise ValueError(f"bits of support are {len(packed)} bytes, not a multiple of {width}")
    sets = TokenSets(vocab_size, sizes, ids, np.frombuffer(packed, np.uint8).reshape(-1, width))
    sets.check()
    return sets


def _decode_experts(record: dict[str, Any]) -> np.ndarray:
    shape = _integers(record["shape"], "shape of experts", 0, _LARGEST)
    kinds = {"uint8": np.uint8, "int16": np.int16}
    kind = kinds.get(_text(record["dtype"], "dtype of experts"))
    packed = base64.b64decode(_text(record["numbers"], "numbers of experts"), validate=True)
    if kind is None or math.prod(shape) * np.dtype(kind).itemsize != len(packed):
        raise ValueError(f"experts of shape {shape} and dtype {record['dtype']} in {len(packed)} bytes")
    return np.frombuffer(packed, kind).reshape(shape)


def _object(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{name} is of type {type(value).__name__}, not an object")
    return value


def _list(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{name} is of type {type(value).__name__}, not a list")
    return value


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name} is of type {type(value).__name__}, not text")
    return value


def _integers(values: Any, name: str, start: int, end: int) -> list[int]:
    """Return ``values`` if it is a list of integers from ``start`` to below ``end``."""
    for value in _list(values, name):
        if type(value) is not int or not start <= value < end:  # a bool is an int too
            raise ValueError(f"{name} has {one_line(json.dumps(value), 40)}, not an integer from {start} to {end - 1}")
    return list(values)


def _numbers(values: Any, name: str) -> list[float]:
    """Return ``values`` as floats if it is a list of finite numbers."""
    numbers = []
    for value in _list(values, name):
        number = math.nan
        if isinstance(value, int | float) and not isinstance(value, bool):
            with suppress(OverflowError):  # a whole number that no float holds
                number = float(value)
        if not math.isfinite(number):
            raise ValueError(f"{name} has {one_line(json.dumps(value), 40)}, not a finite number")
        numbers.append(number)
    return numbers


def _log_probs(values: Any, name: str) -> list[float]:
    """Return ``values`` as floats if it is a list of log-probs."""
    numbers = _numbers(values, name)
    if (highest := max(numbers, default=0.0)) > _LARGEST_LOG_PROB:
        raise ValueError(f"{name} has {highest:g}, and the logarithm of a probability is not above 0")
    return numbers


def _label(value: Any) -> Any:
    """Return a label; for a prompt of the user's own code, it may be any value that JSON has."""
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        raise ValueError("label of the prompt has NaN or Infinity; a number there must be finite") from None
    return value


def _check_keys(record: Mapping[str, Any], known: Set[str], what: str) -> None:
    for name in record:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"{what} has {one_line(name, 40)!r}, which is not read{hint}")
