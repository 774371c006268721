"""What is saved, when, and what a run starts from."""

from dataclasses import dataclass
from typing import Optional

from miles.flags import flag


@dataclass(frozen=True)
class CheckpointArguments:
    """checkpoint: saving, resuming and exporting."""

    save: Optional[str] = flag(None, "folder for checkpoints", metavar="DIR")
    save_interval: Optional[int] = flag(None, "rollouts between checkpoints; the last rollout is always saved")
    load: Optional[str] = flag(
        None, "folder of checkpoints to resume the newest of; an empty one starts anew", metavar="DIR"
    )
    no_load_optim: bool = flag(False, "do not load the optimizer's state", args=["--no-load-optim"])
    no_load_rng: bool = flag(False, "do not load the random state", args=["--no-load-rng"])
    finetune: bool = flag(False, "load the weights only and start at rollout 0")
    save_hf: Optional[str] = flag(None, "folder for a Hugging Face export at the end of the run", metavar="DIR")
