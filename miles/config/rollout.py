"""Choose how samples are generated and collected.

A run generates first and then trains (the default), generates ahead (``--async-steps``), or generates all the time
(``--fully-async``). Within one iteration it can stop early and drop the rest (``--over-sampling-early-stop``) or
continue it in the next one (``--partial-rollout``). The rules below say which of these go together.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, Optional

from miles.base.flags import Errors, changed, count, flag
from miles.base.storage import PLACEHOLDER
from miles.base.text import one_line
from miles.config.cluster import ClusterArguments
from miles.config.components import ENGINES
from miles.objective.chosen import build_objective
from miles.objective.settings import LossArguments
from miles.tasks.environments.built_in import ENVIRONMENTS

LEAST_TEMPERATURE = 1e-6  # above 0, which is greedy
MOST_TRAJECTORIES = 100_000_000  # of an iteration, which is in memory; one takes a kilobyte or more


@dataclass(frozen=True)
class RolloutArguments:
    """rollout: generation, sampling and the choice of groups."""

    rollout_engine: str = flag(
        "torch",
        "generation engine: torch runs inside the rollout process, sglang and vllm in their own servers",
        choices=tuple(ENGINES),
    )
    num_rollout_workers: int = flag(
        1,
        "processes that send requests, score and filter, for more requests than one process can feed; with 1 the "
        "rollout process does it itself (docs/engine.md)",
        needs="generation",
        within="[1, 1000]",
    )
    num_rollout: Optional[int] = flag(
        None, "iterations of the run; default: --num-epoch passes over the prompts", at_least=1
    )
    num_epoch: Optional[int] = flag(
        None, "passes over the prompts, instead of --num-rollout", at_least=1, needs="no --num-rollout"
    )
    rollout_batch_size: Optional[int] = flag(None, "prompts per iteration (required)", at_least=1)
    n_samples_per_prompt: int = flag(1, "responses sampled per prompt (group size G)", at_least=1)
    rollout_max_response_len: Optional[int] = flag(None, "maximum tokens of one response (required)", at_least=1)
    rollout_max_context_len: Optional[int] = flag(
        None, "maximum tokens of prompt and response together; responses end there", at_least=1
    )
    rollout_temperature: float = flag(1.0, "sampling temperature; 0 is greedy", at_least=0)
    rollout_top_p: float = flag(
        1.0, "sample from the most likely tokens that together have this probability", within="(0, 1]"
    )
    rollout_top_k: int = flag(-1, "sample from the k most likely tokens; -1 is all")
    rollout_min_p: float = flag(
        0.0, "sample from the tokens at least this times as likely as the most likely one; 0 is all", within="[0, 1]"
    )
    no_support_replay: bool = flag(
        False,
        "with top-p, top-k or min-p: train on log-probs over the whole vocabulary, not over the tokens that these "
        "keep, so the ratio is biased (docs/off-policy.md)",
        needs="fewer tokens to sample from",
    )
    use_rollout_routing_replay: bool = flag(
        False, "train the experts that the engine chose for each token (docs/off-policy.md)"
    )
    rollout_stop: Optional[tuple[str, ...]] = flag(
        None, "texts that end a response and stay in it", nargs="+", type=str, has_lines=True
    )
    rollout_stop_token_ids: Optional[tuple[int, ...]] = flag(
        None, "token ids that end a response, in addition to the model's own", nargs="+", type=int
    )
    torch_engine_max_batch_size: int = flag(
        256,
        "sequences that the embedded engine decodes at the same time; default on CPU: fewer if their keys and values "
        "would take more than a quarter of the memory (docs/performance.md)",
        at_least=1,
        needs="--rollout-engine torch",
    )
    max_prompt_pass_rate: Optional[float] = flag(
        None,
        "do not draw a prompt again once this fraction of a group of its responses, or more, has passed (a reward of 1 "
        "or more; in a sum, its first reward that reads the prompt's row); remembered in checkpoints",
        within="(0, 1]",
        needs="generated samples, no --data-source-path",
    )
    over_sampling_batch_size: Optional[int] = flag(
        None,
        "prompts submitted at once if a filter drops groups, or if an iteration may stop early; "
        "default: --rollout-batch-size",
        needs="generated samples, no --rollout-function-path, no --fully-async, a use of spare prompts",
    )
    over_sampling_early_stop: bool = flag(
        False,
        "stop generating when enough groups are complete, and drop the rest of --over-sampling-batch-size",
        needs="generated samples, no --rollout-function-path, no --fully-async",
    )
    partial_rollout: bool = flag(
        False,
        "stop generating when enough groups are complete, and continue the rest in the next iteration with new weights",
        needs="generated samples, no --rollout-function-path, no --fully-async",
    )
    mask_offpolicy_in_partial_rollout: bool = flag(
        False,
        "set the loss mask of tokens from earlier iterations' weights to 0",
        needs="--partial-rollout",
    )
    async_steps: int = flag(
        0,
        "iterations generated ahead of training: how many weight versions old a sample may be; 0 is synchronous",
        at_least=0,
        needs="a trainer, generated samples",
    )
    fully_async: bool = flag(
        False,
        "with --async-steps: never pause generation; weights change during it, and groups are trained on as they "
        "complete",
        needs="a trainer, generated samples, no --rollout-function-path",
    )
    stale_samples: Literal["drop", "mask"] = flag(
        "drop",
        "drop groups older than --async-steps weight versions, or mask their old tokens",
        needs="--fully-async",
    )
    custom_generate_function_path: Optional[str] = flag(
        None, "your function that generates a whole trajectory (multi-turn, tools), module:function"
    )
    thinking_max_len: Optional[int] = flag(
        None,
        "interrupt an answer that still thinks after this many tokens: --thinking-interruption is appended, and the "
        "model continues (docs/rollout.md)",
        needs="generated samples",
        at_least=1,
    )
    thinking_min_len: Optional[int] = flag(
        None,
        "each answer is interrupted after a number of tokens that is drawn from this to "
        "--thinking-max-len, so that the model learns to answer after reasoning of any length; default: the same",
        needs="--thinking-max-len",
        at_least=1,
    )
    thinking_end: str = flag(
        "</think>",
        "the text that ends the reasoning of an answer",
        needs="--thinking-max-len",
        has_lines=True,
    )
    thinking_interruption: str = flag(
        "\nOkay, time is up. Let me stop thinking and formulate a final answer now.\n</think>\n",
        "the text that is appended, with loss mask 0; it holds --thinking-end. The default is "
        "as in ScaleRL (arXiv 2510.13786)",
        needs="--thinking-max-len",
        has_lines=True,
    )
    agent_command: Optional[str] = flag(
        None,
        "program that makes a trajectory by calls of OpenAI's chat API, e.g. 'python agent.py' (docs/agents.md)",
        needs="generation",
        metavar="COMMAND",
        has_lines=True,
    )
    agent_timeout: float = flag(
        600.0,
        "seconds that a program or an environment may take, without those where the model answers",
        needs="--agent-command or --environment",
        above=0,
    )
    agent_concurrency: int = flag(
        16,
        "programs that run at the same time (environments are not limited)",
        needs="--agent-command",
        at_least=1,
    )
    environment: Optional[str] = flag(
        None,
        "what the model talks to, turn by turn: your class, module:class (docs/agents.md), or a built-in one, "
        f"NAME[:key=value,...]. {ENVIRONMENTS.help}",
        needs="generation",
        type=str,
        metavar="ENVIRONMENT",
        has_lines=True,
    )
    max_turns: Optional[int] = flag(
        None,
        "limit of the answers per trajectory; default: the environment's",
        needs="--environment, turns to bound",
        at_least=1,
    )
    rollout_function_path: Optional[str] = flag(
        None,
        "your function that generates a whole iteration, instead of the built-in collector, module:function",
        needs="generated samples",
    )
    dynamic_sampling_filter_path: Optional[str] = flag(
        None,
        "your filter that keeps or drops a scored group, e.g. miles.rollout.filters:check_reward_nonzero_std",
        needs="generated samples, no --rollout-function-path",
    )
    buffer_filter_path: Optional[str] = flag(
        None,
        "your function that picks which finished groups an iteration takes, of those that wait (--partial-rollout, "
        "--fully-async), module:function",
        needs="generated samples, --partial-rollout or --fully-async",
    )
    filter_zero_reward_samples: bool = flag(
        False,
        "set the loss mask of samples of reward 0 to 0, after advantages are computed over their whole groups",
        needs="answers",
    )
    mask_truncated_completions: bool = flag(
        False,
        "set the loss mask of samples that a length limit cut off to 0, after advantages are computed over their whole "
        "groups (DAPO's overlong filtering)",
        needs="answers",
    )
    rollout_sample_filter_path: Optional[str] = flag(
        None, "your function that marks samples of an iteration that are not trained on (docs/rollout.md)"
    )
    rollout_all_samples_process_path: Optional[str] = flag(
        None, "your function that is shown all samples of an iteration, dropped ones too (docs/rollout.md)"
    )
    custom_rollout_log_function_path: Optional[str] = flag(
        None, "your function that adds metrics of an iteration, or logs it on its own (docs/rollout.md)"
    )
    custom_convert_samples_to_train_data_path: Optional[str] = flag(
        None,
        "your function that makes what is trained on of the samples of an iteration (docs/rollout.md)",
        needs="advantages",
    )
    custom_config_path: Optional[str] = flag(
        None,
        "YAML file of settings: those with the name of a flag replace the command's, others are for your functions",
        file="file",
    )
    debug_rollout_only: bool = flag(
        False, "generate, score and evaluate with the weights of --hf-checkpoint; start no trainer"
    )
    debug_train_only: bool = flag(
        False, "train on given samples or conversations; start no engine, and evaluate nothing"
    )
    save_debug_rollout_data: Optional[str] = flag(
        None,
        "save the samples of each iteration to this file; {iteration} (or {rollout_id}) in the name is replaced",
        file="new file",
    )
    load_debug_rollout_data: Optional[str] = flag(
        None,
        "train on saved samples instead of generating; {iteration} (or {rollout_id}) in the name is replaced",
        metavar="FILE",
    )

    @property
    def loads_samples(self) -> bool:
        """Whether samples are read from a file instead of being generated."""
        return self.load_debug_rollout_data is not None

    @property
    def truncates_sampling(self) -> bool:
        """Whether some tokens are never drawn, by top-p, top-k or min-p."""
        limits = self.rollout_top_p < 1 or self.rollout_top_k > 0 or self.rollout_min_p > 0
        return self.rollout_temperature > 0 and limits

    @property
    def replays_support(self) -> bool:
        """Whether the engine returns the support of each token, and the trainer computes log-probs over it."""
        return self.truncates_sampling and not self.no_support_replay

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """The texts that end a response."""
        return self.rollout_stop or ()

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The token ids that end a response, in addition to the model's own."""
        return self.rollout_stop_token_ids or ()


