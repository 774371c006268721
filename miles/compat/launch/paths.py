"""Find functions that a command names inside the packages of related launchers."""

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

ZERO_REWARD = "miles.tasks.rewards.built_in.zero:zero"

# Functions elsewhere, without the name of the package -> ours; None is what the run does without the flag.
KNOWN = {
    ("dynamic_sampling_filter_path", "rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"): (
        "miles.rollout.filters:check_reward_nonzero_std"
    ),
    ("buffer_filter_path", "rollout.data_source.pop_first"): None,
    ("rollout_function_path", "rollout.sglang_rollout.generate_rollout"): None,
    ("rollout_function_path", "rollout.inference_rollout.inference_rollout_common.InferenceRolloutFn"): None,
    ("custom_generate_function_path", "rollout.sglang_rollout.generate"): None,
    ("custom_generate_function_path", "rollout.generate_hub.single_turn.generate"): None,
    ("custom_rm_path", "rollout.on_policy_distillation.reward_func"): ZERO_REWARD,
    ("custom_reward_post_process_path", "rollout.on_policy_distillation.post_process_rewards"): None,
    ("custom_rm_path", "on_policy_distillation.on_policy_distillation.reward_func"): ZERO_REWARD,
    ("custom_reward_post_process_path", "on_policy_distillation.on_policy_distillation.post_process_rewards"): None,
    ("eval_function_path", "rollout.sglang_rollout.generate_rollout"): None,
    ("eval_function_path", "rollout.inference_rollout.inference_rollout_common.InferenceRolloutFn"): None,
    ("data_source_path", "rollout.data_source.RolloutDataSource"): None,
    ("data_source_path", "rollout.data_source.RolloutDataSourceWithBuffer"): None,
}
# Functions elsewhere that a run on conversations (--loss-type sft_loss) does not need.
FOR_CONVERSATIONS = {("rollout_function_path", "rollout.sft_rollout.generate_rollout")}
# Generate ahead of the trainer without end, as --fully-async does.
FULLY_ASYNC = ("fully_async_rollout.generate_rollout_fully_async", "fully_async_rollout.FullyAsyncRolloutFn")
# Dr.GRPO's reducer, which divides the sum of a trajectory by a constant in its file.
_CONSTANT_REDUCER = re.compile(r"examples\.(experimental\.)?DrGRPO\.custom_reducer([.:]\w+)?")
CONSTANT_OF_REDUCER = 1000.0
_MISMATCH_FLAGS = (
    "give its settings as flags or in --custom-config-path, or use --use-tis with --tis-level and --tis-mode, and "
    "--use-rs with --rs-level, its bounds and --rs-veto-threshold"
)
# Functions elsewhere whose work is done by flags here.
FLAGS_INSTEAD = {
    ("rollout_function_path", "rollout.sft_rollout.generate_rollout"): (
        "use --loss-type sft_loss, which trains on the conversations of --prompt-data"
    ),
    ("custom_generate_function_path", "rollout.generate_hub.agentic_tool_call.generate"): (
        "use --agent-command, a program that calls the model at an OpenAI-compatible address, or --environment "
        "(docs/agents.md)"
    ),
    ("custom_tis_function_path", "compute_mis_weights_with_cp"): _MISMATCH_FLAGS,
    ("custom_tis_function_path", "compute_mis_weights_fsdp"): _MISMATCH_FLAGS,
    ("custom_tis_function_path", "compute_mis_weights"): _MISMATCH_FLAGS,
}
_PACKAGES = ("miles", "slime", "miles_plugins", "slime_plugins", "examples")


def our_function(field: str, path: str, reads_conversations: bool = False) -> tuple[bool, str | None]:
    """Return whether ``path`` names a function whose counterpart is here, and that one; None is the default.

    ``reads_conversations`` says whether the run trains on conversations, which other launchers collect by a function.
    """
    tail = _tail(path)
    if reads_conversations and (field, tail) in FOR_CONVERSATIONS and not _exists(path):
        return True, None
    if (field, tail) in KNOWN and not _exists(path):
        return True, KNOWN[field, tail]
    return False, None


def names_function_of_others(field: str, path: str, tail: str) -> bool:
    """Return whether ``path`` names the function ``tail`` of a package of other launchers, and no file here has it."""
    return field in HOOKS and _tail(path) == tail and path.replace(":", ".") != tail and not _exists(path)


def is_missing(path: str) -> bool:
    """Return whether ``path`` is in a package of a related launcher, and not here."""
    return path.replace(":", ".").partition(".")[0] in _PACKAGES and not _exists(path)


def is_fully_async(field: str, path: str) -> bool:
    """Return whether ``path`` names the function elsewhere that ``--fully-async --async-steps 1`` replaces."""
    dotted = path.replace(":", ".")
    is_theirs = any(dotted == name or dotted.endswith("." + name) for name in FULLY_ASYNC)
    return field == "rollout_function_path" and is_theirs and not _exists(path)


def is_constant_reducer(field: str, path: str) -> bool:
    """Return whether ``path`` names the reducer elsewhere that is ``--loss-aggregation constant``."""
    is_theirs = _CONSTANT_REDUCER.fullmatch(path) is not None
    return field == "custom_pg_loss_reducer_function_path" and is_theirs and not _exists(path)


def names_functions(settings: Settings) -> bool:
    """Return whether the command names a function of the user's."""
    return any(getattr(getattr(settings, hook.section), field) is not None for field, hook in HOOKS.items())


def missing_function(field: str, path: str) -> str | None:
    """Return the error of a path into a package of a related launcher whose function is not here."""
    package = path.split(".")[0].split(":")[0]
    if package not in _PACKAGES and _instead(field, path) is None:
        return None
    if _exists(path):
        return None
    instead = _instead(field, path)
    what_to_do = instead or f"write {HOOKS[field].signature}, and name it as module:function"
    return f"{flag_name(field)} {path}: this function is part of another launcher, and is not here; {what_to_do}"


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
    if of_file is not None and not (of_file[2] and _exists(path)):  # else a module whose name is py
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


def _tail(path: str) -> str:
    """Return a path without the name of its package, with dots only: ``slime.rollout.x:f`` is ``rollout.x.f``."""
    dotted = path.replace(":", ".")
    package, _, rest = dotted.partition(".")
    return rest if package in _PACKAGES else dotted


def _instead(field: str, path: str) -> str | None:
    dotted = path.replace(":", ".")
    for (name, tail), what_to_do in FLAGS_INSTEAD.items():
        if name == field and (dotted == tail or dotted.endswith("." + tail)):
            return what_to_do
    return None


def _exists(path: str) -> bool:
    """Return whether the module of ``path`` is a file of this package or of the folder in which the run starts."""
    module = path.partition(":")[0] if ":" in path else path.rpartition(".")[0]
    return any(module_files(module, [Path.cwd(), Path(miles.__file__).parent.parent]))
