"""Estimators and policy losses are found by name, and nothing else knows the names."""

from __future__ import annotations

import ast
import dataclasses
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from miles.base.flags import flag_name
from miles.config.explain import explain
from miles.config.parser import build_parser, parse
from miles.config.validate import validate
from miles.objective.adaptive import AdaptiveEntropyFlags, AdaptiveKlFlags
from miles.objective.aggregation import MODES, AggregationFlags
from miles.objective.chosen import build_objective, objective_terms
from miles.objective.distillation import DistillationFlags
from miles.objective.estimators import ESTIMATORS
from miles.objective.estimators.base import AdvantageFlags
from miles.objective.kl import KlFlags
from miles.objective.loss_types import LOSS_TYPES
from miles.objective.policy_losses import POLICY_LOSSES
from miles.objective.policy_losses.dppo_tv import DppoFlags
from miles.objective.registry import StepShape
from miles.objective.settings import CommonFlags, LossArguments, TokenWeightFlags

ROOT = Path(__file__).parents[3]
REGISTRIES = {"advantage_estimator": ESTIMATORS, "policy_loss": POLICY_LOSSES, "loss_type": LOSS_TYPES}
FOLDERS = {"advantage_estimator": "estimators", "policy_loss": "policy_losses", "loss_type": "loss_types"}


@pytest.mark.parametrize("field", REGISTRIES)
def test_a_flag_offers_what_the_folder_holds(field):
    action = build_parser()._option_string_actions[flag_name(field)]
    folder = ROOT / "miles" / "objective" / FOLDERS[field]
    files = {path.stem for path in folder.glob("*.py")} - {"__init__", "base"}
    assert tuple(action.choices) == tuple(REGISTRIES[field]) and len(files) == len(REGISTRIES[field])
    for name, choice in REGISTRIES[field].items():
        assert choice.summary in action.help and name in action.choices


@pytest.mark.parametrize("field", REGISTRIES)
def test_what_a_choice_reads_is_a_flag(field):
    flags = {f.name for f in dataclasses.fields(LossArguments)}
    for choice in REGISTRIES[field].values():
        assert set(choice.reads) | set(choice.instead) <= flags
        if choice.own_flags is not None:
            own = {*choice.own_flags.__annotations__}
            assert own <= flags and all(REGISTRIES[field].readers(name) for name in own)


def test_no_flag_is_declared_twice():
    owners = [*ESTIMATORS.own_flags, *POLICY_LOSSES.own_flags, DistillationFlags, AggregationFlags, CommonFlags]
    owners += [KlFlags, TokenWeightFlags]
    owners += [AdaptiveEntropyFlags, AdaptiveKlFlags, AdvantageFlags, DppoFlags]
    names = [name for owner in owners for name in owner.__annotations__]
    assert len(names) == len(set(names)) == len(dataclasses.fields(LossArguments))