def fill_over_sampling(rollout: RolloutArguments) -> RolloutArguments:
    """Fill in ``over_sampling_batch_size`` if a filter uses it and it is not given."""
    uses = rollout.dynamic_sampling_filter_path is not None and not rollout.fully_async
    if not uses or rollout.over_sampling_batch_size is not None:
        return rollout
    return replace(rollout, over_sampling_batch_size=rollout.rollout_batch_size)


def check_rollout(rollout: RolloutArguments, max_prompt_len: int | None, has_responses: bool, errors: Errors) -> None:
    """Check the section on its own.

    Args:
        rollout: The section.
        max_prompt_len: The value of ``--rollout-max-prompt-len``.
        has_responses: Whether samples are answers to prompts; otherwise they are conversations to train on.
        errors: Collects the errors.
    """
    _check_sampling(rollout, has_responses, errors)
    if rollout.num_rollout is None and rollout.num_epoch is None:
        errors.add("--num-rollout or --num-epoch is required: the length of the run; add one of the two")
    _check_context(rollout, max_prompt_len, errors)
    _check_thinking(rollout, errors)
    _check_early_stop(rollout, errors)
    _check_debug_files(rollout, errors)
    if not has_responses and rollout.n_samples_per_prompt != 1:
        rule = "a conversation is one sample"
        errors.refuse("n_samples_per_prompt", rollout.n_samples_per_prompt, rule, "give 1, or drop it")


