"""Make the page of objectives of the built docs; ``python -m scripts.pages.objectives`` prints it."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from typing import Any

from miles.base.choices import Registry
from miles.base.flags import flag_name
from miles.compat.translate.translation import table_of
from miles.objective.adaptive import adaptive_entropy_formula, adaptive_kl_formula
from miles.objective.estimators import ESTIMATORS
from miles.objective.estimators.base import Estimator
from miles.objective.policy_losses import POLICY_LOSSES
from miles.objective.policy_losses.base import PolicyLoss
from miles.objective.registry import ObjectivePart
from miles.objective.settings import LossArguments
from scripts.pages.objective_variants import (
    PAPER,
    TESTS,
    aggregation_table,
    corrections_table,
    equation,
    flag_with_default,
    in_code,
    kl_table,
    linked,
    markdown_row,
)

ESTIMATORS_OF_VERL, POLICY_LOSSES_OF_VERL = list(table_of("verl").names.values())[:2]


def objectives_reference() -> str:
    """Return a markdown page of every part of the objective, with paper, equation, flags and test."""
    return "\n".join(_lines()) + "\n"


def papers(choice: ObjectivePart) -> list[str]:
    """Return the arXiv numbers in the docstrings of the choice's file and class, each once."""
    text = f"{inspect.getdoc(sys.modules[type(choice).__module__])} {inspect.getdoc(type(choice))}"
    return list(dict.fromkeys(PAPER.findall(text)))


def files_of_tests(choice: ObjectivePart) -> list[str]:
    """Return the test files of a choice: with its name or its family's, else with its kind's."""
    tests = {path.name: path for path in sorted(TESTS.rglob("test_*.py"), key=lambda path: path.name)}
    package = type(choice).__module__.rpartition(".")[0]
    family = [cls.__module__ for cls in type(choice).__mro__ if cls.__module__.startswith(f"{package}.")]
    for module in family:
        own = f"test_{module.rpartition('.')[2]}.py"
        if own in tests:
            return [own]
    named = [name for name, path in tests.items() if f"test_{choice.name}_".startswith(f"{path.stem}_")]
    if named:
        return named
    if isinstance(choice, Estimator):
        shared = ["test_token_advantages.py" if choice.by_token else "test_advantages.py", "test_group_estimators.py"]
    else:
        shared = ["test_policy_loss.py", "test_every_policy_loss.py"]
    return [test for test in shared if choice.name in tests[test].read_text(encoding="utf-8")] or shared[1:]


def _lines() -> Iterator[str]:
    yield "# Objectives"
    yield ""
    yield "Every estimator works with every policy loss, and both with every aggregation. `--explain` prints the same"
    yield "equations, with the flags of the command. The docstrings of `miles/objective/` give details. Tests are in"
    yield "`tests/fast/objective/` or in the folder that a row names; `test_group_estimators.py` and"
    yield "`test_every_policy_loss.py` have the properties of all estimators and policy losses."
    yield ""
    yield "A sample of advantage 0 is only scored, unless the column *advantage 0* gives it a gradient."
    yield from _table("Advantages", ESTIMATORS)
    yield ""
    yield "Groups below the size in column *group* have advantages of exactly 0, and a smaller `--n-samples-per-prompt`"
    yield "is refused (by `grpo` and `gspo`: noted). verl returns the raw reward for a group of one. If *group* is 1,"
    yield "nothing is compared within it."
    yield ""
    yield "`remax` has one more response generated per prompt, at temperature 0, which is scored and not trained on."
    yield "`optimal_token_baseline` needs two forward passes before the first step of an iteration, for log-probs and"
    yield "sums of squared probabilities, and steps of whole groups. `--otb-zero-tail` is verl's `handle_zero_tail`."
    yield "`gdpo` reads the several rewards of `--rm-type a:1,b:0.2` ([Rewards](rewards.md))."
    yield "[Reproductions](recipes.md#reproductions) has what each estimator is the gradient of, and how noisy it is."
    yield from _table("Policy losses", POLICY_LOSSES)
    yield ""
    yield "`clip_cov` and `kl_cov` choose tokens from the whole step, by the current log-probs. These need one more"
    yield "forward pass over the step, about a third of the cost of forward and backward: `clip_cov` in every step,"
    yield "`kl_cov` from the second step of an iteration on. No other policy loss has that pass."
    yield "`--top-entropy-quantile`, which keeps the most uncertain tokens of the step under any policy loss, has one"
    yield "in every step."
    yield from aggregation_table()
    yield from corrections_table()
    yield from kl_table()
    yield from _adaptive()
    yield from _names_in_verl()


