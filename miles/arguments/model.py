"""Choose the model that is trained, and the one it is compared with."""

from dataclasses import dataclass
from typing import Optional

from miles.flags import Errors, flag


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
