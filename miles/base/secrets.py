"""Decide which values are secret, and the text that is shown instead. Nothing else in miles decides it.

Secret are the values of settings, flags and environment variables whose names end like a credential's name (``key``,
``token``, ``secret``, ``password`` …), all values of ``--train-env-vars`` and ``--storage-options``, and the user,
password and tokens in a URL.
Names of data columns (``--label-key``) and counts (``--max-tokens-per-gpu``) are no credentials.
"""

import ctypes
import json
import os
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TextIO

from miles.base.attributes import set_within

HIDDEN = "(hidden)"
SHORTEST_HIDDEN_IN_TEXT = 4  # a shorter secret is found by chance in other words, and would make them unreadable

# Ends of the last word of a credential's name, in lower case.
_CREDENTIALS = ("key", "keys", "token", "secret", "secrets", "passwd", "passphrase", "credential", "credentials")
_CREDENTIALS_ANYWHERE = ("password", "secret")
_IN_ENVIRONMENT_NAMES = ("KEY", "TOKEN", "SECRET", "PASSW", "CREDENTIAL")
_IN_QUERIES = ("sig", "signature", "auth")
_COLUMNS = (
    "input_key",
    "label_key",
    "metadata_key",
    "multimodal_keys",
    "opd_teacher_key",
    "reward_key",
    "tool_key",
)  # fields of a data row or a reward
_MEASURES = ("per_token", "first_token")
_ADDRESSES = ("notify_url",)  # which hold their token in the path
_ENVIRONMENTS = ("train_env_vars", "storage_options")  # JSON objects whose values may be credentials

# The length of the scheme is bounded, or the search would take the square of the length of a long word.
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]{0,30}://[^\s'\"<>]+")
_OVERRIDE = re.compile(r"((?:\w+\.)?([\w-]+)=)(.+)", re.DOTALL)  # section.key=value after --config
_USER_INFO = re.compile(r"(?<=://)[^/?#]*(?=@)")
_USER_INFO_ALONE = re.compile(r"\A((?:\w[\w.\-]*=)?)([^/?#]*)(?=@)")  # of an address without a scheme
_QUERY_FIELD = re.compile(r"(?<=[?&;])([\w.%~\-]+)=([^&;#]*)")


def is_secret(name: str) -> bool:
    """Return whether ``name``, of a setting, a flag or an environment variable, names a credential."""
    words = re.split(r"[^A-Za-z0-9]+", name.strip("-_ "))
    field = "_".join(words).lower()
    if field.removeprefix("eval_") in _COLUMNS or field.endswith(_MEASURES):
        return False
    if field in _ADDRESSES:
        return True
    if name.isupper():
        return any(part in name for part in _IN_ENVIRONMENT_NAMES)
    return words[-1].lower().endswith(_CREDENTIALS) or any(part in field for part in _CREDENTIALS_ANYWHERE)


def _is_sensitive(name: str) -> bool:
    return is_secret(name) or name.replace("-", "_") in _ENVIRONMENTS


def public(name: str, value: Any) -> Any:
    """Return the value of the setting ``name`` as it may be shown: secrets in it are replaced by ``HIDDEN``."""
    return _Replacer().setting(name, value)


def public_words(words: Sequence[str]) -> list[str]:
    """Return the words of a command line as they may be shown."""
    return _Replacer().words("", words)


def secrets_in(name: str, value: Any) -> set[str]:
    """Return the secrets in the value of the setting ``name``, long enough to be looked for in text."""
    replacer = _Replacer()
    replacer.setting(name, value)
    return {secret for secret in replacer.secrets if len(secret) >= SHORTEST_HIDDEN_IN_TEXT}


def hide_in_text(text: str, secrets: Collection[str]) -> str:
    """Return ``text`` without ``secrets``, the longest first: one may be a part of another."""
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    return text


