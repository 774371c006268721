"""Compare a model in the engine with transformers' own forward pass, before it generates.

Types of models that a test compares are in models/packing.py; all others are compared here, once, with their
own weights.
"""

import math
import time

import torch

from miles.base.text import one_line
from miles.engine.embedded.model_runner import ModelRunner
from miles.models.packing import is_compared_by_test, model_type

_LENGTHS = (6, 11)  # tokens of the two sequences
_WIDTH = 16  # that a decoding step reads, wider than either
_FAULTS = (TypeError, ValueError, AttributeError, LookupError, RuntimeError, AssertionError)


def check_untested_model(runner: ModelRunner, model_path: str) -> None:
    """Compare the model, unless a test of miles compares its type, and print how long it took.

    Raises:
        ValueError: As ``compare_with_transformers``.
    """
    config = runner.model.config.to_dict()
    if is_compared_by_test(config):
        return
    started = time.perf_counter()
    difference = compare_with_transformers(runner, model_path)
    seconds = time.perf_counter() - started
    print(
        f"note: --hf-checkpoint {model_path}: compared with transformers in {seconds:.1f} s, "
        f"the log-probs of a {model_type(config)} in --rollout-engine torch differ by {difference:.1e} on average",
        flush=True,
    )


@torch.inference_mode()
def compare_with_transformers(runner: ModelRunner, model_path: str) -> float:
    """Compare what follows two sequences before and after a decoding step, and return the mean difference.

    Rounding may change half of the digits of the weights' dtype, as in training/fsdp/packing_check.py.

    Raises:
        ValueError: Log-probs differ by more, or the layers do not run; with the figures and what to do.
    """
    name = f"--hf-checkpoint {model_path}: a {model_type(runner.model.config.to_dict())} in --rollout-engine torch"
    drawn = torch.Generator().manual_seed(0)
    sequences = [torch.randint(runner.vocab_size, (n,), generator=drawn).tolist() for n in _LENGTHS]
    try:
        own = torch.stack([runner.own_logits(tokens)[-2:] for tokens in sequences], 1)
        first = runner.prefill([tokens[:-1] for tokens in sequences], first_row=0)
        second = runner.decode([tokens[-1] for tokens in sequences], [n - 1 for n in _LENGTHS], _WIDTH)
    except torch.OutOfMemoryError:
        raise
    except _FAULTS as error:
        why = one_line(f"{type(error).__name__}: {error}", 300)
        raise ValueError(f"{name} does not run ({why}); choose another model, or --rollout-engine sglang") from error
    finally:
        runner.cache.clear()
    difference = (torch.stack([first, second]).float().log_softmax(-1) - own.float().log_softmax(-1)).abs()
    mean, largest, allowed = difference.mean().item(), difference.max().item(), math.sqrt(torch.finfo(own.dtype).eps)
    if not mean <= allowed:  # NaN is refused
        raise ValueError(
            f"{name} does not have transformers' log-probs: they differ by {mean:.1e} on average and {largest:.1e} at "
            f"most, {allowed:.1e} on average is rounding; choose another model, or --rollout-engine sglang"
        )
    return mean
