"""Choose the model that is trained, and those it is compared with."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from miles.base import strict_json
from miles.base.flags import Errors, flag, is_hub_name, refuse
from miles.models.packing import reads_images


@dataclass(frozen=True)
class ModelArguments:
    """model: initial weights, the reference model and the teacher."""

    hf_checkpoint: Optional[str] = flag(
        None, "Hugging Face folder or name: tokenizer, configuration and initial weights (required)", file="model"
    )
    ref_load: Optional[str] = flag(
        None,
        "reference model of the KL: a Hugging Face folder, or a checkpoint of the same backend (--save); "
        "default: --hf-checkpoint",
        file="model",
        needs="a reference",
    )
    ref_update_interval: Optional[int] = flag(
        None,
        "update the reference from the policy after every N iterations; default: it is frozen",
        needs="a reference, no --lora-rank",
        at_least=1,
        metavar="N",
    )
    ref_mixup_alpha: float = flag(
        1.0,
        "weight A of the policy when --ref-update-interval sets the reference to A policy + (1 - A) reference; 1 "
        "copies the policy (TRL's ref_model_mixup_alpha)",
        needs="--ref-update-interval",
        within="(0, 1]",
    )
    opd_teacher_load: Optional[str] = flag(
        None,
        "teacher of --use-opd in the trainer: a Hugging Face folder, or a checkpoint of the same backend",
        file="model",
        needs="a loaded teacher",
    )


def check_model(model: ModelArguments, errors: Errors) -> None:
    """Check that a model is named, and that local folders exist."""
    errors.require("hf_checkpoint", model.hf_checkpoint, "tokenizer, configuration and initial weights")
    for name in ("ref_load", "opd_teacher_load"):
        _check_not_empty(name, getattr(model, name), errors)
    if model.hf_checkpoint is not None and errors.none_about("hf_checkpoint") and os.path.isdir(model.hf_checkpoint):
        with errors.catching():
            if local_config(model, "hf_checkpoint") is None:
                rule = "the folder has no config.json"
                errors.refuse(
                    "hf_checkpoint", model.hf_checkpoint, rule, "give the folder of a model, or " + _COPY_AGAIN
                )


def _check_not_empty(field: str, path: str | None, errors: Errors) -> None:
    """Refuse an empty folder: it holds neither a model nor a checkpoint."""
    if path is not None and errors.none_about(field) and os.path.isdir(path):
        try:
            if not os.listdir(path):
                errors.refuse(field, path, "the folder is empty", "give the folder of a model, or of a checkpoint")
        except OSError as error:
            errors.refuse(field, path, f"cannot be read ({error.strerror})", "check its permissions")


def explain_reference(model: ModelArguments) -> list[str]:
    """Return the line about a reference that follows the policy, if it does."""
    interval, alpha = model.ref_update_interval, model.ref_mixup_alpha
    if interval is None:
        return []
    becomes = "the policy" if alpha == 1 else f"{alpha:g} policy + {1 - alpha:g} reference"
    when = "every iteration" if interval == 1 else f"every {interval} iterations"
    return [f"reference  becomes {becomes} after {when}"]


def local_config(model: ModelArguments, field: str) -> dict[str, Any] | None:
    """Return the ``config.json`` of the model that ``field`` names, if it can be read without a network.

    For a name on the hub, it is the file of the last download, if there was one.

    Raises:
        FlagError: It cannot be read, or is not the configuration of a model.
    """
    path = getattr(model, field)
    file = None if path is None else _config_file(path)
    if file is None or not os.path.isfile(file):  # unlike Path.is_file, false for a name that is too long
        return None
    fault = None
    config: Any = None
    try:
        config = strict_json.loads(file.read_text(encoding="utf-8"))
    except strict_json.StrictJsonError as error:
        fault = str(error)
    except OSError as error:
        fault = f"cannot be read ({error.strerror})"
    except UnicodeDecodeError:
        fault = "not UTF-8"
    refuse_config(field, path, fault or _config_fault(config))
    result: dict[str, Any] = config
    return result


def readable_config(model: ModelArguments) -> dict[str, Any] | None:
    """Return the ``config.json`` of ``--hf-checkpoint`` as ``local_config`` does; None for a broken one too.

    For decisions before the validator, which reports a broken one.
    """
    try:
        return local_config(model, "hf_checkpoint")
    except ValueError:
        return None


def has_vision_tower(model: ModelArguments, if_absent: bool) -> bool:
    """Return whether the model reads images; ``if_absent`` if its config is not here."""
    config = readable_config(model)
    return if_absent if config is None else reads_images(config)


def _config_file(path: str) -> Path | None:
    """Return the file of the config that ``path`` names: in that folder, or in the cache for a name on the hub.

    The cache keeps the files of each revision in a folder, and in ``refs/main`` the name of the newest one
    (huggingface_hub, "Understand caching").
    """
    if not is_on_hub(path):
        return Path(path) / "config.json"
    from huggingface_hub import constants  # takes milliseconds, and most runs name a folder

    cached = Path(constants.HF_HUB_CACHE, "models--" + path.replace("/", "--"))
    newest = cached / "refs" / "main"
    if not os.path.isfile(newest):
        return None
    try:
        return cached / "snapshots" / newest.read_text(encoding="utf-8").strip() / "config.json"
    except (OSError, UnicodeDecodeError):
        return None  # the hub's own code reports it, when the model is loaded


def is_on_hub(path: str) -> bool:
    """Return whether ``path`` is a name on the hub and not a folder here."""
    return not os.path.isdir(path) and is_hub_name(path)


def local_vocab_size(model: ModelArguments) -> int | None:
    """Return the number of token ids of the model, if its ``config.json`` can be read without a network and has it.

    Raises:
        FlagError: The file is broken.
    """
    return vocab_size_of(model, "hf_checkpoint")


def vocab_size_of(model: ModelArguments, field: str) -> int | None:
    """Return the same of the model that ``field`` names."""
    config = local_config(model, field) or {}
    size: int | None = (config.get("text_config") or config).get("vocab_size")
    return size


def refuse_config(field: str, path: str, fault: str | None) -> None:
    """Raise ``FlagError`` if the ``config.json`` of the model has a fault."""
    if fault is not None:
        refuse(field, path, f"its config.json is broken: {fault}", _COPY_AGAIN)


@contextmanager
def reading_config(field: str, path: str | None) -> Iterator[None]:
    """Refuse the model's ``config.json`` if the block, which reads it further, lacks a value or finds a wrong type.

    Raises:
        FlagError: It has such a fault.
    """
    try:
        yield
    except KeyError as error:
        refuse_config(field, str(path), f"it has no {error.args[0]}")
    except (TypeError, AttributeError, ArithmeticError) as error:
        refuse_config(field, str(path), f"a value has a wrong type ({error})")


# Numbers that the layout of the ranks and the schedule are computed with, at the top or in text_config.
_COUNTS = (
    "head_dim",
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "vocab_size",
)


def _config_fault(config: Any) -> str | None:
    """Return the fault of the values that are read before transformers reads the whole."""
    if not isinstance(config, dict):
        return "it is not a JSON object"
    text = config.get("text_config")
    if text is not None and not isinstance(text, dict):
        return "text_config is not an object"
    for part in (config, text or {}):
        if not isinstance(part.get("model_type", ""), str):
            return "model_type is not text"
        for name in _COUNTS:
            value = part.get(name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                return f"{name} is not a whole number of at least 1"
        for name in ("layer_types", "layers_block_type", "architectures"):
            value = part.get(name)
            if value is not None and not (isinstance(value, list) and all(isinstance(item, str) for item in value)):
                return f"{name} is not a list of names"
    if "model_type" not in config and "model_type" not in (text or {}):
        return "it names no model_type"
    return None


_COPY_AGAIN = "copy the file again from the source of the model"
