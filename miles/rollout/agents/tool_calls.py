"""Tool calls in the text of a model, in the form of Hermes and Qwen: ``<tool_call>{json}</tool_call>``."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from miles.base import strict_json

_BLOCK = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


@dataclass(frozen=True)
class ToolCall:
    """A call that the model makes. ``arguments`` is JSON, as OpenAI's API has it."""

    name: str
    arguments: str


def parse_tool_calls(text: str) -> tuple[str, list[ToolCall]]:
    """Return the text outside the tool calls, and the calls in order.

    If a block is not a call, nothing is: the whole text is content, so that the program sees what the model wrote.

    >>> parse_tool_calls('Let me see.<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
    ('Let me see.', [ToolCall(name='add', arguments='{"a": 1}')])
    >>> parse_tool_calls("<tool_call>add 1</tool_call>")
    ('<tool_call>add 1</tool_call>', [])
    """
    calls = [_call(block) for block in _BLOCK.findall(text)]
    found = [call for call in calls if call is not None]
    if not found or len(found) < len(calls):
        return text, []
    return _BLOCK.sub("", text).strip(), found


def _call(block: str) -> ToolCall | None:
    try:
        value: Any = strict_json.loads(block.strip())
    except strict_json.StrictJsonError:
        return None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", {})
    if isinstance(arguments, str):
        return ToolCall(value["name"], arguments)
    return ToolCall(value["name"], json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None
