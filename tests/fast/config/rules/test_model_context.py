"""A response that cannot fit into the model's context is refused before the engine does it."""

import json

import pytest

from miles.base.flags import FlagError
from miles.config.parser import parse
from miles.config.validate import validate

COMMAND = (
    "--hf-checkpoint {model} --prompt-data rows --num-rollout 1 --rollout-batch-size 2 --n-samples-per-prompt 2 "
    "--global-batch-size 4 --rollout-max-response-len 32 --rm-type length --device cpu --actor-num-gpus-per-node 1"
)
REFUSED = (
    "--rollout-max-response-len 64: leaves no room for a prompt in the model's max_position_embeddings 64; "
    "give --rollout-max-context-len 64, which ends responses there"
)
PARTIAL = {"rope_type": "default", "partial_rotary_factor": 0.5}
GIVEN = "--load-debug-rollout-data {{rollout_id}} --eval-prompt-data a rows --eval-interval 1"
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0}
LONG = {"type": "longrope", "original_max_position_embeddings": 32, "short_factor": [1.0], "long_factor": [2.0]}
YARN = {"rope_type": "yarn", "factor": 2.0}


@pytest.mark.parametrize(
    ("flags", "scaling", "expected"),
    [
        ("", None, ""),
        ("--rollout-max-response-len 63", None, ""),
        ("--rollout-max-response-len 64", None, REFUSED),
        ("--rollout-max-response-len 64 --rollout-max-context-len 64", None, ""),
        ("--rollout-max-response-len 64 --rollout-max-context-len 65", None, "--rollout-max-response-len 64"),
        ("--rollout-max-response-len 64 --thinking-max-len 8", None, ""),
        ("--eval-prompt-data a rows --eval-interval 1 --eval-max-response-len 64", None, "--eval-max-response-len 64"),
        ("--rollout-max-response-len 64 --rollout-engine torch", YARN, "--rollout-max-response-len 64"),
        ("--rollout-max-response-len 64 --rollout-engine sglang", YARN, ""),
        ("--rollout-max-response-len 64 --rollout-engine sglang", PARTIAL, "--rollout-max-response-len 64"),
        ("--rollout-engine torch", LONG, "in the model's original_max_position_embeddings 32"),
        ("--rollout-engine torch --rollout-max-response-len 31", LONG, ""),
        ("--rollout-engine sglang", LONG, "in the model's original_max_position_embeddings 32"),
        ("--rollout-engine sglang --debug-rollout-only", LONG, ""),
        ("--rollout-engine sglang --rollout-max-response-len 64", DYNAMIC, "in the model's max_position_embeddings 64"),
        (f"--rollout-max-response-len 64 {GIVEN}", None, "--rollout-max-response-len 64"),
        ("--rollout-engine sglang --sglang-context-length 32", None, "in --sglang-context-length 32"),
        ("--rollout-max-response-len 64 --rollout-engine sglang --sglang-context-length 128", None, ""),
        ("--rollout-max-response-len 64 --rollout-engine sglang --sglang-allow-auto-truncate", None, ""),
        ("--rollout-max-response-len 64 --debug-train-only --load-debug-rollout-data {{rollout_id}}", None, ""),
    ],
)
def test_a_response_leaves_room_for_a_prompt(tmp_path, flags, scaling, expected):
    config = {"model_type": "qwen3", "max_position_embeddings": 64, "rope_scaling": scaling}
    (tmp_path / "config.json").write_text(json.dumps(config))
    messages: list[str] = []
    try:
        validate(parse([*COMMAND.format(model=tmp_path).split(), *flags.format().split()]))
    except FlagError as error:
        messages = error.messages
    errors = [message for message in messages if "leaves no room for a prompt" in message]
    assert len(errors) == bool(expected) and all(expected in message for message in errors)


@pytest.mark.parametrize("longest", [64, 65])
def test_a_context_that_the_model_has_not_is_refused(tmp_path, longest):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "max_position_embeddings": 64}))
    model = COMMAND.format(model=tmp_path).replace("rows", "reasoning_gym:products")
    words = [*model.split(), "--rollout-max-context-len", str(longest)]
    if longest == 64:
        validate(parse(words))
        return
    with pytest.raises(FlagError, match="65: is more than the model's max_position_embeddings 64; give 64 or less"):
        validate(parse(words))


@pytest.mark.parametrize(("longest", "noted"), [("33", True), ("32", False)])
def test_a_prompt_that_would_end_the_run_is_noted(tmp_path, longest, noted):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "max_position_embeddings": 64}))
    model = COMMAND.format(model=tmp_path).replace("rows", "reasoning_gym:products")
    notes = validate(parse([*model.split(), "--rollout-max-prompt-len", longest, "--rollout-engine", "sglang"])).notes
    assert sum("a prompt of more than 32 tokens would end the run" in note for note in notes) == noted