def _check_sampling(rollout: RolloutArguments, has_responses: bool, errors: Errors) -> None:
    errors.require("rollout_batch_size", rollout.rollout_batch_size, "prompts per iteration")
    if has_responses:
        errors.require("rollout_max_response_len", rollout.rollout_max_response_len, "maximum tokens of one response")
    prompts, samples = rollout.rollout_batch_size, rollout.n_samples_per_prompt
    are_valid = errors.none_about("rollout_batch_size", "n_samples_per_prompt")
    if are_valid and prompts is not None and prompts * samples > MOST_TRAJECTORIES:
        rule = f"makes {prompts * samples} trajectories per iteration with --n-samples-per-prompt {samples}"
        errors.refuse("rollout_batch_size", prompts, rule, f"give sizes of at most {MOST_TRAJECTORIES} trajectories")
    check_temperature(rollout, "rollout_temperature", errors)
    if rollout.max_prompt_pass_rate is not None and rollout.num_epoch is not None and rollout.num_rollout is None:
        rule = "cannot be counted with --max-prompt-pass-rate, which makes later passes shorter"
        errors.refuse("num_epoch", rollout.num_epoch, rule, "give --num-rollout instead")
    if rollout.rollout_stop is not None and rollout.partial_rollout:
        rule = "would miss a text whose beginning --partial-rollout has cut off"
        errors.refuse("rollout_stop", rollout.rollout_stop, rule, "give ids of tokens with --rollout-stop-token-ids")
    check_top_k(rollout, "rollout_top_k", errors)
    for token in rollout.stop_token_ids:
        if token < 0:
            what_to_do = "give ids of the tokenizer's vocabulary"
            errors.refuse("rollout_stop_token_ids", token, "token ids are not negative", what_to_do)


