"""The tools of a row, which the chat template shows to the model: ``--tool-key``."""

from __future__ import annotations

from typing import Any

from miles import strict_json
from miles.arguments.data import DataArguments
from miles.data.row import Row

FLAG = "--tool-key"


def tools_of(row: Row, key: str) -> list[dict[str, Any]] | None:
    """Return the tools in column ``key`` of a row, in the form of OpenAI's API; None if it has none.

    The column is a list of objects, or its JSON as text. An object without ``type`` is the function itself.

    Raises:
        InputError: The column holds something else.
    """
    value = row.columns.get(key)
    if isinstance(value, str):
        try:
            value = strict_json.loads(value) if value.strip() else None
        except strict_json.StrictJsonError as error:
            row.refuse(f"column {key!r} of tools is not JSON ({error}); {_what_to_do(key)}")
    if not value:
        return None
    if not isinstance(value, list):
        row.refuse(f"column {key!r} of tools is of type {type(value).__name__}; {_what_to_do(key)}")
    for number, tool in enumerate(value, start=1):
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            row.refuse(f"column {key!r}: tool {number} names no function; {_what_to_do(key)}")
    return value


def _what_to_do(key: str) -> str:
    hint = "" if key != DataArguments.tool_key else ", or name a column that is not there if these are no tools"
    return f"give a list of objects, each with the name of a function, or another column with {FLAG}{hint}"
