"""Messages between the rollout process and the process of a reward function, by pipes that user code can reach.

A message begins with a random token that both processes have and no command line or environment shows. So bytes that
user code writes into a pipe are no message, however they look, and a message that it cuts or mixes with them has
another checksum.
"""

from __future__ import annotations

import secrets
import struct
import zlib
from typing import IO

# The act of user code when messages do not arrive, in words.
PIPE_CLOSED = "closed a pipe of its process (a file descriptor above 2 that it did not open, as os.closerange does)"
PIPE_READ = "read from a pipe of its process, or changed it (a file descriptor above 2 that it did not open)"
PIPE_WRITTEN = "wrote into a pipe of its process (a file descriptor above 2 that it did not open)"
TOKEN_BYTES = 16
_HEAD = struct.Struct(f"!{TOKEN_BYTES}sQI")  # token, length, CRC-32


class NotAMessage(Exception):
    """The bytes that were read are no message of the other process."""


def new_token() -> bytes:
    """Return a token for the messages of one process."""
    return secrets.token_bytes(TOKEN_BYTES)


def write_message(file: IO[bytes], token: bytes, message: bytes) -> None:
    """Write and flush ``message``."""
    file.write(_HEAD.pack(token, len(message), zlib.crc32(message)) + message)
    file.flush()


def read_message(file: IO[bytes], token: bytes) -> bytes | None:
    """Return the next message; None at the end of the file, also in the middle of a message.

    Raises:
        NotAMessage: Something else comes next.
    """
    head = file.read(_HEAD.size)
    if head is None:
        raise NotAMessage  # user code has made the pipe a non-blocking one
    if len(head) < _HEAD.size:
        return None
    prefix, length, crc32 = _HEAD.unpack(head)
    if not secrets.compare_digest(prefix, token):
        raise NotAMessage
    message = file.read(length)
    if message is None or len(message) == length and zlib.crc32(message) != crc32:
        raise NotAMessage
    return message if len(message) == length else None