def check_temperature(section: Any, name: str, errors: Errors) -> None:
    """Check that the field is 0, which is greedy, or so large that SGLang samples at it."""
    temperature = getattr(section, name)
    if temperature is not None and 0 < temperature < LEAST_TEMPERATURE:
        rule = f"SGLang samples greedily below {LEAST_TEMPERATURE:g}, but the other engine and the trainer do not"
        errors.refuse(name, temperature, rule, f"give 0, or {LEAST_TEMPERATURE:g} or more")


def check_top_k(section: Any, top_k: str, errors: Errors) -> None:
    """Check that the field ``top_k`` of ``section`` is -1 or at least 1."""
    k = getattr(section, top_k)
    if k is not None and k != -1 and k < 1:
        rule = "must be -1 (all tokens) or at least 1"
        errors.refuse(top_k, k, rule, "give -1 for the whole vocabulary")


def _check_context(rollout: RolloutArguments, max_prompt_len: int | None, errors: Errors) -> None:
    context = rollout.rollout_max_context_len
    if context is None or not errors.none_about("rollout_max_context_len", "rollout_max_prompt_len"):
        return
    if context < 2:
        rule = "leaves no room for a response after a prompt of one token"
        errors.refuse("rollout_max_context_len", context, rule, "give 2 or more")
    if max_prompt_len is not None and max_prompt_len >= context:
        rule = f"leaves no room for a response after --rollout-max-prompt-len {max_prompt_len}"
        errors.refuse("rollout_max_context_len", context, rule, f"give more than {max_prompt_len}, or a shorter prompt")


