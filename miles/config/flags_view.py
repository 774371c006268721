"""Show the settings of a run to functions of the user's, as they expect them: attributes with the names of flags."""

from dataclasses import fields, is_dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from miles.base.flags import LONGEST_VALUE
from miles.base.text import one_line
from miles.config.settings import Settings

CUSTOM_CONFIG = "--custom-config-path"
LARGEST = 1_000_000  # characters of its file


def flags_view(settings: Settings) -> SimpleNamespace:
    """Return every setting by its flag's name (``args.n_samples_per_prompt``), and what ``--custom-config-path`` adds.

    Of Megatron's own flags those are there that the command gives. Flags of SGLang's servers are passed on unread, so
    they are not. It is a copy: a function that changes it changes nothing in the run.
    """
    values = dict[str, Any]()
    path = settings.rollout.custom_config_path
    if path is not None:
        values |= read_custom_config(path)
    for section in fields(settings):
        of_section = getattr(settings, section.name)
        if is_dataclass(of_section):
            values |= {field.name: getattr(of_section, field.name) for field in fields(of_section)}
    values |= dict(settings.megatron_overrides)
    return SimpleNamespace(**values)


def read_custom_config(path: str) -> dict[str, Any]:
    """Return the keys and values of the file of ``--custom-config-path``.

    Raises:
        ValueError: It cannot be read, or is not an object of YAML; the message names the flag.
    """
    import yaml  # few commands have such a file

    label = f"{CUSTOM_CONFIG} {one_line(path, LONGEST_VALUE)}"
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{label}: cannot be read ({error.strerror}); check the path") from error
    except ValueError as error:
        raise ValueError(f"{label}: is not UTF-8 text; check the path") from error
    if len(text) > LARGEST:
        raise ValueError(f"{label}: has more than {LARGEST} characters; check the path")
    try:
        values = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f", line {error.problem_mark.line + 1}"
        reason = one_line(str(error.problem), LONGEST_VALUE)
        raise ValueError(f"{label}: is not YAML ({reason}{line}); correct it there") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = one_line(str(error), LONGEST_VALUE)
        raise ValueError(f"{label}: is not YAML ({reason}); correct it there") from error
    if values is None:
        return {}
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ValueError(f"{label}: holds no object; write one setting per line, as name: value")
    return values
