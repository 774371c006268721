"""Read the text of a shell script without running anything: its commands, with what can be evaluated filled in.

Variables, arrays, defaults, quotes, arithmetic, removed prefixes, and branches on known texts and numbers are
evaluated. A command substitution, a variable that is set nowhere, or in another branch or a loop, is unknown: it stays
as written, and so does any value made from it.

The grammar is tree-sitter's. ``shlex`` takes every ``#`` for a comment, as in ``${MODEL##*/}``, and ends a command at
the bracket of ``$(date)``; a scanner of our own had twice the lines, and knew no arithmetic, functions or ``case``.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tree_sitter import Node

MOST_WORDS = 50_000
MOST_DEPTH = 200  # of nested quotes and brackets
_TESTS: dict[str, Callable[[str, str], bool]] = {
    "=": fnmatchcase,
    "==": fnmatchcase,
    "!=": lambda one, other: not fnmatchcase(one, other),
    "-eq": lambda one, other: int(one) == int(other),
    "-ne": lambda one, other: int(one) != int(other),
    "-lt": lambda one, other: int(one) < int(other),
    "-le": lambda one, other: int(one) <= int(other),
    "-gt": lambda one, other: int(one) > int(other),
    "-ge": lambda one, other: int(one) >= int(other),
}
_BRANCHES = ("if_statement", "case_statement", "for_statement", "c_style_for_statement", "while_statement")
_POSITIONS = tuple("123456789")
_ARGUMENTS = (*_POSITIONS, "@", "*")
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)\s*(?:[-+*/%]?=(?!=)|\+\+|--)")  # in arithmetic
_JOINED = re.compile(r"^([^#'\n]*\S)\\\n(?=\S)", re.MULTILINE)  # a word that continues in the next line
_COMMENT = re.compile(r"`#[^`\n]*`")  # a command substitution of a comment alone: no word
_OPERATIONS: dict[type[ast.AST], Callable[..., int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: lambda one, other: one ** _up_to_64(other),
    ast.LShift: lambda one, other: one << _up_to_64(other),
    ast.RShift: operator.rshift,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}


@dataclass(frozen=True)
class Word:
    """Hold a word of a command, without its quotes.

    Attributes:
        text: The word. Its unknown parts are as written, such as ``$NAME``.
        line: The line that it begins on.
        is_known: Whether nothing in it is unknown.
        is_quoted: Whether a part of it is in quotes, so that it is one word and no redirection.
    """

    text: str
    line: int
    is_known: bool = True
    is_quoted: bool = False


@dataclass
class Script:
    """Hold the commands and variables of a script, as far as its text states them.

    Attributes:
        commands: The words of its commands, in their order.
        variables: The words that each variable or array stands for at the end.
        uncertain: The variables that a branch or a loop sets.
        documents: The bodies of its here-documents.
        fault_line: The line of the first text that is no shell script, or ``None``.
    """

    commands: list[list[Word]] = field(default_factory=list)
    variables: dict[str, list[Word]] = field(default_factory=dict)
    uncertain: set[str] = field(default_factory=set)
    documents: list[str] = field(default_factory=list)
    fault_line: int | None = None


def read_script(
    text: str,
    *,
    source: Callable[[str], str | None] = lambda name: None,
    environment: Mapping[str, str] | None = None,
) -> Script:
    """Read a script.

    Args:
        text: The script.
        source: Returns the text of a file that the script sources, or ``None`` if that is not read.
        environment: The values of variables that the script does not set.

    Raises:
        ValueError: The script has too many words, or is nested too deep.
    """
    script = Script()
    _Reader(script, source, environment or {}).read(text)
    return script


class _Reader:
    def __init__(self, script: Script, source: Callable[[str], str | None], environment: Mapping[str, str]) -> None:
        self._script = script
        self._source = source
        self._environment = environment
        self._words = 0
        self._depth = 0  # of quotes
        self._functions: dict[str, Node] = {}  # their bodies, by name
        self._called = set[str]()
        self._active = set[str]()

    def read(self, text: str, is_sourced: bool = False) -> None:
        import tree_sitter_bash
        from tree_sitter import Language, Parser

        text = _JOINED.sub(r"\1", _COMMENT.sub("", text))
        root = Parser(Language(tree_sitter_bash.language())).parse(text.encode()).root_node
        if root.has_error and not is_sourced:
            self._script.fault_line = _fault_line(root)
        commands = self._script.commands
        before = len(commands)
        functions_before = set(self._functions)
        self._run(root, True, 0)
        if is_sourced:  # its assignments count, and its commands do not
            del commands[before:]
            self._called |= self._functions.keys() - functions_before
        else:  # something else may call these functions; the last commands stay those that surely run
            self._forget(_ARGUMENTS)
            certain = commands[:]
            commands.clear()
            for name in sorted(self._functions.keys() - self._called):
                self._run(self._functions[name], False, 0)
            commands += certain

    def _run(self, node: Node, is_certain: bool, depth: int) -> None:
        """Note the assignments and commands of a statement. In a branch, or after ``&&``, they are not certain."""
        if depth > MOST_DEPTH:
            raise ValueError("is nested too deep; give the launch script alone")
        kind = node.type
        if kind == "variable_assignment":
            self._assign(node, is_certain)
        elif kind == "command":
            self._command(node, is_certain, depth)
        elif kind == "function_definition":
            name, body = (node.child_by_field_name(field) for field in ("name", "body"))
            if name is not None and body is not None:
                self._functions[_text(name)] = body
        elif kind in ("declaration_command", "variable_assignments"):
            for child in node.named_children:
                if child.type == "variable_assignment":
                    self._assign(child, is_certain)
        elif kind in ("heredoc_body", "heredoc_redirect"):
            bodies = [node] if kind == "heredoc_body" else [c for c in node.named_children if c.type == "heredoc_body"]
            self._script.documents += [_text(body) for body in bodies]
            for child in node.named_children:  # what follows << on its line
                if child.type in ("pipeline", "command", "list"):
                    self._run(child, is_certain, depth + 1)
        elif kind == "list":
            for number, child in enumerate(node.named_children):
                self._run(child, is_certain and not number, depth + 1)
        elif kind in ("if_statement", "case_statement") and (chosen := self._chosen(node)) is not None:
            for child in chosen:
                self._run(child, is_certain, depth + 1)
        else:
            if kind == "for_statement" and (name := node.child_by_field_name("variable")) is not None:
                self._forget([_text(name)])
            elif kind in ("compound_statement", "c_style_for_statement") and "((" in [c.type for c in node.children]:
                self._forget(_ASSIGNED.findall(_text(node)))
            for child in node.named_children:
                self._run(child, is_certain and kind not in _BRANCHES, depth + 1)

    def _chosen(self, node: Node) -> list[Node] | None:
        """Return the statements of the branch that is taken, or ``None`` if that is not known."""
        if node.type == "case_statement":
            subject = node.child_by_field_name("value")
            word = None if subject is None else self._joined(subject)
            if word is None or not word.is_known:
                return None
            for item in (child for child in node.named_children if child.type == "case_item"):
                patterns = item.children_by_field_name("value")
                if any(fnmatchcase(word.text, self._joined(pattern).text) for pattern in patterns):
                    return [child for child in item.named_children if child not in patterns]
            return []
        branches = [child for child in node.named_children if child.type in ("elif_clause", "else_clause")]
        for branch in (node, *branches):
            inner = [child for child in branch.named_children if child not in branches]
            if branch.type == "else_clause":
                return inner
            holds = self._holds(inner[0]) if inner else None
            if holds is None:
                return None
            if holds:
                return inner[1:]
        return []

    def _holds(self, node: Node) -> bool | None:
        """Return whether a condition holds, or ``None`` if it looks at files, runs a command or is not known."""
        inner = node.named_children
        if node.type == "list" and len(inner) == 2:
            both = self._holds(inner[0]), self._holds(inner[1])
            is_and = node.children[1].type == "&&"
            if (not is_and) in both:  # one of them decides
                return not is_and
            return None if None in both else is_and
        if node.type == "test_command" and len(inner) == 1:
            return self._holds(inner[0])
        if node.type == "unary_expression" and _text(node.children[0]) in ("-z", "-n"):
            word = self._joined(node.children[-1])
            return (word.text == "") == (_text(node.children[0]) == "-z") if word.is_known else None
        if node.type != "binary_expression" or len(node.children) != 3:
            return None
        left, right = self._joined(node.children[0]), self._joined(node.children[2])
        test = _TESTS.get(_text(node.children[1]))
        try:
            return test(left.text, right.text) if test is not None and left.is_known and right.is_known else None
        except ValueError:  # no numbers
            return None

    def _forget(self, names: Iterable[str]) -> None:
        for name in names:
            self._script.uncertain.add(name)
            self._script.variables.pop(name, None)

    def _assign(self, node: Node, is_certain: bool) -> None:
        target, value = node.child_by_field_name("name"), node.child_by_field_name("value")
        if target is None or target.type != "variable_name":
            return
        name, line = _text(target), node.start_point[0] + 1
        appends = any(child.type == "+=" for child in node.children)
        before = self._script.variables.get(name, []) if appends else []
        is_array = value is not None and value.type == "array"
        if value is None:
            words = [Word("", line)]
        elif is_array:
            words = [word for child in value.named_children if child.type != "comment" for word in self._expand(child)]
        else:
            joined = self._joined(value)
            words = [Word(joined.text, line, joined.is_known)]
        if not is_certain:
            self._script.uncertain.add(name)
            words = [Word(f"${{{name}[@]}}" if is_array or appends else f"${name}", line, is_known=False)]
        elif before and not is_array:  # a text is lengthened, and of an array its first element
            first = before[0]
            whole = Word(first.text + words[0].text, first.line, first.is_known and words[0].is_known, first.is_quoted)
            words = [whole, *before[1:]]
            before = []
        self._script.variables[name] = [*before, *words]

    def _call(self, words: list[Word], assignments: list[Node], is_certain: bool, depth: int) -> None:
        """Run the body of a function with its arguments, and with the variables of this call."""
        name, variables, uncertain = words[0].text, self._script.variables, self._script.uncertain
        names = {*_ARGUMENTS, *(_text(part) for node in assignments if (part := node.child_by_field_name("name")))}
        before = {each: variables.pop(each) for each in names & variables.keys()}
        was_uncertain = uncertain & names
        uncertain -= names
        variables |= {position: [word] for position, word in zip(_POSITIONS, words[1:], strict=False)}
        variables |= dict.fromkeys(("@", "*"), words[1:])
        for node in assignments:
            self._assign(node, is_certain)
        self._called.add(name)
        self._active.add(name)
        self._run(self._functions[name], is_certain, depth + 1)
        self._active.discard(name)
        for each in names:
            variables.pop(each, None)
        uncertain -= names
        variables |= before
        uncertain |= was_uncertain

    def _command(self, node: Node, is_certain: bool, depth: int) -> None:
        words: list[Word] = []
        assignments: list[Node] = []
        for child in node.children:
            if child.type == "command_name":
                words += self._expand(child.children[0])
            elif child.type == "variable_assignment":
                if words:  # after the command's name it is an argument
                    words.append(self._joined_parts(child, child.children))
                else:
                    assignments.append(child)
            elif child.is_named and not child.type.endswith("redirect"):
                words += self._expand(child)
        self._words += len(words)
        if self._words > MOST_WORDS:
            raise ValueError(f"has more than {MOST_WORDS} words; give the launch script alone")
        if words and words[0].text in ("let", "read"):
            self._forget(match[0] for word in words[1:] if (match := re.match(r"[A-Za-z_]\w*", word.text)))
        if len(words) > 1 and words[0].text in ("source", "."):
            text = self._source(words[1].text)
            if text is not None:
                self.read(text, is_sourced=True)
        if words and words[0].text == "shift":
            self._forget(_ARGUMENTS)
        if words and words[0].text in self._functions.keys() - self._active:
            self._call(words, assignments, is_certain, depth)
        elif words:
            self._script.commands.append(words)

    # Words -----------------------------------------------------------------------------------------------------------

    def _expand(self, node: Node) -> list[Word]:
        """Return the words that a node becomes: a variable outside quotes is split at blanks, as a shell does."""
        if node.type in ("simple_expansion", "expansion"):
            values = self._values(node)
            return [part for value in values for part in _split(value)]
        if node.type == "string":
            inner = [child for child in node.children if child.type != '"']
            if len(inner) == 1 and re.search(r"\[@\]\}$|^\$(@|\{@\})$", _text(inner[0])):
                return [Word(value.text, value.line, value.is_known, True) for value in self._values(inner[0])]
        return [self._joined(node)]

    def _joined(self, node: Node) -> Word:
        """Return a node as one word."""
        kind, line = node.type, node.start_point[0] + 1
        if kind in ("concatenation", "string", "command_name", "array", "translated_string"):
            return self._joined_parts(node, node.children)
        if kind in ("simple_expansion", "expansion"):
            values = self._values(node)
            known = all(value.is_known for value in values)
            quoted = any(value.is_quoted for value in values)
            return Word(" ".join(value.text for value in values), line, known, quoted)
        if kind == "arithmetic_expansion":
            number = self._arithmetic(_text(node))
            return Word(_text(node) if number is None else str(number), line, number is not None)
        if kind in ("command_substitution", "process_substitution"):
            return Word(_text(node), line, is_known=False)
        if kind == "raw_string":
            return Word(_text(node)[1:-1], line, is_quoted=True)
        if kind == "ansi_c_string":
            return Word(_text(node)[2:-1].encode().decode("unicode_escape", "replace"), line, is_quoted=True)
        if kind == "string_content":
            return Word(re.sub(r"\\(\n|[\"\\$`])", lambda m: m[1].strip("\n"), _text(node)), line)
        text = _text(node)
        return Word(re.sub(r"\\(.|\n)", lambda match: match[1].strip("\n"), text), line, is_quoted="\\" in text)

    def _joined_parts(self, node: Node, children: list[Node]) -> Word:
        parts, at = [], node.start_byte
        is_known, is_quoted = True, node.type == "string"
        self._depth += 1
        if self._depth > MOST_DEPTH:
            raise ValueError("has quotes that are nested too deep; give the launch script alone")
        for child in children:
            if node.type == "string" and child.start_byte > at:  # blanks between expansions have no node
                parts.append(_between(node, at, child.start_byte))
            at = child.end_byte
            if child.type in ('"', '$"'):
                continue
            part = self._joined(child)
            parts.append(part.text)
            is_known &= part.is_known
            is_quoted |= part.is_quoted
        self._depth -= 1
        return Word("".join(parts), node.start_point[0] + 1, is_known, is_quoted)

    def _values(self, node: Node) -> list[Word]:
        """Return what ``$NAME``, ``${NAME}`` or ``${NAME:-default}`` stands for."""
        written, line = _text(node), node.start_point[0] + 1
        unknown = [Word(written, line, is_known=False)]
        match = re.fullmatch(
            r"\$(?:([@*]|\w+)|\{([@*]|\w+)(\[[@*]\])?(?:(:?[-=+?]|##?|%%?)(.*))?\})", written, re.DOTALL
        )
        if match is None:
            return unknown
        name, sign = match[1] or match[2], match[4] or ""
        values = self._script.variables.get(name)
        if values is None and name in self._environment and name not in self._script.uncertain:
            values = [Word(self._environment[name], line)]
        is_empty = values is None or (sign.startswith(":") and not "".join(value.text for value in values))
        rest = [child for child in node.named_children if child.type not in ("variable_name", "subscript")]
        if sign in ("-", ":-", "=", ":="):
            if is_empty and name in self._script.uncertain:
                return unknown
            if not is_empty:
                return values or []
            default = [self._joined(rest[-1])] if rest and match[5] else unknown
            if "=" in sign:
                self._script.variables[name] = default
            return default
        if values is None or name in self._script.uncertain and not all(value.is_known for value in values):
            return values or unknown
        if sign in ("+", ":+"):
            return [] if is_empty or not rest else [self._joined(rest[-1])]
        if sign[:1] in ("#", "%"):
            known = len(values) == 1 and values[0].is_known and "$" not in match[5]
            return [Word(_without(values[0].text, sign, match[5]), line)] if known else unknown
        return [Word(value.text, line, value.is_known, value.is_quoted) for value in values] if not sign else unknown

    def _arithmetic(self, text: str) -> int | None:
        def value(name: str) -> str | None:
            words = self._script.variables.get(name)
            if words is None:
                return self._environment.get(name)
            return words[0].text if len(words) == 1 and words[0].is_known else None

        return arithmetic(text, value)


def arithmetic(text: str, value: Callable[[str], str | None]) -> int | None:
    """Return the value of ``$((…))``, or ``None`` if it is not known.

    Args:
        text: The arithmetic, with its brackets.
        value: Returns the text that a variable stands for, or ``None``.

    >>> arithmetic("$((N * 1024 + ${X:-2}))", {"N": "4"}.get)
    4098
    """

    def filled(match: re.Match[str]) -> str:
        number = value(match[1] or match[3] or match[4])
        return f"({number or match[2] or '?'})"

    if "#" in text:  # a number of another base
        return None
    inner = re.sub(r"\$\{(\w+)(?::?-(\w+))?\}|\$(\w+)|\b([A-Za-z_]\w*)\b", filled, text[3:-2])
    try:
        return _integer(ast.parse(inner.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _up_to_64(exponent: int) -> int:
    """Return the exponent. Raises ``ValueError`` if its power is no integer, or too large to compute."""
    if not 0 <= exponent <= 64:
        raise ValueError
    return exponent


def _integer(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATIONS:
        return int(_OPERATIONS[type(node.op)](_integer(node.operand)))
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return int(_OPERATIONS[type(node.op)](_integer(node.left), _integer(node.right)))
    raise ValueError


_COMMAND = r"\$\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)"  # a command substitution, with up to two others within it


def _split(word: Word) -> list[Word]:
    """Split a value at blanks. An unknown part in one of its words leaves the others known."""
    if word.is_quoted:
        return [word]
    parts = re.findall(rf"(?:\$\{{[^}}]*\}}|{_COMMAND}|`[^`]*`|\S)+", word.text)
    if not parts and not word.is_known:
        return [word]
    return [Word(part, word.line, word.is_known or not ("$" in part or "`" in part)) for part in parts]


def _without(text: str, sign: str, pattern: str) -> str:
    """Remove the shortest or longest prefix or suffix that matches, as ``#``, ``##``, ``%`` and ``%%`` do."""
    positions = range(len(text) + 1)
    if sign[0] == "#":
        fitting = [text[place:] for place in positions if fnmatchcase(text[:place], pattern)]
        return text if not fitting else fitting[0 if len(sign) == 1 else -1]
    fitting = [text[:place] for place in positions if fnmatchcase(text[place:], pattern)]
    return text if not fitting else fitting[-1 if len(sign) == 1 else 0]


def _text(node: Node) -> str:
    return (node.text or b"").decode("utf-8", "replace")


def _between(node: Node, start: int, end: int) -> str:
    return (node.text or b"")[start - node.start_byte : end - node.start_byte].decode("utf-8", "replace")


def _fault_line(root: Node) -> int:
    nodes = [root]
    while nodes:
        node = nodes.pop()
        if node.is_error or node.is_missing:
            begins = node.parent if node.is_missing and node.parent is not None else node
            return begins.start_point[0] + 1
        nodes += reversed([child for child in node.children if child.has_error or child.is_missing])
    return root.start_point[0] + 1
