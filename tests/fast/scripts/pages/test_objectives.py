"""The page of objectives is complete."""

from dataclasses import fields
from functools import cache
from typing import Literal, get_args, get_origin, get_type_hints

import pytest

from miles.base.flags import Errors, flag_name
from miles.compat.translate.translation import table_of
from miles.config.parser import parse
from miles.config.validate import validate
from miles.objective.aggregation import MODES, Aggregation
from miles.objective.estimators import ESTIMATORS
from miles.objective.kl import KL_FORMS, KlEstimator, check_kl
from miles.objective.policy_losses import POLICY_LOSSES
from miles.objective.settings import LossArguments, TokenWeightFlags
from miles.objective.token_weights import TOKEN_WEIGHTS
from scripts.pages.objective_variants import (
    CONFORMANCE,
    KL_GRADIENTS,
    TESTS,
    VARIANTS,
    files_of_kl,
    files_of_mode,
    files_of_variant,
)
from scripts.pages.objectives import (
    files_of_tests,
    objectives_reference,
    papers,
)

ESTIMATORS_OF_VERL, POLICY_LOSSES_OF_VERL = list(table_of("verl").names.values())[:2]

ROWS = [(weight, variant) for weight in TOKEN_WEIGHTS for variant in VARIANTS[weight.switch]]
CHOICES = [*ESTIMATORS.values(), *POLICY_LOSSES.values()]


@cache
def the_page() -> str:
    """The page as the command prints it; once for all tests."""
    return objectives_reference()


@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: f"{choice.flag}-{choice.name}")
def test_every_choice_has_a_row_a_paper_and_a_test(choice):
    page = the_page().partition("## Names in verl")[0]
    table = page.split("## Policy losses")[choice.flag == "policy_loss"]
    [row] = [line for line in table.splitlines() if line.startswith(f"| `{choice.name}` |")]
    assert papers(choice) and all(f"arxiv.org/abs/{paper}" in row for paper in papers(choice))
    tests = files_of_tests(choice)
    assert tests and all(f"`{test}`" in row for test in tests)
    text = "".join(path.read_text(encoding="utf-8") for test in tests for path in TESTS.rglob(test))
    assert f'"{choice.name}"' in text or f"{choice.name} " in text, "the tests of the row name it"


def the_row(section: str, first_cell: str) -> str:
    """The one row of a section of the page that begins with this cell."""
    text = the_page().partition(f"## {section}\n")[2].partition("\n## ")[0]
    [row] = [line for line in text.splitlines() if line.startswith(f"| {first_cell} |")]
    return row


def assert_shows(row: str, sources: tuple[str, ...], tests: list[str]) -> None:
    assert sources and all(source in row for source in sources)
    assert tests and all(f"`{test}`" in row for test in tests)
    for test in tests:
        files = [CONFORMANCE.parent / test] if "/" in test else list(TESTS.rglob(test))
        assert files and all(path.is_file() for path in files), test


def test_every_aggregation_has_a_row():
    assert set(MODES) == set(get_args(Aggregation))
    for name, mode in MODES.items():
        row = the_row("Aggregation", f"`{name}`")
        assert_shows(row, mode.sources, files_of_mode(name))
        assert mode.formula in row and all(flag_name(flag) in row for flag in mode.reads)


def test_every_estimator_of_the_kl_has_a_row():
    """And one with ``--use-unbiased-kl``, unless that is refused."""
    assert set(KL_FORMS) == set(KL_GRADIENTS) == set(get_args(KlEstimator))
    for name, form in KL_GRADIENTS.items():
        assert_shows(the_row("KL to the reference model", f"`{name}`"), form.sources, files_of_kl(name, False))
        errors = Errors()
        check_kl(LossArguments(use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type=name, use_unbiased_kl=True), errors)
        assert errors.none_about("kl_loss_type") == (form.weighted is not None)
        if form.weighted is not None:
            row = the_row("KL to the reference model", f"`{name}` with `--use-unbiased-kl`")
            assert_shows(row, ("2512.02556",), files_of_kl(name, True))


@pytest.mark.parametrize(("weight", "variant"), ROWS, ids=[variant.name for _, variant in ROWS])
def test_every_correction_has_a_row(weight, variant):
    loss = LossArguments(**variant.settings)
    assert weight.is_on(loss) and set(variant.settings) <= {weight.switch, *weight.reads}
    row = the_row("Corrections, and the choice of tokens", variant.name)
    assert_shows(row, variant.sources, files_of_variant(weight, variant))
    assert all(term.text in row for term in weight.formula(loss))
    assert all(flag_name(name) in row for name in variant.settings)


def test_every_choice_and_switch_of_a_correction_is_a_variant():
    """A new mode or level without a row fails here."""
    types = get_type_hints(TokenWeightFlags)
    defaults = {field.name: field.default for field in fields(TokenWeightFlags)}
    for weight in TOKEN_WEIGHTS:
        for name in weight.reads:
            values = get_args(types[name]) if get_origin(types[name]) is Literal else (False, True)
            if types[name] is bool or get_origin(types[name]) is Literal:
                assert {v.settings.get(name, defaults[name]) for v in VARIANTS[weight.switch]} == set(values), name


def test_a_setting_without_a_test_is_seen(monkeypatch, tmp_path):
    """The page does not name a file that gives other settings."""
    (tmp_path / "test_it.py").write_text('LossArguments(use_tis=True, tis_clip=9.0, tis_mode="icepop")\n')
    monkeypatch.setattr("scripts.pages.objective_variants.TESTS", tmp_path)
    monkeypatch.setattr("scripts.pages.objective_variants.CONFORMANCE", tmp_path / "none")
    by_variant = {variant.name: files_of_variant(weight, variant) for weight, variant in ROWS}
    assert by_variant.pop("IcePop") == ["test_it.py"] and not any(by_variant.values())


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
