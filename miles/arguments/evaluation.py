"""Held-out sets and how they are sampled."""

from dataclasses import dataclass
from typing import Optional

from miles.flags import flag


@dataclass(frozen=True)
class EvaluationArguments:
    """evaluation: sets, interval and their sampling parameters."""

    eval_prompt_data: Optional[tuple[str, ...]] = flag(
        None, "evaluation sets: NAME SOURCE pairs", nargs="+", type=str, metavar="NAME SOURCE"
    )
    eval_config: Optional[str] = flag(
        None,
        "YAML or JSON file of evaluation sets, each with its own sampling (instead of --eval-prompt-data)",
        metavar="FILE",
    )
    eval_interval: Optional[int] = flag(None, "rollouts between evaluations; also before the first and after the last")
    skip_eval_before_train: bool = flag(False, "no evaluation before the first rollout")
    n_samples_per_eval_prompt: int = flag(1, "responses per evaluation prompt; above 1, pass@k is logged too")
    eval_temperature: Optional[float] = flag(None, "sampling temperature; default --rollout-temperature")
    eval_top_p: Optional[float] = flag(None, "top-p; default --rollout-top-p")
    eval_top_k: Optional[int] = flag(None, "top-k; default --rollout-top-k")
    eval_max_response_len: Optional[int] = flag(None, "most tokens of a response; default --rollout-max-response-len")
    eval_input_key: Optional[str] = flag(None, "prompt column; default --input-key")
    eval_label_key: Optional[str] = flag(None, "answer column; default --label-key")

    @property
    def has_sets(self) -> bool:
        """Whether anything is evaluated."""
        return self.eval_prompt_data is not None or self.eval_config is not None
