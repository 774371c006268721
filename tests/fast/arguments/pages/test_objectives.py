"""docs/objectives.md is generated, complete and up to date."""

from pathlib import Path

import pytest

from miles.arguments.pages.names_in_verl import ESTIMATORS_OF_VERL, POLICY_LOSSES_OF_VERL
from miles.arguments.pages.objectives import (
    TESTS,
    files_of_tests,
    objectives_reference,
    papers,
)
from miles.arguments.parser import parse
from miles.arguments.validate import validate
from miles.objective.estimators import ESTIMATORS
from miles.objective.policy_losses import POLICY_LOSSES

ROOT = Path(__file__).parents[4]
CHOICES = [*ESTIMATORS.values(), *POLICY_LOSSES.values()]


def test_page_is_up_to_date():
    page = (ROOT / "docs" / "objectives.md").read_text(encoding="utf-8")
    assert page == objectives_reference(), "run python -m miles.arguments.pages.objectives > docs/objectives.md"
    assert "objectives.md" in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")


@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: f"{choice.flag}-{choice.name}")
def test_every_choice_has_a_row_a_paper_and_a_test(choice):
    page = objectives_reference().partition("## Names in verl")[0]
    table = page.split("## Policy losses")[choice.flag == "policy_loss"]
    [row] = [line for line in table.splitlines() if line.startswith(f"| `{choice.name}` |")]
    assert papers(choice) and all(f"arxiv.org/abs/{paper}" in row for paper in papers(choice))
    tests = files_of_tests(choice)
    assert tests and all(f"`{test}`" in row for test in tests)
    text = "".join(path.read_text(encoding="utf-8") for test in tests for path in TESTS.rglob(test))
    assert f'"{choice.name}"' in text or f"{choice.name} " in text, "the tests of the row name it"


@pytest.mark.parametrize("name", [*ESTIMATORS_OF_VERL, *POLICY_LOSSES_OF_VERL])
def test_the_flags_for_a_name_of_verl_are_accepted(name):
    several = ",format:1" if name == "gdpo" else ":1"
    command = (
        "--hf-checkpoint some/model --prompt-data reasoning_gym:products --num-rollout 2 --rollout-batch-size 4 "
        f"--n-samples-per-prompt 4 --rollout-max-response-len 8 --rm-type last_number{several}"
    )
    for flags in (names[name] for names in (ESTIMATORS_OF_VERL, POLICY_LOSSES_OF_VERL) if name in names):
        settings = validate(parse(f"{command} {flags}".split())).settings
        chosen = settings.loss.advantage_estimator if "--advantage" in flags else settings.loss.policy_loss
        assert chosen in (*ESTIMATORS, *POLICY_LOSSES) and chosen in flags
