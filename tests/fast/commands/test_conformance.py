"""The comparison with other trainers: our loss against the papers' formulas, and the trainers' own code (slow)."""

from __future__ import annotations

from pathlib import Path

import pytest

from miles import cli
from miles.commands import conformance
from miles.commands.conformance_parts.batch import draw, our_gradient, paper_gradient, settled
from miles.compat.translate.translation import table_of
from miles.config.parser import parse

OBJECTIVES = [
    "--loss-aggregation token_mean --eps-clip-high 0.28",
    "--loss-aggregation sample_mean --use-kl-loss --kl-loss-coef 0.1 --kl-loss-type k3 --use-unbiased-kl",
    "--loss-aggregation constant --loss-aggregation-divisor 64 --eps-clip-c 1.5",
    "--loss-aggregation sample_mean --policy-loss gspo --eps-clip 0.1",
    "--loss-aggregation token_mean --policy-loss cispo --ratio-max 1.2 --ratio-min 0.8",
    "--loss-aggregation token_mean --policy-loss dppo_tv --dppo-tv-delta 0.1",
    "--loss-aggregation token_mean --use-tis --tis-level token --tis-mode icepop --tis-clip 1.2 --tis-clip-low 0.8",
]


@pytest.mark.parametrize("flags", OBJECTIVES)
def test_our_gradient_is_that_of_the_papers(flags: str) -> None:
    loss, drawn = settled(parse(flags.split()).loss), draw(3)
    ours, paper = our_gradient(loss, drawn), paper_gradient(loss, drawn)
    assert ours[0] == pytest.approx(paper[0], rel=conformance.EQUAL)
    assert float((ours[1] - paper[1]).norm() / paper[1].norm()) < conformance.EQUAL


def test_a_difference_that_the_translation_does_not_name_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        conformance.ComparedLoss("a", "--x", 1.0, 1e-7, 0.0, ""),
        conformance.ComparedLoss("b", "--x", 2.0, 0.5, 0.5, "named"),
    ]
    monkeypatch.setattr(conformance, "installed", lambda *_: Path())
    monkeypatch.setattr(conformance, "compared", lambda *_: rows)
    assert cli.main(["conformance", "trl"]) == 0 and "1 of 2 equal" in capsys.readouterr().out
    rows.append(conformance.ComparedLoss("c", "--x", 2.0, 0.5, 0.5, ""))
    assert cli.main(["conformance", "trl"]) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", conformance.PACKAGES)
def test_the_trainers_own_losses_are_ours_or_the_difference_is_named(name: str, tmp_path: Path) -> None:
    try:
        folder = conformance.installed(name, tmp_path)
    except ValueError as error:
        pytest.skip(str(error))
    rows = conformance.compared(name, folder)
    assert [row.name for row in rows if row.ours > conformance.EQUAL and not row.why] == []
    assert {row.words for row in rows if row.ours <= conformance.EQUAL} == {*table_of(name).proven}
