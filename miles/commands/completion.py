"""Print the completion of commands, flags and their choices for a shell: bash or zsh.

Put eval "$(miles completion bash)" into ~/.bashrc, or eval "$(miles completion zsh)" into ~/.zshrc.
"""

import argparse
import importlib
import io
import re
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout

from miles import commands
from miles.base.flags import FILE_KINDS
from miles.config.command_parser import CommandParser
from miles.config.parser import build_parser

FOLDERS = {FILE_KINDS[kind] for kind in ("model", "folder", "new folder")}
SHELLS = ("bash", "zsh")
OF_TRAIN = ("train", "explain", "rehearse", "quickstart")  # commands that take the flags of training
ZSH = "autoload -Uz compinit bashcompinit && compinit && bashcompinit\n"
SCRIPT = """\
_miles_folders() {{
    compopt -o filenames 2>/dev/null
    COMPREPLY=($(compgen -d -- "$current"))
}}
_miles() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" previous="${{COMP_WORDS[COMP_CWORD-1]}}" words=""
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W "{commands}" -- "$current"))
        return
    fi
    case "${{COMP_WORDS[1]}} $previous" in
{choices}
    esac
    if [ -z "$words" ] && [ "${{current#-}}" != "$current" ]; then
        case "${{COMP_WORDS[1]}}" in
{flags}
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _miles miles
"""


def main(argv: Sequence[str]) -> int:
    """Print the script for a shell and return 0.

    Raises:
        SystemExit: With status 2 for another shell.
    """
    parser = CommandParser(
        prog="miles completion", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shell", choices=SHELLS)
    shell = parser.parse_args(argv).shell
    print((ZSH if shell == "zsh" else "") + script(), end="")
    return 0


def script() -> str:
    """Return the script; zsh runs it by its ``bashcompinit``."""
    names = commands.command_names()
    flags = (f'            {name}) words="{" ".join(_flags(name))}" ;;' for name in names)
    return SCRIPT.format(commands=" ".join(names), choices="\n".join(_choices()), flags="\n".join(flags))


def _choices() -> Iterator[str]:
    """Yield a case for each flag of training that is limited to some values, or names a folder."""
    for action in build_parser()._actions:
        patterns = "|".join(f'"{name} {flag}"' for name in OF_TRAIN for flag in action.option_strings)
        if action.choices and patterns:
            yield f'        {patterns}) words="{" ".join(map(str, action.choices))}" ;;'
        elif action.metavar in FOLDERS and patterns:
            yield f"        {patterns}) _miles_folders; return ;;"


def _flags(name: str) -> list[str]:
    """Return the flags of a command: the training flags, and the flags that its ``--help`` names."""
    flags = {"--help"}
    if name in OF_TRAIN:
        flags |= {flag for flag in build_parser()._option_string_actions if flag.startswith("--")}
    if name not in ("train", "explain", "rehearse", "completion"):
        module = importlib.import_module(f"{commands.__name__}.{name.replace('-', '_')}")
        output = io.StringIO()
        try:
            with redirect_stdout(output):
                module.main(["--help"])
        except SystemExit:  # argparse ends after its help
            pass
        flags |= set(re.findall(r"^  (?:-\w, )?(--[\w-]+)", output.getvalue(), re.MULTILINE))
    return sorted(flags)
