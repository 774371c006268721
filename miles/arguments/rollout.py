"""How samples are generated and collected."""

from dataclasses import dataclass
from typing import Literal, Optional

from miles.arguments.flag import flag


@dataclass(frozen=True)
class RolloutArguments:
    """rollout: generation, sampling and the choice of groups."""

    rollout_engine: Literal["torch", "sglang"] = flag(
        "torch", "generation engine: torch runs inside the rollout process, sglang in servers of its own"
    )
    num_rollout: Optional[int] = flag(None, "number of rollouts; default: --num-epoch passes over the prompts")
    num_epoch: Optional[int] = flag(None, "passes over the prompts, where --num-rollout is not given")
    rollout_batch_size: Optional[int] = flag(None, "prompts per rollout (required)")
    n_samples_per_prompt: int = flag(1, "responses sampled per prompt (group size G)")
    rollout_max_response_len: Optional[int] = flag(None, "most tokens of one response (required)")
    rollout_max_context_len: Optional[int] = flag(None, "most tokens of prompt and response together")
    rollout_temperature: float = flag(1.0, "sampling temperature; 0 is greedy")
    rollout_top_p: float = flag(1.0, "sample from the most likely tokens that together have this probability")
    rollout_top_k: int = flag(-1, "sample from the k most likely tokens; -1 is all")
    rollout_stop_token_ids: Optional[tuple[int, ...]] = flag(
        None, "token ids that end a response, beside the model's own", nargs="+", type=int
    )
    torch_engine_max_batch_size: int = flag(256, "sequences that the embedded engine decodes at a time")
    over_sampling_batch_size: Optional[int] = flag(
        None, "prompts submitted at a time while groups are dropped by a filter; default --rollout-batch-size"
    )
    dynamic_sampling_filter_path: Optional[str] = flag(
        None, "keep-or-drop filter on a scored group, e.g. miles.rollout.filters:check_reward_nonzero_std"
    )
    save_debug_rollout_data: Optional[str] = flag(
        None, "save each rollout's samples to this file; {rollout_id} in the name is replaced", metavar="FILE"
    )
    load_debug_rollout_data: Optional[str] = flag(
        None, "train from saved samples instead of generating; {rollout_id} in the name is replaced", metavar="FILE"
    )
