"""The arithmetic of a step, and the ways of cutting micro-batches."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.config.parser import parse
from miles.config.validate import validate
from tests.fast.support.rows import rows


@pytest.mark.parametrize(("flags", "sentence"), rows(__file__, "test_refused_with_one_error"))
def test_refused_with_one_error(refused, flags, sentence):
    (message,) = refused(flags)
    assert re.search(sentence, message)


@given(
    prompts=st.integers(1, 12),
    samples=st.integers(2, 8),
    size=st.none() | st.integers(1, 100),
    steps=st.none() | st.integers(1, 20),
)
def test_step_arithmetic(prompts, samples, size, steps):
    """An iteration is exactly its steps, and the user's values are kept; otherwise the command is refused."""
    flags = {
        "--hf-checkpoint": "m",
        "--prompt-data": "reasoning_gym:products",
        "--rm-type": "math",
        "--num-rollout": 1,
        "--rollout-max-response-len": 8,
        "--rollout-batch-size": prompts,
        "--n-samples-per-prompt": samples,
        "--global-batch-size": size,
        "--num-steps-per-rollout": steps,
    }
    settings = parse([str(word) for pair in flags.items() if pair[1] is not None for word in pair])
    collected = prompts * samples
    possible = collected % (size or 1) == 0 and collected % (steps or 1) == 0
    if not possible or (size and steps and size * steps != collected):
        with pytest.raises(ValueError, match=rf"= {collected}"):
            validate(settings)
        return
    result = validate(settings).settings
    assert result.global_batch_size * result.steps_per_iteration == collected
    assert size in (None, result.global_batch_size)
    assert steps in (None, result.steps_per_iteration)


def test_passes_over_the_samples_multiply_the_steps():
    command = "--hf-checkpoint m --prompt-data reasoning_gym:products --rm-type last_number --num-rollout 3 "
    command += "--rollout-batch-size 8 --n-samples-per-prompt 4 --rollout-max-response-len 8 --ppo-epochs 3"
    settings = validate(parse(f"{command} --num-steps-per-rollout 2".split())).settings
    assert (settings.steps_per_pass, settings.steps_per_iteration, settings.global_batch_size) == (2, 6, 16)
    assert settings.step_shape.steps_per_iteration == 6, "ratios differ from 1 in the second pass"
