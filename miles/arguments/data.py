"""Choose the prompts, their columns and their order."""

from dataclasses import dataclass
from typing import Optional

from miles.flags import Errors, flag

FILE_SUFFIXES = (".jsonl", ".parquet")


@dataclass(frozen=True)
class DataArguments:
    """data: prompt sets, their columns and their order."""

    prompt_data: Optional[str] = flag(
        None,
        "training prompts: FILE.jsonl, FILE.parquet, hf:NAME[:SPLIT] (or a folder saved by datasets), or "
        "reasoning_gym:TASK[:key=value,...] (required)",
        metavar="SOURCE",
    )
    input_key: str = flag("input", "column of the prompt: text, or a list of chat messages")
    label_key: Optional[str] = flag(None, "column of the reference answer")
    metadata_key: str = flag("metadata", "column of an object for rewards and filters, if there is one")
    apply_chat_template: bool = flag(False, "render the prompt with the tokenizer's chat template")
    apply_chat_template_kwargs: Optional[str] = flag(None, "JSON object of keyword arguments of the chat template")
    rollout_max_prompt_len: Optional[int] = flag(
        None, "drop prompts that have more tokens than this, and report how many"
    )
    rollout_shuffle: bool = flag(False, "reshuffle the prompts for every epoch, seeded by --rollout-seed")
    rollout_seed: int = flag(42, "seed of the prompt order and of the sampling")


def check_data(data: DataArguments, loads_samples: bool, errors: Errors) -> None:
    """Check that there are prompts, and that template arguments have a template.

    Args:
        data: The section.
        loads_samples: Whether the run reads saved samples, and so needs no prompts.
        errors: Collects what is wrong.
    """
    if not loads_samples:
        errors.require("prompt_data", data.prompt_data, "the training prompts")
    if data.prompt_data is not None:
        check_source("prompt_data", data.prompt_data, errors)
    errors.at_least(data, 1, "rollout_max_prompt_len")
    errors.at_least(data, 0, "rollout_seed")
    errors.json_object("apply_chat_template_kwargs", data.apply_chat_template_kwargs)
    if not data.apply_chat_template:
        errors.refuse_ignored(data, ["apply_chat_template_kwargs"], "without --apply-chat-template", "add that switch")


def check_source(field: str, source: str, errors: Errors) -> None:
    """Check that a source with the suffix of a file is a file."""
    if source.endswith(FILE_SUFFIXES):
        errors.existing_file(field, source)
