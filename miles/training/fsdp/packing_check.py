"""Compare a model with transformers before it is trained: packed samples, padded samples, and each sample on its own.

A layer that ignores the bounds of samples carries its state into the next one, and nothing else notices: the loss is
finite, and the gradient belongs to another model. Types of models that a test compares are in models/packing.py; all
others are compared here, once, with their own weights.
"""

import math
from dataclasses import replace

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from miles.batch.collate import collate
from miles.batch.convert import convert
from miles.config.parallel import ParallelArguments
from miles.models.packing import is_compared_by_test, model_type, must_be_padded, why_not_shared, why_not_trained
from miles.models.reading import read_config
from miles.objective.settings import LossArguments
from miles.training.fsdp.models import Policy
from miles.training.packed_attention import NAME
from miles.types.groups import ALONE
from miles.types.sample import Prompt, PromptGroup, Sample
from miles.types.train_batch import TrainBatch

_GROUPS = ((4, (6, 9)), (3, (2,)))  # tokens of the prompt, which is kept once when packed, and of its responses


def check_layout(flag: str, path: str, parallel: ParallelArguments) -> None:
    """Refuse a model that is not trained, and one in a layout that may not suit its layers.

    Validation does so, and pads on its own, if it can read the config; of a model on a hub it is known only here.

    Args:
        flag: The flag that names the model.
        path: Its value.
        parallel: The layout of samples.

    Raises:
        ValueError: The model is not trained; or it has recurrent state or sparse attention, and ranks would share
            its sequences; or it has recurrent state, and packing has not been tested.
    """
    config = read_config(path).to_dict()
    if fault := why_not_trained(config):
        raise ValueError(f"{flag} {path}: {'; '.join(fault)}")
    shared = parallel.dynamic_context_parallel or parallel.context_parallel_size > 1
    if shared and (why := why_not_shared(config)):
        drop = "--dynamic-context-parallel" if parallel.dynamic_context_parallel else "--context-parallel-size"
        rule = f"a {model_type(config)} {why} needs whole sequences"
        raise ValueError(f"{flag} {path}: {rule}; drop {drop}, which cuts them")
    if not parallel.pads and must_be_padded(config):
        raise ValueError(
            f"{flag} {path}: a {model_type(config)} has recurrent state, which may pass from one packed sample to "
            f"the next; {_how_to_pad(parallel)}"
        )


def check_untested_model(
    policy: Policy, flag: str, path: str, parallel: ParallelArguments, device: torch.device
) -> None:
    """Compare a model with transformers, unless a test of miles compares its type.

    Args:
        policy: The model with its weights, not sharded.
        flag: The flag that names it.
        path: Its value.
        parallel: The layout of samples.
        device: The device of training; a model that is compared is moved there whole.

    Raises:
        ValueError: As ``compare_with_transformers``.
    """
    if not is_compared_by_test(policy.language_model.config.to_dict()):
        compare_with_transformers(policy.to(device), f"{flag} {path}", parallel)


def compare_with_transformers(policy: Policy, name: str, parallel: ParallelArguments) -> None:
    """Compare log-probs of three tiny samples: padded with transformers, and packed with padded if samples are packed.

    Rounding may change half of the digits of the weights' dtype: the mean difference may be ``sqrt(eps)``, 3.5e-4 in
    float32. It is the mean, since in bfloat16 a router may send a single token to another expert.

    Args:
        policy: The model with its weights, not sharded.
        name: What errors call it.
        parallel: The layout of samples.

    Raises:
        ValueError: They differ by more, with the figures and what to do.
    """
    model = policy.language_model
    kind = model_type(model.config.to_dict())
    allowed = math.sqrt(torch.finfo(model.dtype).eps)
    was_training = model.training
    model.eval()
    with torch.no_grad():
        expected = own_log_probs(policy)
        padded = layout_log_probs(policy, name, packed=False)
        rule = f"{name}: log-probs of a {kind} differ from transformers'"
        _check_difference(expected, padded, allowed, rule, "choose another model")
        if not parallel.pads:
            packed = layout_log_probs(policy, name, packed=True)
            rule = f"{name}: log-probs of a {kind} depend on the samples that are packed before"
            _check_difference(padded, packed, allowed, rule, _how_to_pad(parallel))
        model.train()
        rule = f"{name}: log-probs of a {kind} differ between training and scoring"
        trained = layout_log_probs(policy, name, packed=False)
        _check_difference(padded, trained, allowed, rule, "set its dropout to 0 in its config.json")
    model.train(was_training)


