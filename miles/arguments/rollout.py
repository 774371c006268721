"""How samples are generated and collected."""

from dataclasses import dataclass
from typing import Literal, Optional

from miles.flags import flag


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
        None,
        "prompts submitted at a time where a filter drops groups, or a rollout may stop early; "
        "default --rollout-batch-size",
    )
    over_sampling_early_stop: bool = flag(
        False, "end a rollout when enough groups are done, and give up the rest of --over-sampling-batch-size"
    )
    partial_rollout: bool = flag(
        False, "end a rollout when enough groups are done; the rest goes on in the next rollout, under its weights"
    )
    mask_offpolicy_in_partial_rollout: bool = flag(
        False, "with --partial-rollout: tokens of earlier rollouts' weights get loss mask 0"
    )
    async_steps: int = flag(
        0, "rollouts generated ahead of training: weight versions by which a sample may be behind; 0 is synchronous"
    )
    fully_async: bool = flag(
        False, "with --async-steps: generation never waits; weights change under way, groups are taken as they complete"
    )
    stale_samples: Literal["drop", "mask"] = flag(
        "drop", "with --fully-async: what becomes of groups, or of tokens, older than --async-steps weight versions"
    )
    custom_generate_function_path: Optional[str] = flag(
        None, "your function that takes a trajectory to its end (multi-turn, tools), module:function"
    )
    rollout_function_path: Optional[str] = flag(
        None, "your function that makes a whole rollout in place of the built-in collector, module:function"
    )
    dynamic_sampling_filter_path: Optional[str] = flag(
        None, "keep-or-drop filter on a scored group, e.g. miles.rollout.filters:check_reward_nonzero_std"
    )
    save_debug_rollout_data: Optional[str] = flag(
        None,
        "save each iteration's samples to this file; {iteration} (or {rollout_id}) in the name is replaced",
        metavar="FILE",
    )
    load_debug_rollout_data: Optional[str] = flag(
        None,
        "train from saved samples instead of generating; {iteration} (or {rollout_id}) in the name is replaced",
        metavar="FILE",
    )
