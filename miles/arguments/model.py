"""Which model is trained, and what it is compared with."""

from dataclasses import dataclass
from typing import Optional

from miles.arguments.flag import flag


@dataclass(frozen=True)
class ModelArguments:
    """model: initial weights and the reference model."""

    hf_checkpoint: Optional[str] = flag(
        None, "Hugging Face folder or name: tokenizer, config and initial weights (required)", metavar="PATH"
    )
    ref_load: Optional[str] = flag(
        None, "Hugging Face folder of the reference model for the KL; default --hf-checkpoint", metavar="PATH"
    )