@pytest.mark.parametrize("field", REGISTRIES)
def test_an_unknown_name_is_an_error_that_names_the_choices(field):
    known = ", ".join(REGISTRIES[field])
    with pytest.raises(ValueError, match=f"{flag_name(field)} nothing: no such choice; give one of {known}"):
        build_objective(LossArguments(**{field: "nothing"}))


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("policy_loss", [None, *POLICY_LOSSES])
def test_every_pair_has_a_formula(estimator, policy_loss):
    objective = build_objective(LossArguments(advantage_estimator=estimator, policy_loss=policy_loss))
    assert objective.policy_loss.name == (policy_loss or ESTIMATORS[estimator].default_policy_loss)
    terms = [*objective.policy_loss.formula(objective.flags), *objective.estimator.formula(objective.flags)]
    assert terms and all((ROOT / term.source).is_file() for term in terms)


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def literals(path: Path) -> set[str]:
    """The strings that a module's code compares with or looks up by; docstrings and messages are sentences."""
    return {
        node.value for node in ast.walk(parsed(path)) if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


def test_no_other_file_branches_on_a_name():
    """The names may be a default of a flag; elsewhere only the object's own file has them."""
    names = {*ESTIMATORS, *POLICY_LOSSES, *MODES} - {"constant"}  # a learning rate can be that, too
    allowed = {"aggregation.py", "settings.py"}
    for path in sorted((ROOT / "miles").rglob("*.py")):
        folder = path.parent.name
        inside = path.relative_to(ROOT / "miles")
        # They list names of other trainers, which may be ours, and the papers' formulas by name.
        if str(inside).startswith(("compat", "commands/conformance")):
            continue
        if folder in ("estimators", "policy_losses") or (folder == "objective" and path.name in allowed):
            continue
        assert not literals(path) & names, path


def compared_strings(path: Path) -> set[str]:
    """The strings that code compares with, matches, or looks up in a table written in place."""
    nodes: list[ast.expr | None] = []
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Compare):
            operands = [node.left, *node.comparators]
            nodes += [x for o in operands for x in (o.elts if isinstance(o, ast.Tuple | ast.List | ast.Set) else [o])]
        elif isinstance(node, ast.MatchValue):
            nodes.append(node.value)
        elif isinstance(node, ast.Subscript) and isinstance(node.value, ast.Dict):
            nodes += node.value.keys
    return {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def test_no_other_file_compares_a_loss_type():
    """The names are metrics and fields too, so the test is for comparisons with them."""
    for path in sorted((ROOT / "miles").rglob("*.py")):
        assert not compared_strings(path) & set(LOSS_TYPES), path


def test_validation_imports_no_tensor_library(tmp_path):
    """Wrong flags are reported before torch, numpy or Ray are imported: none of them can be, here."""
    program = """
import sys
for name in ("torch", "numpy", "ray"):
    sys.modules[name] = None
from miles.commands.train import main
from miles.config.explain import explain
from miles.config.parser import parse
from miles.config.validate import validate
first, *others = sys.argv[1:]
try:
    main([*first.split(), "--explain"])
except SystemExit as ended:
    assert not ended.code
for line in others:
    print(explain(validate(parse(line.split()))))
"""
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"input": "1 + 1 = ", "label": "2"}\n')
    common = f"--hf-checkpoint some/model --prompt-data {rows} --label-key label --rm-type last_number --num-rollout 4"
    normalized = ESTIMATORS.readers("normalize_advantages")
    chosen = [f"--advantage-estimator {name}{' --normalize-advantages' * (name in normalized)}" for name in ESTIMATORS]
    sizes = "--rollout-batch-size 4 --n-samples-per-prompt 4 --rollout-max-response-len 8"
    lines = [f"{common} {sizes} {flags}" for flags in ("", *chosen)]
    done = subprocess.run([sys.executable, "-c", program, *lines], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"\[miles/objective/estimators/\w+.py\]", done.stdout)) >= len(lines), done.stdout


def test_the_step_is_described_without_the_run():
    assert StepShape(num_trajectories=8, samples_per_prompt=4).steps_per_iteration == 1


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--use-kl-loss --kl-loss-coef 0.1 --entropy-coef 0.01 --use-tis --use-rs --eps-clip-c 3 --policy-loss gspo",
        "--advantage-estimator ppo --kl-coef 0.1 --normalize-advantages --policy-loss cispo --use-tis",
        "--advantage-estimator ppo --loss-type value_loss",
    ],
)
def test_explain_prints_the_file_beside_each_term(flags):
    common = "--hf-checkpoint some/model --prompt-data reasoning_gym:products --rm-type last_number --num-rollout 4"
    words = f"{common} --rollout-batch-size 4 --n-samples-per-prompt 4 --rollout-max-response-len 8 {flags}"
    validated = validate(parse(words.split()))
    text = explain(validated)
    for term in objective_terms(validated.settings.loss, validated.settings.step_shape):
        assert re.search(re.escape(term.text.strip()) + rf"\s+\[{term.source}\]", text), term
        assert (ROOT / term.source).is_file()
