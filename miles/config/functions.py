"""Name the user's functions that flags name, and check that each has the form of an import path, and a source."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import miles
from miles.base.flags import LONGEST_VALUE, Errors, flag_name
from miles.base.text import one_line
from miles.base.user_code import PICKLED, missing_name, module_files
from miles.config.settings import Settings, section_of
from miles.tasks.environments.chosen import FLAG as ENVIRONMENT
from miles.tasks.environments.chosen import read_choice


@dataclass(frozen=True)
class Hook:
    """Describe the function that a flag names.

    Attributes:
        signature: The function to write.
        runs: Where it runs, and when.
        changes: The data that it may change.
        arguments: With how many arguments it is called, if a start imports it and checks that (inputs.py).
    """

    signature: str
    runs: str
    changes: str
    arguments: int | None = None


HOOKS = {
    "custom_rm_path": Hook(
        "async def reward(samples: Sequence[Sample]) -> list[float] (miles.types.sample)",
        "processes of its own, once per group of answers",
        "the rewards of the answers",
    ),
    "rollout_function_path": Hook(
        "async def rollout(iteration: int, tools: RolloutTools) -> list[PromptGroup] (miles.rollout.hooks)",
        "the rollout process, once per iteration",
        "the groups that an iteration trains on",
        2,
    ),
    "custom_generate_function_path": Hook(
        "async def generate(trajectory: Trajectory) -> None (miles.rollout.trajectory)",
        "the rollout process, once per trajectory",
        "the trajectory",
        1,
    ),
    "dynamic_sampling_filter_path": Hook(
        "def keep(group: PromptGroup) -> FilterDecision | bool (miles.rollout.filters)",
        "the rollout process, once per scored group",
        "whether the group is trained on",
        1,
    ),
    "buffer_filter_path": Hook(
        "def pick(args, rollout_id: int, buffer: list[list[Sample]], num_samples: int) -> list[list[Sample]] "
        "(miles.rollout.hooks)",
        "the rollout process, when an iteration takes groups that wait",
        "which of them it takes",
        4,
    ),
    "rollout_sample_filter_path": Hook(
        "def mark(args, groups: list[list[Sample]]) -> None: sets sample.remove_sample (miles.types.sample)",
        "the rollout process, once per iteration",
        "which samples are trained on",
        2,
    ),
    "rollout_all_samples_process_path": Hook(
        "def look(args, groups: list[list[Sample]], source) -> None (miles.types.sample)",
        "the rollout process, once per iteration",
        "nothing of the run",
        3,
    ),
    "custom_rollout_log_function_path": Hook(
        "def log(iteration: int, args, samples: list[Sample], metrics: dict[str, float], seconds: float) -> bool",
        "the rollout process, once per iteration",
        "the metrics of the iteration",
        5,
    ),
    "custom_convert_samples_to_train_data_path": Hook(
        "def convert(args, samples: list[Sample]) -> dict[str, list] (miles.rollout.hooks)",
        "the rollout process, once per iteration",
        "all that is trained on",
        2,
    ),
    "custom_reward_post_process_path": Hook(
        "def advantages(args, samples: list[Sample]) -> tuple[list[float], list[float]] (miles.types.sample)",
        "the rollout process, once per iteration",
        "rewards, and advantages of samples",
        2,
    ),
    "eval_function_path": Hook(
        "async def evaluate(args, tools: EvaluationTools) -> dict[str, float] (miles.rollout.hooks)",
        "the rollout process, once per evaluation",
        "the metrics of the evaluation",
        2,
    ),
    "custom_eval_rollout_log_function_path": Hook(
        "def log(version: int, args, data: dict[str, dict], metrics: dict[str, float]) -> bool",
        "the rollout process, once per evaluation",
        "the metrics of the evaluation",
        4,
    ),
    "curriculum_path": Hook(
        "def choose(curriculum: Curriculum) -> dict[str, float] | list[tuple[str, int]] | None "
        "(miles.tasks.data.stream)",
        "the rollout process, before each iteration",
        "which prompts are drawn",
        1,
    ),
    "data_source_path": Hook(
        "class Source: __init__(args), draw(n), state() and restore(state) (miles.tasks.data.custom_source)",
        "the rollout process, whenever prompts are drawn",
        "the prompts, and their position in checkpoints",
        1,
    ),
    "custom_tis_function_path": Hook(
        "def weights(inputs: ImportanceInputs) -> torch.Tensor (miles.objective.hooks)",
        "each trainer rank, once per micro-batch",
        "the weights of token losses",
    ),
    "custom_loss_function_path": Hook(
        "def loss(inputs: LossInputs) -> tuple[torch.Tensor, dict] (miles.objective.hooks), or "
        "def loss(args, batch, logits, sum_of_sample_mean)",
        "each trainer rank, once per micro-batch",
        "the loss and its metrics",
    ),
    "rollout_data_postprocess_path": Hook(
        "def change(args, rollout_id: int, rollout_data: dict[str, list]) -> None (docs/objective-hooks.md)",
        "each trainer rank, once per iteration",
        "the scored columns of the iteration",
    ),
    "custom_pg_loss_reducer_function_path": Hook(
        "def reducer(inputs: ReducerInputs) (miles.objective.hooks)",
        "each trainer rank, once per micro-batch",
        "the sum of token losses",
    ),
    "custom_advantage_function_path": Hook(
        "def advantages(samples: AdvantageSamples) -> list[float] (miles.objective.hooks)",
        "the rollout process for samples, each trainer rank for trajectories",
        "the advantages",
    ),
    "custom_policy_loss_function_path": Hook(
        "def token_losses(inputs: PolicyLossInputs) -> torch.Tensor (miles.objective.hooks)",
        "each trainer rank, once per micro-batch",
        "the loss of each token",
    ),
}


def names_functions(settings: Settings) -> bool:
    """Return whether the command names a function of the user's."""
    return any(True for _ in given_functions(settings))


def given_functions(settings: Settings) -> Iterator[tuple[str, Hook, str]]:
    """Yield each field that names a function of the user's, the function's description, and its import path."""
    for field, hook in HOOKS.items():
        path = getattr(getattr(settings, section_of()[field]), field)
        if path is not None:
            yield field, hook, path


def explain_functions(settings: Settings) -> Iterator[str]:
    """Yield a line for each function of the user's."""
    for field, hook, path in given_functions(settings):
        yield f"{flag_name(field)} {path}: runs in {hook.runs}; it may change {hook.changes}"


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
    """Yield each field that has an import path, the flag as a message shows it, the path, and its kind."""
    for field, hook, path in given_functions(settings):
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
    """Return the fault of an import path on its own, and what to do."""
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


def has_source(path: str) -> bool:
    """Return whether the module of ``path`` is a file of this package or of the folder where the run starts."""
    module = path.partition(":")[0] if ":" in path else path.rpartition(".")[0]
    return any(module_files(module, [Path.cwd(), Path(miles.__file__).parent.parent]))