def _check_thinking(rollout: RolloutArguments, errors: Errors) -> None:
    """Check that a response has room alongside its reasoning, and that what interrupts the reasoning ends it."""
    if rollout.thinking_max_len is None:
        return
    if rollout.thinking_min_len is not None and rollout.thinking_min_len > rollout.thinking_max_len:
        rule = f"is more than --thinking-max-len {rollout.thinking_max_len}"
        errors.refuse("thinking_min_len", rollout.thinking_min_len, rule, "give less")
    longest = rollout.rollout_max_response_len
    if longest is not None and rollout.thinking_max_len >= longest:
        rule = f"leaves no room for an answer in --rollout-max-response-len {longest}"
        errors.refuse("thinking_max_len", rollout.thinking_max_len, rule, f"give less than {longest}")
    if rollout.thinking_end not in rollout.thinking_interruption:
        rule = f"does not hold --thinking-end {rollout.thinking_end!r}, so the model would think on"
        errors.refuse("thinking_interruption", rollout.thinking_interruption, rule, "let it end the reasoning")
    for name in changed(rollout, ["custom_generate_function_path", "agent_command", "environment"]):
        rule = "makes trajectories of its own, whose turns --thinking-max-len does not interrupt"
        errors.refuse(name, getattr(rollout, name), rule, "keep one of the two")


def _check_early_stop(rollout: RolloutArguments, errors: Errors) -> None:
    batch, over_sampled = rollout.rollout_batch_size, rollout.over_sampling_batch_size
    if rollout.partial_rollout and rollout.over_sampling_early_stop:
        rule = "would drop what --partial-rollout continues"
        errors.refuse("over_sampling_early_stop", True, rule, "keep one of the two")
    if batch is not None and over_sampled is not None and over_sampled < batch:
        rule = f"must be at least --rollout-batch-size {batch}"
        errors.refuse("over_sampling_batch_size", over_sampled, rule, f"give {batch} or more")
    if errors.none_about("rollout_batch_size", "over_sampling_batch_size") and over_sampled in (None, batch):
        for name in changed(rollout, ["partial_rollout", "over_sampling_early_stop"]):
            rule = f"has no prompts to spare: all of --rollout-batch-size {batch} are submitted and needed"
            errors.refuse(name, True, rule, f"give --over-sampling-batch-size above {batch}")


def _check_debug_files(rollout: RolloutArguments, errors: Errors) -> None:
    save, load = rollout.save_debug_rollout_data, rollout.load_debug_rollout_data
    if save is not None and not names_iteration(save) and rollout.num_rollout != 1:
        rule = "each iteration would overwrite the last"
        errors.refuse("save_debug_rollout_data", save, rule, "put {iteration} in the name")
    if load is None:
        return
    if rollout.num_rollout is None:
        rule = "needs --num-rollout: an epoch is counted in prompts, and none are drawn"
        errors.refuse("load_debug_rollout_data", load, rule, "replace --num-epoch by --num-rollout")
    if not names_iteration(load):
        errors.existing_file("load_debug_rollout_data", load)


def names_iteration(path: str) -> bool:
    """Return whether a path of saved samples has a placeholder; ``{rollout_id}`` is the ecosystem's name."""
    return PLACEHOLDER.search(path) is not None


def path_of_iteration(template: str, iteration: int) -> str:
    """Return the path of one iteration: ``{iteration}`` or ``{rollout_id}`` in ``template`` is replaced."""
    return PLACEHOLDER.sub(str(iteration), template)


