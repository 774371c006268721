"""``--rm-type json_schema``: whether the answer is JSON that a schema accepts."""

import json
from dataclasses import dataclass
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any, NoReturn, Optional

from miles.base import strict_json
from miles.base.flags import Errors, flag
from miles.base.text import one_line
from miles.tasks.rewards.answer_text import final_answer, last_code_block
from miles.tasks.rewards.base import SubprocessReward
from miles.tasks.rewards.subprocess_call import subprocess_call
from miles.types.sample import Prompt, Sample

SLOW_IMPORTS = ("jsonschema",)  # subprocess_call imports them before the time starts
LARGEST_EXPONENT = 400  # beyond it, 1e999999 is not written out
SECONDS = 1.0  # of processor time per answer: patterns and references in a schema may take exponential time


@dataclass(frozen=True)
class JsonSchemaFlags:
    """json_schema: the flags of ``--rm-type json_schema``."""

    reward_json_schema: Optional[str] = flag(
        None,
        "file with the schema of --rm-type json_schema; default: metadata json_schema of each prompt, else its label",
        metavar="FILE",
    )


class JsonSchema(SubprocessReward[JsonSchemaFlags]):
    """1 if the answer is one JSON value that the schema accepts, else 0.

    The answer is the last block of code marked ``json``, else the last without a mark, else what follows the reasoning
    as a whole; text around the JSON is no JSON. A key that an object has twice, NaN, and more than 100 levels are
    refused. Numbers are exact decimals. The draft is the schema's ``$schema``, else 2020-12. Nothing is fetched: a
    reference to another document is an error of the schema. A check that takes more than ``SECONDS`` is logged and
    scored 0.
    """

    name = "json_schema"
    summary = "1 if the answer is JSON that a schema accepts"
    data = "metadata `json_schema`, or label: a schema, unless --reward-json-schema is given"
    needs_label = False
    limit = f"{SECONDS:g} s"
    own_flags = JsonSchemaFlags

    def check(self, flags: JsonSchemaFlags, errors: Errors) -> None:
        """Check that the file holds a schema."""
        path = flags.reward_json_schema
        if path is None:
            return
        errors.existing_file("reward_json_schema", path)
        if errors.none_about("reward_json_schema"):
            try:
                fault = fault_of_schema(strict_json.loads(Path(path).read_text(encoding="utf-8")))
            except (OSError, ValueError) as error:
                fault = str(error)
            if fault is not None:
                errors.refuse("reward_json_schema", path, f"is no JSON schema ({fault})", "correct the file")

    def check_prompt(self, prompt: Prompt, flags: JsonSchemaFlags) -> None:
        """Check that the row has a schema."""
        if flags.reward_json_schema is None and (fault := fault_of_schema(_schema_of(prompt))) is not None:
            raise _no_schema(prompt, fault)

    def judge(self, sample: Sample, flags: JsonSchemaFlags) -> float:
        """Check the answer."""
        path = flags.reward_json_schema
        schema = _schema_of(sample.prompt) if path is None else _read_schema(path)
        block = last_code_block(sample.response, "json")
        answer = final_answer(sample.response) if block is None else block.strip()
        accepted, fault = subprocess_call(is_accepted, json.dumps(schema), answer, seconds=SECONDS)
        if fault is not None:
            raise _no_schema(sample.prompt, fault)
        return float(accepted)


@cache  # a run uses the schema that it reads first
def _read_schema(path: str) -> Any:
    return strict_json.loads(Path(path).read_text(encoding="utf-8"))


def is_accepted(schema: str, answer: str) -> tuple[bool, str | None]:
    """Return whether the schema accepts the answer, and the fault of the schema. May take exponential time."""
    from jsonschema.validators import validator_for
    from jsonschema_specifications import REGISTRY  # the drafts; it fetches nothing
    from referencing.exceptions import Unresolvable

    rules = json.loads(schema, parse_float=_exact)
    fault = fault_of_schema(rules)
    if fault is not None:
        return False, fault
    try:
        strict_json.loads(answer)
        value = json.loads(answer, parse_float=_exact, parse_constant=_no_constant)
    except ValueError:
        return False, None
    try:
        return validator_for(rules)(rules, registry=REGISTRY).is_valid(value), None
    except Unresolvable as error:
        return False, one_line(f"it refers to {error.ref}, which is not in it", 200)
    except RecursionError:
        return False, "it refers to itself without end"
    except ArithmeticError:  # the schema divides a number of the answer that is too large for that
        return False, None


def _exact(number: str) -> int | Decimal:
    """Return the value of a number with a fraction or an exponent: as a float, 19.99 is no multiple of 0.01."""
    value = Decimal(number)
    return int(value) if abs(value.adjusted()) < LARGEST_EXPONENT and value == value.to_integral_value() else value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def fault_of_schema(schema: Any) -> str | None:
    """Return the fault of a schema; None if it is valid."""
    from jsonschema import SchemaError
    from jsonschema.validators import validator_for

    if not isinstance(schema, dict | bool):
        return f"it is of type {type(schema).__name__}, not an object"
    try:
        validator_for(schema).check_schema(schema)
    except SchemaError as error:
        return one_line(error.message, 200)
    return None


def _schema_of(prompt: Prompt) -> Any:
    schema = prompt.metadata.get("json_schema", prompt.label)
    if not isinstance(schema, str):
        if schema is None:
            raise _no_schema(prompt, "there is none")
        return schema
    try:
        return strict_json.loads(schema)
    except ValueError as error:
        raise _no_schema(prompt, str(error)) from None


def _no_schema(prompt: Prompt, fault: str) -> ValueError:
    return ValueError(
        f"--rm-type json_schema: the schema of the prompt {prompt.source} is no JSON schema ({fault}); put one "
        f"into metadata json_schema or the label, or give a file for all with --reward-json-schema"
    )
