"""Which model is trained, and what it is compared with."""

from dataclasses import dataclass
from typing import Optional

from miles.flags import flag


@dataclass(frozen=True)
class ModelArguments:
    """model: initial weights and the reference model."""

    hf_checkpoint: Optional[str] = flag(
        None, "Hugging Face folder or name: tokenizer, config and initial weights (required)", metavar="PATH"
    )
    ref_load: Optional[str] = flag(
        None,
        "reference model for the KL: a Hugging Face folder, or a checkpoint of the same backend (--save); "
        "default --hf-checkpoint",
        metavar="PATH",
    )