def _names_in_verl() -> Iterator[str]:
    yield from ("", "## Names in verl", "")
    yield "What verl 0.9.1 registers, with the flags that compute the same here; the numbers are its defaults. The"
    yield "files above say what still differs, such as a group of one."
    for title, names in (
        ("estimator", ESTIMATORS_OF_VERL),
        ("policy loss", POLICY_LOSSES_OF_VERL),
    ):
        yield from ("", f"| {title} in verl | here |", "|---|---|")
        yield from (f"| `{name}` | `{flags}` |" for name, flags in names.items())
    yield ""
    yield "The `loss_type: reinforce` of `bypass_mode` with the weights of tokens is `--use-rollout-logprobs"
    yield "--policy-loss cispo --ratio-max 2`; its weights of sequences, and its rejection by the current ratio, are"
    yield "not here."


def _adaptive() -> Iterator[str]:
    kl = adaptive_kl_formula(LossArguments(use_kl_loss=True, kl_loss_coef=0.01, kl_target=0.1))
    entropy = adaptive_entropy_formula(LossArguments(entropy_target=0.2))
    yield from ("", "## Weights that adapt", "", "| flag | paper | rule | tested in |", "|---|---|---|---|")
    for flag, terms in (("--kl-target", kl), ("--entropy-target", entropy)):
        numbers = dict.fromkeys(PAPER.findall(str(sys.modules[terms[0].module].__doc__)))
        yield markdown_row([f"`{flag}`", linked(numbers), equation(terms), "`test_adaptive_coefficients.py`"])
    yield ""
    yield "`--kl-target 0.1` adapts `--kl-coef` or `--kl-loss-coef`, whichever is given, to the KL per token of each"
    yield "step (`train/reward_kl`, `train/kl_loss`), as verl's `kl_ctrl.type=adaptive` does; `--kl-horizon` is in"
    yield "trajectories. `--entropy-target 0.2` rewards entropy only while it is that low or lower, with a weight that"
    yield "starts at `--entropy-coef` and moves by `--entropy-coef-delta` between `--entropy-coef-min` and"
    yield "`--entropy-coef-max`. Weights change after every optimizer step that trains the policy, are logged as"
    yield "the step used them, and are in the checkpoint. A KL in the reward is subtracted before the first step of an"
    yield "iteration, so it has the weight of that moment. A reference that follows the policy is described in"
    yield "[Checkpoints](checkpoints.md#a-reference-that-follows-the-policy)."


def _table(title: str, registry: Registry[Estimator] | Registry[PolicyLoss]) -> Iterator[str]:
    of_groups = registry is ESTIMATORS
    group = " group |" if of_groups else ""
    yield from ("", f"## {title}", "", f"Flag: `{flag_name(registry.flag)}`.", "")
    yield f"| name | paper | equation | flags |{group} advantage 0 | tested in |"
    yield f"|---|---|---|---|{'---|' if of_groups else ''}---|---|"
    for name, choice in registry.items():
        chosen: dict[str, Any] = {registry.flag: name}
        flags = LossArguments(**chosen)
        cells = [
            f"`{name}`",
            linked(papers(choice)),
            equation(choice.formula(flags)),
            ", ".join(flag_with_default(flag) for flag in choice.reads),
            *([str(choice.smallest_group(flags))] if isinstance(choice, Estimator) else []),
            "gradient" if choice.zero_advantage_has_gradient(flags) else "no gradient",
            in_code(files_of_tests(choice)),
        ]
        yield markdown_row(cells)


if __name__ == "__main__":
    print(objectives_reference(), end="")