def check_async(rollout: RolloutArguments, cluster: ClusterArguments, errors: Errors) -> None:
    """Check that generating ahead of training is possible on these devices, and goes with the other modes."""
    if rollout.async_steps and errors.none_about("async_steps") and cluster.colocate:
        rule = "generates during training, which --colocate's shared devices do not allow"
        what_to_do = f"drop --colocate, or {'--fully-async' if rollout.fully_async else 'give 0'}"
        errors.refuse("async_steps", rollout.async_steps, rule, what_to_do)
    if rollout.fully_async and rollout.async_steps == 0:
        rule = "needs a limit on the age of samples: 1 or more weight versions"
        errors.refuse("fully_async", True, rule, "give --async-steps 1")


def notes_on_rollout(rollout: RolloutArguments, loss: LossArguments) -> Iterator[str]:
    """Yield notes on settings that are allowed, and may surprise."""
    uses_policy_loss = loss.type.uses_policy_loss
    if rollout.rollout_temperature == 0 and uses_policy_loss and build_objective(loss).normalizes_rewards:
        yield (
            "--rollout-temperature 0 samples greedily: the responses of a group are equal, so their advantages are 0; "
            "log-probs come from the raw logits"
        )
    if rollout.truncates_sampling and rollout.no_support_replay and uses_policy_loss:
        yield (
            "--no-support-replay: the trainer's log-probs are over the whole vocabulary and samples are not, so the "
            "mean ratio to the engine's distribution is the probability that top-p, top-k and min-p keep, not 1"
        )
    if rollout.buffer_filter_path is not None and rollout.partial_rollout:
        yield (
            f"--buffer-filter-path {rollout.buffer_filter_path}: it picks among finished groups that wait; interrupted "
            "groups are not shown to it, and always continue"
        )
    if rollout.async_steps and uses_policy_loss and not (loss.use_tis or loss.use_rollout_logprobs):
        yield (
            f"--async-steps {rollout.async_steps}: samples come from weights that are up to "
            f"{count(rollout.async_steps, 'version')} old; --use-tis corrects for that with the engine's log-probs"
        )


def unused_in_rollout(rollout: RolloutArguments) -> Iterator[str]:
    """Yield the flags that change nothing in this run, each with the reason."""
    if rollout.rollout_temperature == 0:
        yield "--rollout-top-p, --rollout-top-k, --rollout-min-p: greedy sampling takes the most likely token"
    if rollout.loads_samples:
        yield "prompts and sampling flags: samples are read from --load-debug-rollout-data"


def explain_generation(rollout: RolloutArguments, reads_conversations: bool) -> str:
    """Say how many trajectories an iteration generates, or conversations it draws. The section must be valid."""
    prompts, samples = rollout.rollout_batch_size, rollout.n_samples_per_prompt
    assert prompts is not None
    if reads_conversations:
        return f"draw       {count(prompts, 'conversation')}, each of them one trajectory"
    maker = "" if rollout.agent_command is None else f", each by a run of {one_line(rollout.agent_command, 80)}"
    if rollout.environment is not None:
        maker = f", each in the environment {one_line(rollout.environment, 80)}"
    return f"generate   {prompts} prompts x {samples} samples = {count(prompts * samples, 'trajectory')}{maker}"


def explain_length(rollout: RolloutArguments, steps_per_iteration: int) -> str:
    """Say how long the run is."""
    if rollout.num_rollout is None:
        steps = count(steps_per_iteration, "optimizer step")
        return f"the run    --num-epoch {rollout.num_epoch} over the prompts, {steps} per iteration"
    steps = count(rollout.num_rollout * steps_per_iteration, "optimizer step")
    return f"the run    {count(rollout.num_rollout, 'iteration')}, {steps}"


def explain_saved_samples(rollout: RolloutArguments) -> Iterator[str]:
    """List the files of saved samples."""
    if rollout.save_debug_rollout_data is not None:
        yield f"{rollout.save_debug_rollout_data}: the samples of each iteration"
