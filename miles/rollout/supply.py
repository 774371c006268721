"""Build the source of the training prompts: a file of prompts, of conversations, or the user's own source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from miles.arguments.flags_view import flags_view
from miles.arguments.settings import Settings
from miles.data.conversations import Conversation, load_conversations
from miles.data.custom_source import CustomStream
from miles.data.prompts import RowReader, load_prompts
from miles.data.stream import PromptStream


@dataclass(frozen=True)
class Supply:
    """The prompts of a run.

    Attributes:
        stream: Draws them; None if there are none to train on.
        num_prompts: How many make a pass; 0 if that is not known.
        conversations: Those whose prompts are drawn, if the run trains on conversations.
    """

    stream: PromptStream | CustomStream | None = None
    num_prompts: int = 0
    conversations: Sequence[Conversation] = ()


def build_supply(settings: Settings, tokenizer: Any) -> Supply:
    """Load what ``--prompt-data`` or ``--data-source-path`` names.

    Raises:
        ValueError: A row is malformed, or the source cannot be imported.
    """
    data, rollout = settings.data, settings.rollout
    context, labels_optional = rollout.rollout_max_context_len, settings.reward.labels_optional
    if data.data_source_path is not None:
        reader = RowReader(data, tokenizer, labels_optional=labels_optional, max_context_len=context)
        return Supply(CustomStream(data.data_source_path, flags_view(settings), reader))
    if data.prompt_data is None:
        return Supply()
    conversations: Sequence[Conversation] = ()
    if settings.reads_conversations:
        longest = rollout.rollout_max_response_len
        conversations = load_conversations(
            data.prompt_data, data, tokenizer, max_response_len=longest, max_context_len=context
        )
        prompts = [conversation.prompt for conversation in conversations]
    else:
        loaded = load_prompts(
            data.prompt_data, data, tokenizer, labels_optional=labels_optional, max_context_len=context
        )
        prompts = list(loaded.prompts)
    return Supply(PromptStream(prompts, data.rollout_shuffle, data.rollout_seed), len(prompts), conversations)
