"""``--environment tool_calls:call=module.function[,specs=module.NAME]``: tools that one function of yours runs."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

from miles.base import strict_json
from miles.base.text import InputError, one_line
from miles.base.user_code import load_function, load_object, ordinary_errors
from miles.tasks.environments.base import EnvironmentKind, EnvironmentMaker, ToolEnvironment, content_of_call
from miles.types.sample import Prompt

_FLAG = "--environment tool_calls"


class ToolCalls(EnvironmentKind):
    """The model's calls go to ``call(name, arguments)``, whose text comes back to it, until it answers without one.

    ``call`` may be ``async``. ``specs`` is a list of tools in the form of OpenAI's API, or a function that returns one;
    without it the tools are the row's (``--tool-key``). It gives no reward: another one scores the last answer. The
    function ``multi_turn.generate`` of launch scripts is read as this.
    """

    name = "tool_calls"
    summary = "tools of a list or of the row, which call=module.function runs"
    options = {"call": "", "specs": ""}
    imports = {"call": "function", "specs": "object"}
    has_reward = False

    def maker(self, options: Mapping[str, Any]) -> EnvironmentMaker:
        """Return the maker of a row's environment."""
        if not options["call"]:
            raise InputError(f"{_FLAG}: needs the function that runs a call; write {self.name}:call=module.function")
        call = load_function(str(options["call"]), f"{_FLAG}:call")
        specs = _specs(str(options["specs"])) if options["specs"] else None
        return partial(ToolCallsTrajectory, call=call, specs=specs)


def _specs(path: str) -> Sequence[Mapping[str, Any]]:
    """Return the list at ``path``, or the list that the function there returns."""
    source = load_object(path, f"{_FLAG}:specs")
    with ordinary_errors(f"{_FLAG}:specs {path}:"):
        specs = source() if callable(source) else source
    if not isinstance(specs, list | tuple) or not specs or not all(isinstance(spec, Mapping) for spec in specs):
        raise InputError(f"{_FLAG}:specs {path}: holds {one_line(repr(specs), 80)}; give a list of tools, as objects")
    return specs


class ToolCallsTrajectory(ToolEnvironment):
    """One trajectory; see ``ToolCalls``."""

    def __init__(self, prompt: Prompt, call: Callable[..., Any], specs: Sequence[Mapping[str, Any]] | None) -> None:
        super().__init__(prompt)
        self._run = call
        self._specs = specs

    def functions(self) -> Sequence[Callable[..., Any]]:
        """Return none: ``call`` runs all tools."""
        return ()

    @cached_property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        """The tools that are shown."""
        tools = self.prompt.tools if self._specs is None else self._specs
        if not tools:
            raise ValueError("the row has no tools; add specs=module.NAME, or fill the column of --tool-key")
        return tools

    async def call(self, name: str, arguments: str) -> str | list[dict[str, Any]]:
        """Return the result or error of the function, as text or parts."""
        known = [str(tool.get("function", tool)["name"]) for tool in self.tools]
        if name not in known:
            return f"error: there is no tool {one_line(name, 80)}; there are {', '.join(known)}"
        try:
            values = strict_json.loads(arguments)
            if not isinstance(values, dict):
                raise strict_json.StrictJsonError("they are no object")
        except strict_json.StrictJsonError as error:
            return f"error: these are not the arguments of {name}: {one_line(str(error), 200)}"
        return await content_of_call(self._run, name, values)

    async def reward(self) -> float:
        """Return 0, which nothing reads: another reward scores the answer."""
        return 0.0
