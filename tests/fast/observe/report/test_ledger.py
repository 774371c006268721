"""The ledger states how the weight of a token arises, in every mode, and its parts add up."""

from __future__ import annotations

import pytest
from run_folder import SETTINGS, sample
from tolerance import digits

from miles.objective.aggregation import MODES
from miles.observe.report.ledger import ledger, share, token_columns


def row(number: int = 1, **changes) -> dict:
    return sample(0, number, **changes).row(1)


def lines(stored: dict, settings: dict = SETTINGS, step_rows: list[dict] | None = None) -> dict[str, tuple[str, str]]:
    entries = ledger(stored, settings, step_rows or [stored])
    return {line["name"]: (line["value"], line["why"]) for line in entries}


def test_the_weights_of_the_tokens_add_up_to_the_share_and_credits_to_the_credit() -> None:
    stored = row(advantage=-1.5)
    columns = token_columns(stored)
    assert sum(columns["weight"]) == pytest.approx(share(stored)) == pytest.approx(0.25)
    table = lines(stored)
    assert float(table["share of the sample"][0]) == pytest.approx(sum(columns["weight"]))
    assert float(table["credit of the sample"][0]) == pytest.approx(sum(columns["credit"]))
    assert float(table["weight of a loss token"][0]) == pytest.approx(1 / 12, rel=digits(6))


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_is_explained(mode: str) -> None:
    loss = SETTINGS["loss"] | {"loss_aggregation": mode, "loss_aggregation_divisor": 8.0}
    table = lines(row(), SETTINGS | {"loss": loss})
    assert table["mode"] == (mode, MODES[mode].words)
    assert table["denominator"][1]


def test_a_step_that_is_not_stored_whole_says_so() -> None:
    stored = [row(i) for i in range(3)]
    value, why = lines(stored[0], step_rows=[*stored, row(9, train_step=2)])["mass of the step"]
    assert float(value) == pytest.approx(0.75) and "3 of 4 trajectories; the others are not stored" in why


def test_corrections_and_a_custom_reducer_are_named() -> None:
    loss = SETTINGS["loss"] | {"use_tis": True, "custom_pg_loss_reducer_function_path": "my.reducer"}
    table = lines(row(), SETTINGS | {"loss": loss})
    assert table["corrections"] == ("not stored", "the trainer multiplies the weights as --use-tis say")
    assert table["mode"][0] == "custom" and "my.reducer" in table["mode"][1]


RECORDED = {
    "log_probs": [-0.3, -1.4, -9.0, None],
    "ratios": [1.1, 0.9, 7.0, 1.0],
    "token_weights": [2.0, 0.5, 7.0, 1.0],
    "advantages": [1.0, -2.0, 7.0, 0.5],
}


def test_what_the_trainer_recorded_replaces_what_was_assumed() -> None:
    stored = row(**RECORDED)
    columns = token_columns(stored)
    weights = [2 / 12, 0.5 / 12, 0.0, 1 / 12]
    assert columns["weight"] == pytest.approx(weights)
    assert columns["credit"] == pytest.approx([1.0 * weights[0], -2.0 * weights[1], 0.0, 0.5 * weights[3]])
    assert columns["ratio"] == [1.1, 0.9, None, 1.0]
    assert columns["advantage"] == [1.0, -2.0, None, 0.5]
    assert columns["gap"] == [pytest.approx(-0.2), pytest.approx(0.1), None, None]
    table = lines(stored, SETTINGS | {"loss": SETTINGS["loss"] | {"use_tis": True}})
    assert table["corrections"] == ("0.5 to 2", "factors of the tokens by --use-tis; the share becomes 0.2917 of 0.25")
    assert float(table["credit of the sample"][0]) == pytest.approx(sum(columns["credit"]), rel=digits(6))
    assert table["advantage"][0] == "-2 to 1" and table["ratio"][0] == "0.9 to 1.1"
    value, why = table["engine-trainer gap"]
    assert float(value) == pytest.approx(0.15) and "at most 0.2" in why


def test_columns_that_are_not_stored_are_1_in_a_recorded_sample_and_unknown_in_others() -> None:
    recorded = row(log_probs=RECORDED["log_probs"])
    settings = SETTINGS | {"loss": SETTINGS["loss"] | {"use_rs": True}}
    assert token_columns(recorded)["ratio"] == [1.0, 1.0, None, 1.0]
    assert token_columns(recorded)["weight"] == token_columns(row())["weight"]
    assert lines(recorded, settings)["corrections"][0] == "1" and lines(recorded, settings)["ratio"][0] == "1"
    assert "ratio" not in token_columns(row()) and "ratio" not in lines(row(), settings)


def test_without_an_advantage_there_is_no_credit() -> None:
    stored = row(advantage=None)
    assert "credit" not in token_columns(stored) and "advantage" not in lines(stored)


def test_a_row_without_tokens_or_denominator_has_neither_columns_nor_ledger() -> None:
    stored = row(tokens=None, denominator=None)
    assert token_columns(stored) == {} and ledger(stored, SETTINGS, [stored]) == [] and share(stored) is None
