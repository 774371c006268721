"""JSON from outside, read so that nothing in it is lost or fails later.

``json.loads`` keeps the last of two equal keys and accepts half of a surrogate pair, which no tokenizer and no file
takes. Deep nesting raises ``RecursionError``, here or when the value is copied.
"""

import json
import re
import sys
from typing import Any

from miles.base.text import one_line

MAX_DEPTH = 100

_MAY_HAVE_SURROGATES = re.compile(r"\\u[dD][89a-fA-F]")


class StrictJsonError(ValueError):
    """States the fault of a text that should be JSON, without naming the file: the caller knows it."""


def loads(text: str) -> Any:
    """Return the value of ``text``.

    Raises:
        StrictJsonError: The text is not JSON, has an object with a key twice, half of a surrogate pair, a number of
            more digits than Python reads, or more than ``MAX_DEPTH`` levels.
    """
    try:
        value = _DECODER.decode(text)
    except json.JSONDecodeError as error:
        place = f"column {error.colno}" if "\n" not in text else f"line {error.lineno}, column {error.colno}"
        raise StrictJsonError(f"not JSON ({error.msg}, {place})") from error
    except RecursionError:
        raise _too_deep() from None
    except StrictJsonError:
        raise
    except ValueError:  # the only other one: int() of too many digits
        raise StrictJsonError(f"it has a number of more than {sys.get_int_max_str_digits()} digits") from None
    if text.count("[") + text.count("{") > MAX_DEPTH and _depth(value) > MAX_DEPTH:
        raise _too_deep()
    if _MAY_HAVE_SURROGATES.search(text):
        _check_surrogates(value)
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise StrictJsonError(f"the key {one_line(key, 80)!r} is in one object twice")
            seen.add(key)
    return members


_DECODER = json.JSONDecoder(object_pairs_hook=_object)  # made once, as json.loads makes one per call


def _too_deep() -> StrictJsonError:
    return StrictJsonError(f"it is nested more than {MAX_DEPTH} levels deep")


def _depth(value: Any) -> int:
    depth, level = 0, [value]
    while level := [item for item in level if isinstance(item, dict | list)]:
        depth += 1
        level = [part for item in level for part in (item.values() if isinstance(item, dict) else item)]
    return depth


def _check_surrogates(value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):04x}"
        raise StrictJsonError(f"its text has {half}, half of a surrogate pair, without the other half") from None
