"""Split a shell script into words and separators, as a shell does before it expands anything.

``shlex`` is not enough: to it every ``#`` begins a comment, as in ``${MODEL##*/}``, and the brackets of ``$(date)`` end
the command.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn

from miles.compat.translate.settings import fail

_SEPARATORS = "\n;&|()"
_PLAIN = re.compile(r"[^\s\\'\"`$;&|()]+")
_DOCUMENT = re.compile(r"\d?<<(?!<)-?")  # the beginning of a here-document
_PLAIN_IN_QUOTES = re.compile(r"[^\\\"`$]+")


@dataclass(frozen=True)
class Word:
    """Hold a word without its quotes, or one character that separates words.

    Attributes:
        text: The word, with expansions (``$NAME``, ``$(command)``) as they are written.
        line: The line that it begins on.
        is_quoted: Whether a part of it is in quotes, or it comes from a variable: ``<`` is no redirection there.
        separates: Whether it ends a command, or opens or closes a list.
    """

    text: str
    line: int
    is_quoted: bool = False
    separates: bool = False


def words_of(path: str, text: str, reads_documents: bool) -> Iterator[Word]:
    """Yield the words of ``text`` without its comments, and with those of here-documents if asked to.

    Raises:
        InputError: A quote or a bracket is not closed. The message has ``path`` and the line.
    """
    return _Scanner(path, text, reads_documents).words()


class _Scanner:
    def __init__(self, path: str, text: str, reads_documents: bool) -> None:
        self._path = path
        self._text = text
        self._reads_documents = reads_documents
        self._document_ends: list[str] = []  # of the here-documents that begin with the next line
        self._expects_end = False  # whether the next word is one
        self._at = 0  # the next character
        self._newlines = [match.start() for match in re.finditer("\n", text)]

    def _line(self, at: int) -> int:
        return bisect_left(self._newlines, at) + 1

    def words(self) -> Iterator[Word]:
        text = self._text
        while self._at < len(text):
            char = text[self._at]
            if char == "#":  # at the beginning of a word; a backslash at the end continues no comment
                end = text.find("\n", self._at)
                self._at = len(text) if end < 0 else end
            elif text.startswith("\\\n", self._at):
                self._at += 2
            elif char in _SEPARATORS and not text.startswith("&>", self._at):
                yield Word(char, self._line(self._at), separates=True)
                self._at += 1
                if char == "\n":
                    self._leave_out_documents()
            elif char.isspace():
                self._at += 1
            else:
                begin = self._at
                word = self._word()
                self._note_document(begin, word)
                yield word

    def _note_document(self, begin: int, word: Word) -> None:
        if self._reads_documents:
            return
        opening = _DOCUMENT.match(self._text, begin)
        if self._expects_end or opening:
            end = word.text if opening is None else word.text[len(opening[0]) :]
            self._document_ends += [end] if end else []
            self._expects_end = not end

    def _leave_out_documents(self) -> None:
        ends, self._document_ends = self._document_ends, []
        for end in ends:
            if line := re.compile(rf"^\t*{re.escape(end)}$", re.MULTILINE).search(self._text, self._at):
                self._at = line.end()

    def _word(self) -> Word:
        text, line = self._text, self._line(self._at)
        parts: list[str] = []
        is_quoted = False
        while self._at < len(text):
            char = text[self._at]
            if plain := _PLAIN.match(text, self._at):
                parts.append(plain[0])
                self._at = plain.end()
            elif char == "\\":
                parts.append(text[self._at + 1 : self._at + 2].replace("\n", ""))
                self._at += 2
            elif char == "'":
                end = self._end("'", self._at + 1)
                parts.append(text[self._at + 1 : end])
                self._at, is_quoted = end + 1, True
            elif char == '"':
                parts.append(self._in_quotes())
                is_quoted = True
            elif char in "$`":
                parts.append(self._expansion())
            elif char == "&" and (text.startswith("&>", self._at) if not parts else parts[-1][-1:] in ("<", ">")):
                parts.append(char)  # of a redirection
                self._at += 1
            else:
                break
        return Word("".join(parts), line, is_quoted)

    def _in_quotes(self) -> str:
        """Read on to the end of double quotes; return what is in them."""
        text, begin = self._text, self._at
        parts: list[str] = []
        self._at += 1
        while self._at < len(text):
            char = text[self._at]
            if plain := _PLAIN_IN_QUOTES.match(text, self._at):
                parts.append(plain[0])
                self._at = plain.end()
            elif char == '"':
                self._at += 1
                return "".join(parts)
            elif char == "\\":
                escaped = text[self._at + 1 : self._at + 2]
                parts.append("" if escaped == "\n" else escaped if escaped in ('"', "\\") else char + escaped)
                self._at += 2
            else:
                parts.append(self._expansion())
        self._fail('"', begin)

    def _expansion(self) -> str:
        """Read on to the end of an expansion, or past a dollar sign; return it as it is written."""
        begin = self._at
        if self._text[begin] == "`":
            end = self._end("`", begin + 1)
        elif self._text.startswith("$(", begin):
            end = self._matching("(", ")", begin + 2)
        elif self._text.startswith("${", begin):
            end = self._matching("{", "}", begin + 2)
        else:
            end = begin
        self._at = end + 1
        return self._text[begin : self._at]

    def _end(self, quote: str, at: int) -> int:
        end = self._text.find(quote, at)
        if end < 0:
            self._fail(quote, at - 1)
        return end

    def _matching(self, opening: str, closing: str, at: int) -> int:
        """Return the place of the bracket that closes the one before ``at``."""
        text, begin, depth = self._text, at, 1
        while at < len(text):
            char = text[at]
            if char == "'" and opening == "(":
                at = self._end("'", at + 1)
            elif char == '"':
                before, self._at = self._at, at
                self._in_quotes()
                at, self._at = self._at - 1, before
            elif char == "\\":
                at += 1
            elif char in (opening, closing):
                depth += 1 if char == opening else -1
                if not depth:
                    return at
            at += 1
        self._fail(opening, begin - 1)

    def _fail(self, opening: str, at: int) -> NoReturn:
        fail(self._path, self._line(at), f"not a shell script ({opening} is not closed); check its quotes")
