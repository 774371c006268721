"""Choose the prompts, their columns and their order."""

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any, Optional

from miles.base.flags import LARGEST, LONGEST_VALUE, Errors, count, flag, flag_name
from miles.base.text import InputError, one_line
from miles.tasks.environments.base import read_options
from miles.tasks.environments.verifiers_tasks import SCHEME as VERIFIERS

SOURCES = (
    "FILE.jsonl, FILE.parquet, hf:NAME[:SPLIT], a folder saved by datasets, reasoning_gym:TASK[:key=value,...] or "
    "verifiers:TASKSET[:key=value,...]"
)
FILE_SUFFIXES = (".jsonl", ".parquet")
HUGGING_FACE, REASONING_GYM = "hf:", "reasoning_gym:"
_SCHEMES = (HUGGING_FACE, REASONING_GYM, VERIFIERS)  # of sources that are neither a file nor a folder
MOST_TASK_ROWS = 10_000_000  # of a reasoning_gym task, which all are made before the run
# Arguments of tokenizer.apply_chat_template that the launcher gives itself, or that have no effect on text.
_NOT_OF_TEMPLATES = (
    *("conversation", "messages", "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict"),
    *("return_assistant_tokens_mask", "tokenizer_kwargs"),
)
HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")  # a dataset of the Hugging Face hub, with its owner


@dataclass(frozen=True)
class DataArguments:
    """data: prompt sets, their columns and their order."""

    prompt_data: Optional[str] = flag(
        None,
        "training prompts: FILE.jsonl, FILE.parquet, hf:NAME[:SPLIT] (or a folder saved by datasets), "
        "reasoning_gym:TASK[:key=value,...] or verifiers:TASKSET[:key=value,...] (required)",
        needs="no --data-source-path, no --prompt-mix",
        metavar="SOURCE",
    )
    prompt_mix: Optional[tuple[str, ...]] = flag(
        None,
        "several training sets instead of --prompt-data: NAME SOURCE pairs",
        needs="prompts to draw, answers, no --data-source-path",
        nargs="+",
        type=str,
        metavar="NAME SOURCE",
    )
    prompt_mix_weights: Optional[tuple[float, ...]] = flag(
        None,
        "weight of each set of --prompt-mix: how often it is drawn from; default: its number of prompts",
        needs="--prompt-mix",
        nargs="+",
        type=float,
        metavar="W",
    )
    curriculum_path: Optional[str] = flag(
        None,
        "your function that chooses weights or prompts before each iteration (docs/data.md), module:function",
        needs="prompts to draw, answers, no --data-source-path, --prompt-data or --prompt-mix",
    )
    data_source_path: Optional[str] = flag(
        None, "your source of rows, instead of --prompt-data (docs/data.md), module:class", needs="prompts to draw"
    )
    input_key: str = flag("input", "column of the prompt: text, or a list of chat messages")
    label_key: Optional[str] = flag(None, "column of the reference answer, or a part of one: answer.text")
    metadata_key: str = flag("metadata", "column of an object for rewards and filters, if there is one")
    tool_key: str = flag(
        "tools",
        "column of the tools that the chat template shows to the model, if there is one",
        needs="a chat template, no --agent-command",
    )
    apply_chat_template: bool = flag(False, "render the prompt with the tokenizer's chat template")
    apply_chat_template_kwargs: Optional[str] = flag(
        None, "JSON object of keyword arguments of the chat template", needs="a chat template", has_lines=True
    )
    multimodal_keys: Optional[str] = flag(
        None,
        'JSON object that names the column of images, which fill <image> in the prompt: {"image": "images"} '
        "(docs/images.md)",
        has_lines=True,
    )
    image_max_pixels: Optional[int] = flag(
        None, "images of more pixels are made smaller", at_least=1, needs="a model that reads images"
    )
    image_min_pixels: Optional[int] = flag(
        None, "images of fewer pixels are made larger", at_least=1, needs="a model that reads images"
    )
    allow_image_urls: bool = flag(
        False, "fetch images whose place is an http:// or https:// address", needs="a model that reads images"
    )
    sft_roles: tuple[str, ...] = flag(
        ("assistant",),
        "with --loss-type sft_loss on conversations: the roles whose messages are trained on",
        needs="conversations",
        nargs="+",
        type=str,
    )
    rollout_max_prompt_len: Optional[int] = flag(
        None, "drop prompts that have more tokens than this, and report how many", at_least=1
    )
    rollout_shuffle: bool = flag(
        False, "reshuffle the prompts for every epoch, seeded by --rollout-seed", needs="no --data-source-path"
    )
    rollout_seed: int = flag(42, "seed of the prompt order and of the sampling", at_least=0)

    @property
    def mixed_sources(self) -> dict[str, str]:
        """The source of each set of ``--prompt-mix`` by name; the set of ``--prompt-data`` is called prompts."""
        if self.prompt_mix is not None:
            return dict(zip(self.prompt_mix[::2], self.prompt_mix[1::2], strict=True))
        return {} if self.prompt_data is None else {"prompts": self.prompt_data}


