"""Name the user's functions that flags name, and check that each has the form of an import path, and a source."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import miles
from miles.base.flags import LONGEST_VALUE, Errors, flag_name
from miles.base.text import one_line
from miles.base.user_code import PICKLED, missing_name, module_files
from miles.config.settings import Settings
from miles.tasks.environments.chosen import FLAG as ENVIRONMENT
from miles.tasks.environments.chosen import read_choice


@dataclass(frozen=True)
class Hook:
    """Describe the function that a flag names.

    Attributes:
        section: The section of the flag, a field of ``Settings``.
        signature: The function to write.
    """

    section: str
    signature: str


HOOKS = {
    "custom_rm_path": Hook("reward", "async def reward(samples: Sequence[Sample]) -> list[float] (miles.types.sample)"),
    "rollout_function_path": Hook(
        "rollout",
        "async def rollout(iteration: int, tools: RolloutTools) -> list[PromptGroup] (miles.rollout.hooks)",
    ),
    "custom_generate_function_path": Hook(
        "rollout", "async def generate(trajectory: Trajectory) -> None (miles.rollout.trajectory)"
    ),
    "dynamic_sampling_filter_path": Hook(
        "rollout", "def keep(group: PromptGroup) -> FilterDecision | bool (miles.rollout.filters)"
    ),
    "buffer_filter_path": Hook(
        "rollout",
        "def pick(args, rollout_id: int, buffer: list[list[Sample]], num_samples: int) -> list[list[Sample]] "
        "(miles.rollout.hooks)",
    ),
    "rollout_sample_filter_path": Hook(
        "rollout", "def mark(args, groups: list[list[Sample]]) -> None: sets sample.remove_sample (miles.types.sample)"
    ),
    "rollout_all_samples_process_path": Hook(
        "rollout", "def look(args, groups: list[list[Sample]], source) -> None (miles.types.sample)"
    ),
    "custom_rollout_log_function_path": Hook(
        "rollout",
        "def log(iteration: int, args, samples: list[Sample], metrics: dict[str, float], seconds: float) -> bool",
    ),
    "custom_convert_samples_to_train_data_path": Hook(
        "rollout", "def convert(args, samples: list[Sample]) -> dict[str, list] (miles.rollout.hooks)"
    ),
    "custom_reward_post_process_path": Hook(
        "reward", "def advantages(args, samples: list[Sample]) -> tuple[list[float], list[float]] (miles.types.sample)"
    ),
    "eval_function_path": Hook(
        "evaluation",
        "async def evaluate(args, tools: EvaluationTools) -> dict[str, float] (miles.rollout.hooks)",
    ),
    "custom_eval_rollout_log_function_path": Hook(
        "evaluation", "def log(version: int, args, data: dict[str, dict], metrics: dict[str, float]) -> bool"
    ),
    "curriculum_path": Hook(
        "data",
        "def choose(curriculum: Curriculum) -> dict[str, float] | list[tuple[str, int]] | None "
        "(miles.tasks.data.curriculum)",
    ),
    "data_source_path": Hook(
        "data", "class Source: __init__(args), draw(n), state() and restore(state) (miles.tasks.data.custom_source)"
    ),
    "custom_tis_function_path": Hook(
        "loss", "def weights(inputs: ImportanceInputs) -> torch.Tensor (miles.objective.hooks)"
    ),
    "custom_loss_function_path": Hook(
        "loss",
        "def loss(inputs: LossInputs) -> tuple[torch.Tensor, dict] (miles.objective.hooks), or def loss(args, batch, "
        "logits, sum_of_sample_mean)",
    ),
    "rollout_data_postprocess_path": Hook(
        "loss", "def change(args, rollout_id: int, rollout_data: dict[str, list]) -> None (docs/objective-hooks.md)"
    ),
    "custom_pg_loss_reducer_function_path": Hook("loss", "def reducer(inputs: ReducerInputs) (miles.objective.hooks)"),
    "custom_advantage_function_path": Hook(
        "loss", "def advantages(samples: AdvantageSamples) -> list[float] (miles.objective.hooks)"
    ),
    "custom_policy_loss_function_path": Hook(
        "loss", "def token_losses(inputs: PolicyLossInputs) -> torch.Tensor (miles.objective.hooks)"
    ),
}


def names_functions(settings: Settings) -> bool:
    """Return whether the command names a function of the user's."""
    return any(getattr(getattr(settings, hook.section), field) is not None for field, hook in HOOKS.items())


def check_function_paths(settings: Settings, errors: Errors) -> None:
    """Check that each flag that names a function has the form of an import path, and a source that has the function.

    Its module is imported later.
    """
    for field, flag, path, kind in _named_functions(settings):
        if not errors.none_about(field):
            continue
        module, _, name = path.partition(":") if ":" in path else path.rpartition(".")
        if module.endswith(PICKLED) and name:
            continue
        fault = _fault_of_form(path, module, name, kind) or missing_name(module, name, kind)
        if fault is not None:
            errors.add(f"{flag} {one_line(path, LONGEST_VALUE)}: {fault}")


def _named_functions(settings: Settings) -> Iterator[tuple[str, str, str, str]]:
    """Yield each field that has an import path, the flag as a message shows it, the path, and what it names."""
    for field, hook in HOOKS.items():
        path = getattr(getattr(settings, hook.section), field)
        if path is not None:
            yield field, flag_name(field), path, "class" if hook.signature.startswith("class") else "function"
    environment = settings.rollout.environment
    if environment is None:
        return
    try:
        choice = read_choice(environment)
    except ValueError:  # ``check_agents`` reports it
        return
    if choice is None:
        yield "environment", ENVIRONMENT, environment, "class"
        return
    kind, options = choice
    for option, named in kind.imports.items():
        if options[option]:
            yield "environment", f"{ENVIRONMENT} {kind.name}:{option}", str(options[option]), named


def _fault_of_form(path: str, module: str, name: str, kind: str) -> str | None:
    """Return what is wrong with an import path by itself, and what to do."""
    of_file = re.fullmatch(r"(?:\./)?([\w/]+)\.py(?:[:.](\w+))?", path)
    if of_file is not None and not (of_file[2] and has_source(path)):  # else a module whose name is py
        meant = f"{of_file[1].strip('/').replace('/', '.')}:{of_file[2] or 'NAME'}"
        return (
            f"names a file, and a {kind} is imported from a module; write {meant}, and start the run in the folder "
            "from which that is importable"
        )
    if all(part.isidentifier() for part in (*module.split("."), name)):
        return None
    return f"names no {kind} of a module; write module:{kind} or module.{kind}"


def signatures() -> Iterator[tuple[str, str]]:
    """Yield each flag that names a function, and the function's signature."""
    for field, hook in HOOKS.items():
        yield flag_name(field), hook.signature


def has_source(path: str) -> bool:
    """Return whether the module of ``path`` is a file of this package or of the folder in which the run starts."""
    module = path.partition(":")[0] if ":" in path else path.rpartition(".")[0]
    return any(module_files(module, [Path.cwd(), Path(miles.__file__).parent.parent]))
