"""Tasks of the package verifiers as prompts: ``verifiers:TASKSET[:key=value,…]``."""

from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from itertools import islice
from typing import Any, TypedDict

from miles.base.text import InputError, one_line
from miles.tasks.environments.base import read_options

SCHEME = "verifiers:"
METADATA = "verifiers"  # the key of a row's metadata that holds its ``Origin``


class Origin(TypedDict):
    """The source of a task: the library's configuration, how many tasks are read, and the task's index in them."""

    config: Mapping[str, Any]
    size: int | None
    index: int


def read_tasks(source: str) -> Iterator[tuple[Any, Origin]]:
    """Yield the prompt of every task, text or messages, and its source.

    ``size`` is how many tasks are read; a key such as ``taskset.split`` or ``agent.harness.id`` is a field of the
    library's configuration of an environment, and one without a dot is a field of the task set.

    Raises:
        InputError: The library is not installed, or refuses the settings.
    """
    where = f"prompt source {one_line(source, 200)}"
    if find_spec("verifiers") is None:
        raise InputError(
            f"{where}: the package verifiers is not installed; install it with pip install verifiers==0.4.0"
        )
    name, _, settings = source.removeprefix(SCHEME).partition(":")
    options = read_options(settings, where)
    size = options.pop("size", None)
    if size is not None and (not isinstance(size, int) or size < 1):
        raise InputError(f"{where}: size={size} must be a whole number from 1 on")
    config: dict[str, Any] = {"taskset": {"id": name}}
    for key, value in options.items():
        *path, last = key.split(".") if "." in key else ("taskset", key)
        inner = config
        for part in path:
            inner = inner.setdefault(part, {})
        inner[last] = value
    try:
        _, tasks = open_environment(config, size)
    except InputError as error:
        raise InputError(f"{where}: {error}") from error
    except Exception as error:  # the library's, pydantic's, and the task set's own errors
        fault = f"{type(error).__name__}: {one_line(str(error), 400)}"
        raise InputError(f"{where}: verifiers refuses it ({fault}); check its name and settings") from error
    for index, task in enumerate(tasks):
        prompt = task.data.prompt
        if prompt is not None and not isinstance(prompt, str):
            prompt = [message.model_dump(mode="json", exclude_none=True) for message in prompt]
        # A task whose conversation the environment opens has no separate prompt.
        yield prompt or task.data.name or f"task {index}", {"config": config, "size": size, "index": index}


def open_environment(config: Mapping[str, Any], size: int | None) -> tuple[Any, list[Any]]:
    """Return the library's environment and its first ``size`` tasks.

    A role whose runtime is not named runs in a process on this machine; the library's own default is a remote sandbox.

    Raises:
        InputError: The task set has no end, or the harness that it implies runs commands of the model here.
        Exception: Whatever the library and the task set raise.
    """
    import verifiers.v1 as vf

    local = {
        name: {"runtime": {"type": "subprocess"}} for name in vf.resolve_env_config(dict(config)).agent_harnesses()
    }
    roles = {name: {**defaults, **config.get(name, {})} for name, defaults in local.items()}
    environment = vf.load_environment(vf.resolve_env_config({**config, **roles}))
    if size is None and not environment.taskset.bounded:
        raise InputError("the task set has no end; give size=N")
    for name, agent in environment.config.agent_harnesses().items():
        runtime = getattr(environment.config, name).runtime
        named = "harness" in config.get(name, {})
        if not named and vf.load_harness(agent).EXECUTES_CODE and isinstance(runtime, vf.SubprocessConfig):
            raise InputError(
                f"the harness {agent.id} of {name} would run commands of the model on this machine; give "
                f"{name}.harness.id=null for a conversation, {name}.runtime.type=docker, or name {agent.id} to allow it"
            )
    return environment, list(islice(environment.taskset, size))
