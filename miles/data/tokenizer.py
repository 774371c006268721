"""From the prompt of a row to the text and tokens that the model reads: the tokenizer and its chat template."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from miles.arguments.data import DataArguments
from miles.data.row import Row
from miles.flags import json_object

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a folder in Hugging Face format, or of a name on its hub.

    Raises ``ValueError`` if it cannot be loaded.
    """
    from transformers import AutoTokenizer  # slow to import; the settings are checked before

    try:
        return AutoTokenizer.from_pretrained(path)
    except Exception as error:  # transformers raises many kinds: OSError, KeyError, the Rust library's own
        reason = str(error).strip().split("\n")[0]
        raise ValueError(
            f"--hf-checkpoint {path}: cannot load a tokenizer from it ({type(error).__name__}: {reason}); give a "
            f"folder with tokenizer.json and tokenizer_config.json, or a name on the Hugging Face hub"
        ) from error


class PromptRenderer:
    """Renders prompts as ``--apply-chat-template`` says: through the tokenizer's template, or as they are.

    Raises ``ValueError`` if a template is asked for and the tokenizer has none, and if
    ``--apply-chat-template-kwargs`` is not a JSON object or has no template to go to.
    """

    def __init__(self, data: DataArguments, tokenizer: PreTrainedTokenizerBase) -> None:
        self.uses_template = data.apply_chat_template
        self._kwargs = json_object("apply_chat_template_kwargs", data.apply_chat_template_kwargs)
        self._tokenizer = tokenizer
        if self._kwargs and not self.uses_template:
            raise ValueError("--apply-chat-template-kwargs: would be ignored; add --apply-chat-template, or drop it")
        if self.uses_template and not tokenizer.chat_template:
            raise ValueError(
                "--apply-chat-template: the tokenizer has no chat template; drop the flag, or give a --hf-checkpoint "
                "with a chat template (instruct models have one)"
            )

    def render(self, row: Row, value: Any) -> str:
        """Return the text of the prompt ``value`` of ``row``: a string, or a list of ``{"role", "content"}`` messages.

        With the template, a string is one user message, and the text ends at the start of the assistant's turn.

        Raises:
            ValueError: For an empty or malformed prompt, and for messages without the template; it names the row.
        """
        if not isinstance(value, (str, list)):
            row.refuse(f"the prompt is {_kind(value)}; give text or a list of chat messages")
        if not value or (isinstance(value, str) and not value.strip()):
            row.refuse("the prompt is empty; fill it or remove the row")
        if isinstance(value, str):
            return self._apply(row, [{"role": "user", "content": value}]) if self.uses_template else value
        self._check_messages(row, value)
        return self._apply(row, value)

    def _apply(self, row: Row, messages: list[dict[str, str]]) -> str:
        template = self._tokenizer.apply_chat_template
        try:
            return str(template(messages, add_generation_prompt=True, tokenize=False, **self._kwargs))
        except Exception as error:  # templates are the model author's code and may raise anything
            raise ValueError(
                f"{row.where}: the chat template refuses the messages ({type(error).__name__}: {error}); correct "
                f"them, or look at --apply-chat-template-kwargs"
            ) from error

    def _check_messages(self, row: Row, messages: list[Any]) -> None:
        if not self.uses_template:
            row.refuse("the prompt is a list of chat messages; add --apply-chat-template, or give text")
        for number, message in enumerate(messages, start=1):
            if not isinstance(message, dict):
                row.refuse(f'message {number} is {_kind(message)}; write {{"role": ..., "content": ...}}')
            for key in ("role", "content"):
                if not isinstance(message.get(key), str):
                    row.refuse(f"message {number}: its {key} is {_kind(message.get(key))}; give text")


def _kind(value: Any) -> str:
    return "missing or null" if value is None else f"of type {type(value).__name__}"