def of_rows(data: DataArguments) -> DataArguments:
    """Return the section without the flags that rows are not read by: those that name sources and their order."""
    not_of_rows = ("prompt_data", "prompt_mix", "prompt_mix_weights", "curriculum_path", "data_source_path")
    default = DataArguments()
    return replace(data, **{name: getattr(default, name) for name in (*not_of_rows, "rollout_shuffle", "rollout_seed")})


def find_column(row: Mapping[str, Any], name: str) -> Any:
    """Return the value of column ``name``, or of a part of one, as in ``answer.text``; None if it is absent."""
    if name in row:
        return row[name]
    part: Any = row
    for step in name.split("."):
        part = part.get(step) if isinstance(part, Mapping) else None
    return part


def columns_to_choose(row: Mapping[str, Any], name: str) -> str:
    """Say which columns there are instead of ``name``, and which of them may be meant."""
    near = get_close_matches(name, row, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    has = one_line(", ".join(map(str, row)), 500) or "none"
    return f"{hint}the columns are: {has}"


def check_data(
    data: DataArguments, loads_samples: bool, reads_conversations: bool, has_eval_sets: bool, errors: Errors
) -> None:
    """Check that there are prompts, and that template arguments have a template.

    Args:
        data: The section.
        loads_samples: Whether the run reads saved samples, and so needs no prompts.
        reads_conversations: Whether the prompts are conversations to train on, which always have a template.
        has_eval_sets: Whether there are prompts of evaluation sets, which have a template only if it is asked for.
        errors: Collects the faults.
    """
    if data.data_source_path is not None and reads_conversations:
        rule = "gives prompts, and --loss-type sft_loss trains on conversations"
        what_to_do = "give the conversations as --prompt-data FILE.jsonl"
        errors.refuse("data_source_path", data.data_source_path, rule, what_to_do)
    if data.data_source_path is None and not loads_samples and data.prompt_mix is None:
        errors.require("prompt_data", data.prompt_data, "the training prompts")
    _check_mix(data, errors)
    if data.prompt_data is not None:
        check_source("prompt_data", data.prompt_data, errors)
    kwargs = errors.json_object("apply_chat_template_kwargs", data.apply_chat_template_kwargs)
    for name in [name for name in _NOT_OF_TEMPLATES if name in kwargs]:
        errors.refuse("apply_chat_template_kwargs", name, "not an argument of the chat template", "remove this key")
    if kwargs and has_eval_sets and not data.apply_chat_template:
        rule = "is read for the conversations, and the prompts of evaluation have no template"
        errors.refuse("apply_chat_template_kwargs", data.apply_chat_template_kwargs, rule, "add --apply-chat-template")
    _check_images(data, loads_samples, reads_conversations, errors)


def _check_images(data: DataArguments, loads_samples: bool, reads_conversations: bool, errors: Errors) -> None:
    keys = errors.json_object("multimodal_keys", data.multimodal_keys)
    for name, column in keys.items():
        if name != "image":
            what_to_do = 'name the column of images, {"image": "images"}, and train on images and text'
            errors.refuse("multimodal_keys", data.multimodal_keys, f"{name} is not trained on", what_to_do)
        elif not isinstance(column, str) or not column:
            errors.refuse("multimodal_keys", data.multimodal_keys, "names no column", 'write {"image": "images"}')
    least, most = data.image_min_pixels, data.image_max_pixels
    if least is not None and most is not None and least > most:
        errors.refuse("image_min_pixels", least, f"is more than --image-max-pixels {most}", "exchange them")
    if data.multimodal_keys is not None and not (data.apply_chat_template or reads_conversations or loads_samples):
        rule = "images are rendered by the chat template"
        errors.refuse("multimodal_keys", data.multimodal_keys, rule, "add --apply-chat-template")


def explain_prompts(data: DataArguments) -> list[str]:
    """Return the lines about mixed sets of prompts, and about the curriculum."""
    lines = []
    if data.prompt_mix is not None:
        names = list(data.mixed_sources)
        weights = data.prompt_mix_weights
        if weights is None:
            lines.append(f"prompts    {', '.join(names)} by their numbers of prompts")
        else:
            shares = [f"{name} {weight / sum(weights):.3g}" for name, weight in zip(names, weights, strict=True)]
            lines.append(f"prompts    {', '.join(shares)} of the draws")
    if data.curriculum_path is not None:
        lines.append(f"prompts    weights or prompts are chosen before each iteration by {data.curriculum_path}")
    return lines


def _check_mix(data: DataArguments, errors: Errors) -> None:
    if data.prompt_mix is None:
        return
    check_pairs("prompt_mix", data.prompt_mix, errors)
    weights = data.prompt_mix_weights
    if weights is None or not errors.none_about("prompt_mix"):
        return
    sets = len(data.prompt_mix) // 2
    if len(weights) != sets:
        rule = f"{count(len(weights), 'weight')} cannot be one for each of {count(sets, 'set')}"
        errors.refuse("prompt_mix_weights", weights, rule, f"give {sets}")
    fault = fault_of_weights(weights)
    if fault is not None:
        errors.refuse("prompt_mix_weights", weights, fault, "give 0 or more for each set, and more for one at least")


def fault_of_weights(weights: Sequence[float]) -> str | None:
    """Return the fault of the weights of sets, if they have one."""
    if not all(math.isfinite(weight) and weight >= 0 for weight in weights):
        return "are not all finite numbers of at least 0"
    return None if sum(weights) > 0 else "are all 0"


def check_pairs(field: str, words: tuple[str, ...], errors: Errors) -> None:
    """Check that words are NAME SOURCE pairs, each name once."""
    if len(words) % 2:
        rule = f"{count(len(words), 'word')} cannot be NAME SOURCE pairs"
        what_to_do = f"write a name before each source: {flag_name(field)} test FILE.jsonl"
        errors.refuse(field, words, rule, what_to_do)
        return
    names = words[::2]
    for name, source in zip(names, words[1::2], strict=True):
        if names.count(name) > 1:
            errors.refuse(field, words, f"the name {name} is given twice", "give each set its own name")
        check_source(field, source, errors)


def check_source(field: str, source: str, errors: Errors) -> None:
    """Check that a source has one of the forms ``SOURCES``. A file that is not there is refused by a start alone."""
    if source.endswith(FILE_SUFFIXES):
        if os.path.exists(source) and errors.existing_file(field, source) and os.path.getsize(source) == 0:
            errors.refuse(field, source, "the file is empty", "give one with at least one row")
    elif source in _SCHEMES:
        errors.refuse(field, source, "names nothing", f"give {SOURCES}")
    elif source.startswith(REASONING_GYM):
        with errors.catching():
            read_task(source, f"{flag_name(field)} {one_line(source, LONGEST_VALUE)}")
    elif not source.startswith(_SCHEMES) and not os.path.isdir(source):  # unlike Path, false for a long name
        if os.path.exists(source) or not HUB_NAME.fullmatch(source):
            forms = f"give {SOURCES}"
            if os.path.isfile(source):
                forms = f"write its rows as one JSON object per line into a file *.jsonl, or {forms}"
            errors.refuse(field, source, "not a prompt source", forms)
        else:
            errors.refuse(field, source, "no such folder", f"give hf:{source} for a dataset of the Hugging Face hub")


def read_task(source: str, origin: str) -> tuple[str, dict[str, Any]]:
    """Return the task that ``reasoning_gym:TASK[:key=value,...]`` names, and its settings.

    Raises:
        InputError: A setting is malformed, or one that all tasks have, and most do not check, is out of range. The
            message begins with ``origin``.
    """
    task, _, text = source.removeprefix(REASONING_GYM).partition(":")
    options = read_options(text, origin)
    size, seed = options.get("size", 1), options.get("seed", 0)
    if type(size) is not int or not 1 <= size <= MOST_TASK_ROWS:
        raise InputError(f"{origin}: size must be a whole number from 1 to {MOST_TASK_ROWS}; write size=1000")
    if type(seed) is not int or abs(seed) > LARGEST:
        raise InputError(f"{origin}: seed must be a whole number of at most 64 bits; write seed=1")
    return task, options
