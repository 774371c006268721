"""Choose the held-out sets, and how they are sampled."""

from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, Optional

from miles.base import strict_json
from miles.base.flags import Errors, flag
from miles.base.text import InputError, one_line
from miles.config.rollout import RolloutArguments, check_temperature, check_top_k
from miles.tasks.data.settings import DataArguments, check_pairs

_of_sets = partial(flag, needs="an evaluation set")


@dataclass(frozen=True)
class EvaluationArguments:
    """evaluation: sets, interval and their sampling parameters."""

    eval_prompt_data: Optional[tuple[str, ...]] = flag(
        None,
        "evaluation sets: NAME SOURCE pairs",
        needs="--eval-interval, no --debug-train-only, no --eval-config",
        nargs="+",
        type=str,
        metavar="NAME SOURCE",
    )
    eval_config: Optional[str] = flag(
        None,
        "YAML or JSON file of evaluation sets, each with its own sampling (instead of --eval-prompt-data)",
        needs="--eval-interval, no --debug-train-only",
        file="file",
    )
    eval_function_path: Optional[str] = flag(
        None,
        "your evaluation, instead of the built-in one (docs/rollout.md), module:function",
        needs="--eval-interval, no --debug-train-only",
    )
    custom_eval_rollout_log_function_path: Optional[str] = flag(
        None,
        "your metrics of each evaluation (docs/rollout.md), module:function",
        needs="an evaluation set, no --eval-function-path",
    )
    eval_interval: Optional[int] = _of_sets(
        None, "iterations between evaluations; also before the first and after the last", at_least=1
    )
    skip_eval_before_train: bool = _of_sets(False, "do not evaluate before the first iteration")
    n_samples_per_eval_prompt: int = _of_sets(
        1, "responses per evaluation prompt; above 1, pass@k is logged too", at_least=1
    )
    eval_temperature: Optional[float] = _of_sets(
        None, "sampling temperature; default: --rollout-temperature", at_least=0
    )
    eval_top_p: Optional[float] = _of_sets(None, "top-p; default: --rollout-top-p", within="(0, 1]")
    eval_top_k: Optional[int] = _of_sets(None, "top-k; default: --rollout-top-k")
    eval_min_p: Optional[float] = _of_sets(None, "min-p; default: --rollout-min-p", within="[0, 1]")
    eval_max_response_len: Optional[int] = _of_sets(
        None, "maximum tokens of a response; default: --rollout-max-response-len", at_least=1
    )
    eval_input_key: Optional[str] = _of_sets(None, "prompt column; default: --input-key")
    eval_label_key: Optional[str] = _of_sets(None, "answer column; default: --label-key")

    @property
    def has_sets(self) -> bool:
        """Whether anything is evaluated."""
        return any(name is not None for name in (self.eval_prompt_data, self.eval_config, self.eval_function_path))


# Settings that a set of --eval-config may have of its own, and the flags that supply them otherwise.
_OF_ROLLOUT = ("temperature", "top_p", "top_k", "min_p", "max_response_len")
_OF_DATA = ("input_key", "label_key")
_FLAGS = {
    "n_samples_per_eval_prompt": "n_samples_per_eval_prompt",
    "temperature": "eval_temperature",
    "top_p": "eval_top_p",
    "top_k": "eval_top_k",
    "min_p": "eval_min_p",
    "max_response_len": "eval_max_response_len",
    "input_key": "eval_input_key",
    "label_key": "eval_label_key",
}
_KINDS: dict[str, type] = {
    **dict.fromkeys(("name", "source", *_OF_DATA), str),
    **dict.fromkeys(("n_samples_per_eval_prompt", "max_response_len", "top_k"), int),
    **dict.fromkeys(("temperature", "top_p", "min_p"), float),
}


def fill_evaluation(
    evaluation: EvaluationArguments, rollout: RolloutArguments, data: DataArguments
) -> EvaluationArguments:
    """Fill in unset flags of evaluation with the flags of training, in a run that evaluates."""
    if not evaluation.has_sets:
        return evaluation
    defaults = {_FLAGS[key]: getattr(rollout, f"rollout_{key}") for key in _OF_ROLLOUT}
    defaults |= {_FLAGS[key]: getattr(data, key) for key in _OF_DATA}
    return replace(evaluation, **{name: value for name, value in defaults.items() if getattr(evaluation, name) is None})