def split_secret_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Divide the words of a command line into flags without secrets, and flags with secrets; values stay with flags."""
    plain: list[str] = []
    secret: list[str] = []
    for group in _by_flag(words):
        (plain if public_words(group) == group else secret).extend(group)
    return plain, secret


def _by_flag(words: Sequence[str]) -> Iterator[list[str]]:
    """Yield each flag with its values."""
    group: list[str] = []
    for word in words:
        if word.startswith("--") and group:
            yield group
            group = []
        group.append(word)
    if group:
        yield group


class _Replacer:
    """Replace secrets, and remember the secrets of credentials."""

    def __init__(self) -> None:
        self.secrets: list[str] = []

    def setting(self, name: str, value: Any) -> Any:
        if isinstance(value, str):
            return self._text(name, value)
        if isinstance(value, Mapping):
            return {key: self._entry(str(key), item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self.words(name, value))
        return value

    def words(self, name: str, values: Sequence[Any]) -> list[Any]:
        """Replace in a list, which may be a command line: a flag names the words after it."""
        masked = []
        for value in values:
            if isinstance(value, str) and value.startswith("--"):
                match = re.match(r"(--[\w-]+)([= ]?)(.*)", value, re.DOTALL)
                name, between, attached = match.groups() if match else (value, "", "")
                masked.append(f"{name}{between}{self.setting(name, attached)}")
            elif isinstance(value, str) and (override := _OVERRIDE.fullmatch(value)) and _is_sensitive(override[2]):
                masked.append(f"{override[1]}{self.setting(override[2], override[3])}")
            else:
                masked.append(self.setting(name, value))
        return masked

    def _text(self, name: str, text: str) -> str:
        field = name.strip("-").replace("-", "_")
        if text and is_secret(name):
            return self._hidden(text)
        if field in _ENVIRONMENTS or text.lstrip().startswith("{"):
            try:
                value = json.loads(text)
                masked = self._object(value, all_hidden=field in _ENVIRONMENTS)
                return text if masked == value else json.dumps(masked)
            except (ValueError, RecursionError):
                if text and field in _ENVIRONMENTS:  # not valid, and shown in an error
                    return HIDDEN
        if field.endswith(("url", "urls")) and "://" not in text:
            text = _USER_INFO_ALONE.sub(lambda match: match[1] + self._user_info(match[2]), text)
        return _URL.sub(lambda url: self._url(url.group()), text)

    def _object(self, value: Any, all_hidden: bool) -> Any:
        if all_hidden and isinstance(value, dict):
            for name, item in value.items():
                self._entry(name, item)
            return dict.fromkeys(value, HIDDEN)
        return HIDDEN if all_hidden else self.setting("", value)

    def _entry(self, name: str, value: Any) -> Any:
        if is_secret(name) and value is not None and not isinstance(value, bool | Mapping):
            return self._hidden(value if isinstance(value, str) else json.dumps(value, default=str))
        return self.setting(name, value)

    def _url(self, url: str) -> str:
        url = _USER_INFO.sub(lambda info: self._user_info(info.group()), url)
        return _QUERY_FIELD.sub(self._query_field, url)

    def _user_info(self, info: str) -> str:
        return self._hidden(info.partition(":")[2] or info)

    def _query_field(self, field: re.Match[str]) -> str:
        name, value = field.groups()
        secret = value and (is_secret(name) or name.lower().endswith(_IN_QUERIES))
        return f"{name}={self._hidden(value)}" if secret else field.group()

    def _hidden(self, secret: str) -> str:
        self.secrets.append(secret)
        return HIDDEN


# Hide secrets where others see this process: in its command line in the process list, and in its output.


_ARG_START, _ARG_END = 48, 49  # fields of /proc/PID/stat: its ends in memory (man 5 proc_pid_stat)


def hide_on_command_line(words: Sequence[str]) -> None:
    """Overwrite the secrets among ``words`` on this process's command line, which every user of the machine can read.

    They could be read before this call. A file of flags (``@file``) never shows them.
    """
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()  # from field 3 on
    start, end = int(fields[_ARG_START - 3]), int(fields[_ARG_END - 3])
    original = ctypes.string_at(start, end - start)
    hidden = original
    for word, public in zip(words, public_words(words), strict=True):
        if word != public:
            same = len(os.path.commonprefix([word, public]))
            prefix, secret = os.fsencode(word[:same]), os.fsencode(word[same:])
            hidden = hidden.replace(b"\0" + prefix + secret + b"\0", b"\0" + prefix + b"*" * len(secret) + b"\0")
    if hidden != original:
        ctypes.memmove(start, hidden, len(hidden))


def hidden_in_output(secrets: Collection[str]) -> AbstractContextManager[None]:
    """Replace ``secrets`` in all that the block prints to stdout and stderr, tracebacks and workers' lines included."""
    streams = {name: _HidingStream(getattr(sys, name), secrets) for name in ("stdout", "stderr") if secrets}
    return set_within(sys, **streams)


class _HidingStream:
    """Pass text on to ``stream`` without the secrets."""

    def __init__(self, stream: TextIO, secrets: Collection[str]) -> None:
        self._stream = stream
        self._secrets = secrets

    def write(self, text: str) -> int:
        self._stream.write(hide_in_text(text, self._secrets))
        return len(text)

    def write_event(self, event: str, fields: Mapping[str, Any]) -> None:
        """Pass an event on to a stream that takes some (``--log-format json``)."""
        stream: Any = self._stream
        stream.write_event(event, {self._public(name): self._public(value) for name, value in fields.items()})

    def _public(self, value: Any) -> Any:
        return hide_in_text(value, self._secrets) if isinstance(value, str) else value

    def writelines(self, lines: Sequence[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
