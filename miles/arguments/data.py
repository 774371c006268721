"""Where prompts come from."""

from dataclasses import dataclass
from typing import Optional

from miles.flags import flag


@dataclass(frozen=True)
class DataArguments:
    """data: prompt sets, their columns and their order."""

    prompt_data: Optional[str] = flag(
        None,
        "training prompts: FILE.jsonl, FILE.parquet, hf:NAME[:SPLIT] (or a folder saved by datasets), or "
        "reasoning_gym:TASK[:key=value,...] (required)",
        metavar="SOURCE",
    )
    input_key: str = flag("input", "column that holds the prompt: text, or a list of chat messages")
    label_key: Optional[str] = flag(None, "column that holds the reference answer")
    metadata_key: str = flag("metadata", "column that holds an object passed on to rewards and filters, where present")
    apply_chat_template: bool = flag(False, "render the prompt through the tokenizer's chat template")
    apply_chat_template_kwargs: Optional[str] = flag(None, "JSON object of keyword arguments for the chat template")
    rollout_max_prompt_len: Optional[int] = flag(None, "drop prompts of more tokens than this, and say how many")
    rollout_shuffle: bool = flag(False, "shuffle the prompts anew each epoch, seeded by --rollout-seed")
    rollout_seed: int = flag(42, "seed of the prompt order and of the sampling")
