"""Choose the model that is trained, and the one it is compared with."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from miles.flags import Errors, flag, refuse


@dataclass(frozen=True)
class ModelArguments:
    """model: initial weights and the reference model."""

    hf_checkpoint: Optional[str] = flag(
        None, "Hugging Face folder or name: tokenizer, configuration and initial weights (required)", metavar="PATH"
    )
    ref_load: Optional[str] = flag(
        None,
        "reference model of the KL: a Hugging Face folder, or a checkpoint of the same backend (--save); "
        "default: --hf-checkpoint",
        metavar="PATH",
    )


def check_model(model: ModelArguments, errors: Errors) -> None:
    """Check that a model is named, and that local folders exist."""
    errors.require("hf_checkpoint", model.hf_checkpoint, "tokenizer, configuration and initial weights")
    errors.existing_folder("hf_checkpoint", model.hf_checkpoint)
    errors.existing_folder("ref_load", model.ref_load)


def local_config(model: ModelArguments, field: str) -> dict[str, Any] | None:
    """Return the ``config.json`` of the model that ``field`` names, if it can be read without a network.

    Raises:
        FlagError: It holds no JSON object.
    """
    path = getattr(model, field)
    file = Path(path) / "config.json" if path is not None else None
    if file is None or not file.is_file():
        return None
    try:
        config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        refuse(field, path, f"its config.json is not JSON ({error})", _COPY_AGAIN)
    if not isinstance(config, dict):
        refuse(field, path, "its config.json is not a JSON object", _COPY_AGAIN)
    return config


_COPY_AGAIN = "copy the file again from the source of the model"