def own_log_probs(policy: Policy) -> torch.Tensor:
    """Compute the tiny samples by transformers alone: its attention, its head, one by one; float32 [R]."""
    model = policy.language_model
    batch = _tiny_batch(model)
    model.set_attn_implementation("eager")
    results = []
    try:
        for tokens, response in zip(batch.tokens, batch.response_lengths, strict=True):
            ids = torch.as_tensor(tokens, device=model.device)
            logits = model(input_ids=ids[None], use_cache=False).logits[0, -response - 1 : -1]
            log_probs = (logits.float() / (policy.temperature or 1.0)).log_softmax(-1)
            results.append(log_probs.gather(-1, ids[-response:, None])[:, 0])
    finally:
        model.set_attn_implementation(NAME)
    return torch.cat(results)


def layout_log_probs(policy: Policy, name: str, packed: bool) -> torch.Tensor:
    """Compute the tiny samples as training does, packed or padded; float32 [R].

    Raises:
        ValueError: The layers do not take the layout.
    """
    model = policy.language_model
    batch = _tiny_batch(model)
    micro = collate(batch, range(len(batch)), model.device, ALONE, row_multiple=None if packed else 1)
    try:
        return policy.scorer(micro)(with_entropy=False).log_probs.float()
    except torch.OutOfMemoryError:
        raise
    except (TypeError, AttributeError, LookupError, RuntimeError) as error:
        kind = model_type(model.config.to_dict())
        raise ValueError(
            f"{name}: the layers of a {kind} do not take the layout of samples ({error}); choose another model"
        ) from error


def _how_to_pad(parallel: ParallelArguments) -> str:
    if parallel.dynamic_context_parallel:
        return "drop --dynamic-context-parallel and add --qkv-format bshd"
    if parallel.context_parallel_size > 1:
        return "drop --context-parallel-size and add --qkv-format bshd"
    return "add --qkv-format bshd"


def _check_difference(a: torch.Tensor, b: torch.Tensor, allowed: float, rule: str, what_to_do: str) -> None:
    difference = (a - b).abs()
    mean, largest = difference.mean().item(), difference.max().item()
    if not mean <= allowed:  # NaN is refused
        figures = (
            f"they differ by {mean:.1e} on average and {largest:.1e} at most, {allowed:.1e} on average is rounding"
        )
        raise ValueError(f"{rule}: on {len(a)} tokens {figures}; {what_to_do}")


def _tiny_batch(model: PreTrainedModel) -> TrainBatch:
    """Return a step of three samples of random tokens, two of them of one prompt."""
    embeddings = model.get_input_embeddings()
    assert isinstance(embeddings, nn.Embedding)
    rng = np.random.default_rng(0)

    def tokens(count: int) -> list[int]:
        drawn: list[int] = rng.integers(0, embeddings.num_embeddings, count).tolist()
        return drawn

    groups = []
    total = 0
    for index, (prompt_length, responses) in enumerate(_GROUPS):
        prompt = Prompt("", tuple(tokens(prompt_length)))
        samples = [Sample(prompt, index, total + i, tokens(n), "", [1] * n, [0.0] * n) for i, n in enumerate(responses)]
        groups.append(PromptGroup(index, prompt, [replace(sample, reward=0.0) for sample in samples]))
        total += len(samples)
    return convert(groups, loss=LossArguments(), global_batch_size=total)[0]
