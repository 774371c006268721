"""Choose how a step is computed: backend, batch sizes and precision.

An iteration generates --rollout-batch-size x --n-samples-per-prompt trajectories and takes one or more optimizer steps
on them, each over --global-batch-size trajectories. A rank computes its share of a step in micro-batches.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Optional

from miles.base.flags import Errors, count, flag
from miles.config.components import TRAIN_BACKENDS
from miles.config.rollout import RolloutArguments


@dataclass(frozen=True)
class TrainingArguments:
    """training: backend, batch sizes, micro-batches and precision."""

    train_backend: str = flag("fsdp", "training backend", choices=tuple(TRAIN_BACKENDS))
    global_batch_size: Optional[int] = flag(
        None,
        "trajectories per optimizer step; default: all trajectories of an iteration",
        at_least=1,
        needs="no --use-dynamic-global-batch-size",
    )
    use_dynamic_global_batch_size: bool = flag(
        False, "take one optimizer step per iteration, over all of its trajectories, whatever --global-batch-size says"
    )
    num_steps_per_rollout: Optional[int] = flag(
        None, "optimizer steps per iteration, instead of --global-batch-size", at_least=1
    )
    ppo_epochs: int = flag(
        1,
        "passes over the samples of an iteration, each of all its optimizer steps; verl's name, num_iterations of TRL",
        at_least=1,
    )
    micro_batch_size: int = flag(
        1,
        "samples per micro-batch",
        at_least=1,
        needs="no --use-dynamic-batch-size, no --dynamic-context-parallel",
    )
    use_dynamic_batch_size: bool = flag(
        False, "fill each micro-batch with up to --max-tokens-per-gpu tokens", needs="its own budget"
    )
    max_tokens_per_gpu: Optional[int] = flag(
        None,
        "token budget of a micro-batch; a packed shared prompt counts once",
        at_least=1,
        needs="its own budget, --use-dynamic-batch-size",
    )
    balance_data: bool = flag(
        False,
        "distribute samples over ranks by length (Karmarkar-Karp) instead of in order",
        needs="no --dynamic-context-parallel",
    )
    gradient_checkpointing: bool = flag(False, "recompute activations in the backward pass to save memory")
    freeze_vision_tower: bool = flag(
        False,
        "leave the vision tower and its projector unchanged; by default they are trained with the rest",
        needs="a model that reads images",
    )
    bf16: bool = flag(
        False,
        "compute in bfloat16, with fp32 master weights and fp32 reductions: the default of a command, except on a CPU "
        "without bf16 arithmetic",
    )
    fp32: bool = flag(False, "compute in fp32, instead of --bf16: the default on a CPU without bf16 arithmetic")
    fp32_lm_head: bool = flag(
        False,
        "compute the logits in fp32, in the trainer and the engine, while the rest of the model is in bf16",
        needs="--bf16",
    )
    use_routing_replay: bool = flag(
        False, "train the experts that scored the old log-probs; alongside --use-rollout-routing-replay, the engine's"
    )
    deterministic_mode: bool = flag(
        False, "repeat a run bit for bit on the same machine: deterministic kernels, and answers that repeat"
    )
    seed: int = flag(1234, "seed of the trainer's random state", at_least=0)


def check_training(training: TrainingArguments, errors: Errors) -> None:
    """Check sizes, and that one way of cutting micro-batches is chosen."""
    if training.use_dynamic_global_batch_size and training.num_steps_per_rollout not in (None, 1):
        rule = "contradicts --use-dynamic-global-batch-size, which takes one step per iteration"
        errors.refuse("num_steps_per_rollout", training.num_steps_per_rollout, rule, "keep one of the two")
    if training.bf16 and training.fp32:
        errors.refuse("fp32", True, "contradicts --bf16", "keep one of the two")
    if training.use_dynamic_batch_size and training.max_tokens_per_gpu is None:
        what_to_do = "add --max-tokens-per-gpu (at least the longest prompt and response together is useful)"
        errors.refuse("use_dynamic_batch_size", True, "needs the token budget of a micro-batch", what_to_do)


def fill_precision(training: TrainingArguments, is_bf16_emulated: bool) -> TrainingArguments:
    """Return the section of a command, with a precision if it asks for none: bf16, unless the host emulates it."""
    if training.bf16 or training.fp32:
        return training
    return replace(training, bf16=not is_bf16_emulated, fp32=is_bf16_emulated)


def fill_global_batch_size(
    training: TrainingArguments, rollout: RolloutArguments, errors: Errors
) -> tuple[TrainingArguments, list[str]]:
    """Divide the trajectories of an iteration into optimizer steps.

    Args:
        training: The section, whose ``global_batch_size`` may be implied.
        rollout: The section with valid ``rollout_batch_size`` and ``n_samples_per_prompt``.
        errors: Collects numbers that disagree.

    Returns:
        The section with ``global_batch_size`` filled in and without ``num_steps_per_rollout``, and a note if it was
        implied. With ``--use-dynamic-global-batch-size`` it is the usual size: an iteration of saved samples may have
        another one.
    """
    prompts, samples = rollout.rollout_batch_size, rollout.n_samples_per_prompt
    assert prompts is not None
    collected = prompts * samples
    product = f"--rollout-batch-size {prompts} x --n-samples-per-prompt {samples} = {collected}"
    size, steps = training.global_batch_size, training.num_steps_per_rollout
    for name, value in (("global_batch_size", size), ("num_steps_per_rollout", steps)):
        if value is not None and collected % value:
            rule = f"must divide the trajectories of an iteration, {product}"
            errors.refuse(name, value, rule, f"give a divisor of {collected}")
    if not errors.none_about("global_batch_size", "num_steps_per_rollout"):
        return training, []
    if size is not None and steps is not None and size * steps != collected:
        rule = f"with --num-steps-per-rollout {steps} makes {size * steps} trajectories, but {product}"
        errors.refuse("global_batch_size", size, rule, "keep one of the two flags")
    if size is not None:
        return replace(training, num_steps_per_rollout=None), []
    size = collected // (steps or 1)
    source = f"--num-steps-per-rollout {steps}" if steps else "one step per iteration"
    if training.use_dynamic_global_batch_size:
        source = "--use-dynamic-global-batch-size"
    filled = replace(training, global_batch_size=size, num_steps_per_rollout=None)
    return filled, [f"--global-batch-size is {size}: {source}, {product}"]


def notes_on_training(training: TrainingArguments, context_parallel_size: int, max_response_len: int) -> Iterator[str]:
    """Yield notes on settings that are allowed, and may surprise."""
    budget = training.max_tokens_per_gpu
    if budget is not None and budget * context_parallel_size < max_response_len:
        yield (
            f"--max-tokens-per-gpu {budget} is less than --rollout-max-response-len {max_response_len}: "
            "a longer sample gets its own micro-batch"
        )


def unused_in_training(training: TrainingArguments, replicas: int) -> Iterator[str]:
    """Yield the flags that change nothing in this run, each with the reason."""
    if training.balance_data and replicas == 1:
        yield "--balance-data: every rank has every sample"


def explain_step(training: TrainingArguments, steps_per_iteration: int) -> str:
    """Say how many trajectories a step has. The section must be valid."""
    assert training.global_batch_size is not None
    trajectories = count(training.global_batch_size, "trajectory")
    passes = f", in {training.ppo_epochs} passes over its samples" if training.ppo_epochs > 1 else ""
    return f"a step     N = {trajectories}, {count(steps_per_iteration, 'step')} per iteration{passes}"