def check_evaluation(evaluation: EvaluationArguments, errors: Errors) -> None:
    """Check the NAME SOURCE pairs and the sampling."""
    if evaluation.eval_prompt_data is not None:
        check_pairs("eval_prompt_data", evaluation.eval_prompt_data, errors)
    check_temperature(evaluation, "eval_temperature", errors)
    check_top_k(evaluation, "eval_top_k", errors)


def eval_entries(evaluation: EvaluationArguments) -> list[dict[str, Any]]:
    """Return the settings of each set of ``--eval-config``, else of ``--eval-prompt-data``.

    The ``--eval-*`` flags supply the settings that a set does not specify.

    Raises:
        InputError: The words of ``--eval-prompt-data`` are not pairs, a name is given twice, or the file has a fault.
            The message names set and key.
    """
    flag = "--eval-prompt-data" if evaluation.eval_config is None else "--eval-config"
    if evaluation.eval_config is not None:
        entries = _read_config(Path(evaluation.eval_config))
    else:
        entries = _read_pairs(evaluation.eval_prompt_data or ())
    names = [entry["name"] for entry in entries]
    for name in names:
        if names.count(name) > 1:
            raise InputError(
                f"{flag}: the set name {name} is given {names.count(name)} times; give each set its own name"
            )
    of_flags = {key: getattr(evaluation, flag) for key, flag in _FLAGS.items()}
    return [of_flags | entry for entry in entries]


def _read_pairs(words: tuple[str, ...]) -> list[dict[str, Any]]:
    if len(words) % 2:
        raise InputError(
            f"--eval-prompt-data {' '.join(words)}: {len(words)} words are not NAME SOURCE pairs; "
            "give a name before each source, e.g. heldout data/heldout.jsonl"
        )
    return [{"name": name, "source": source} for name, source in zip(words[::2], words[1::2], strict=True)]


def _read_config(path: Path) -> list[dict[str, Any]]:
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
        config = strict_json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except OSError as error:
        raise InputError(f"--eval-config {path}: cannot read the file ({error.strerror}); check the path") from error
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        language = "JSON" if path.suffix == ".json" else "YAML"
        reason = one_line(str(error), 300)
        raise InputError(f"--eval-config {path}: not valid {language} ({reason}); correct it there") from error
    if not isinstance(config, list) or not config:
        raise InputError(f"--eval-config {path}: holds no list of sets; write a list of objects with name and source")
    for number, entry in enumerate(config, start=1):
        _check_entry(entry, f"--eval-config {path}, set {number}")
    return config


def _check_entry(entry: Any, where: str) -> None:
    if not isinstance(entry, dict):
        raise InputError(f"{where}: {entry!r} is not an object; write one with name and source")
    for key, value in entry.items():
        if key not in _KINDS:
            near = get_close_matches(str(key), _KINDS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"the keys are {', '.join(_KINDS)}"
            raise InputError(f"{where}: unknown key {key}; {hint}")
        kind = _KINDS[key]
        if isinstance(value, bool) or not isinstance(value, int | float if kind is float else kind):
            kinds = "int or float" if kind is float else kind.__name__
            raise InputError(f"{where}: {key} is {value!r}; give a value of type {kinds}, or remove the key")
    for key in ("name", "source"):
        if not entry.get(key):
            raise InputError(f"{where}: has no {key}; every set needs a name and a source")
    arguments = EvaluationArguments(**{flag: entry[key] for key, flag in _FLAGS.items() if key in entry})
    errors = Errors()
    errors.declared(arguments)
    check_top_k(arguments, "eval_top_k", errors)
    for message in errors.messages:
        flag, _, fault = message.removeprefix("--eval-").removeprefix("--").partition(" ")
        raise InputError(f"{where}: {flag.replace('-', '_')} {fault}")
