"""Read the text of a file."""

from __future__ import annotations

from miles.compat.translate.settings import fail

LARGEST_FILE = 1_000_000  # bytes


def read_text(path: str) -> str:
    """Return the text of a file, with newlines as line ends.

    Raises:
        InputError: The file cannot be read, is too large, or is no text: one sentence with file and line.
    """
    try:
        with open(path, "rb") as file:
            data = file.read(LARGEST_FILE + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        fail(path, None, f"cannot be read ({reason}); check the path")
    if len(data) > LARGEST_FILE:
        fail(path, None, f"has more than {LARGEST_FILE} bytes; give the file of settings alone")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        fail(path, data.count(b"\n", 0, error.start) + 1, "is not UTF-8 text; save it as UTF-8")
    if "\0" in text:
        fail(path, text.count("\n", 0, text.index("\0")) + 1, "has a zero byte; check the path")
    return text.replace("\r\n", "\n")
