"""The settings of related launchers' function of importance weights are read as flags."""

import pytest

from miles.base.flags import FlagError

FUNCTION = "--custom-tis-function-path examples.train_infer_mismatch_helper.mis.compute_mis_weights_with_cp"
EXAMPLE = """
use_tis: true
use_rs: true
tis_level: "token"
rs_level: "sequence"
tis_mode: "truncate"
tis_lower_bound: 0.5
tis_upper_bound: 2.0
rs_lower_bound: null
rs_upper_bound: null
rs_veto_threshold: 1.0e-4
tis_batch_normalize: true
"""


@pytest.fixture
def read(accepted, tmp_path):
    def run(text: str, flags: str = FUNCTION):
        file = tmp_path / "mis.yaml"
        file.write_text(text)
        return accepted(f"{flags} --custom-config-path {file}")

    return run


def test_their_example_becomes_flags(read):
    validated = read(EXAMPLE)
    loss = validated.settings.loss
    assert loss.custom_tis_function_path is None
    assert (loss.use_tis, loss.tis_mode, loss.tis_level, loss.tis_batch_normalize) == (True, "truncate", "token", True)
    assert (loss.tis_clip_low, loss.tis_clip) == (0, 2), "truncate has no lower bound there"
    assert (loss.use_rs, loss.rs_level, loss.rs_veto_threshold) == (True, "sequence", 1e-4)
    assert (loss.rs_lower_bound, loss.rs_upper_bound) == (0.5, 2), "without own bounds, the bounds of the weights hold"
    [note] = [note for note in validated.accepted if "compute_mis_weights" in note.written]
    assert "--tis-batch-normalize" in note.why and "over the whole step" in note.why


@pytest.mark.parametrize(
    ("mode", "expected"),
    [("clip", ("truncate", 0.25, 4)), ("mask", ("icepop", 0.25, 4)), ("truncate", ("truncate", 0, 4))],
)
def test_modes_and_the_default_of_the_lower_bound(read, mode, expected):
    loss = read(f"use_tis: true\ntis_mode: {mode}\ntis_upper_bound: 4\n").settings.loss
    assert (loss.tis_mode, loss.tis_clip_low, loss.tis_clip) == expected
    assert not loss.use_rs and not loss.tis_batch_normalize


def test_the_switch_of_the_command_counts(read):
    assert read("tis_upper_bound: 3\n", f"{FUNCTION} --use-tis").settings.loss.tis_clip == 3


AS_FLAGS = (
    f"{FUNCTION} --use-tis --use-rs --tis-level token --rs-level sequence --tis-mode truncate --tis-lower-bound 0.5 "
    "--tis-upper-bound 2.0 --rs-veto-threshold 1.0e-4 --tis-batch-normalize"
)


def test_the_same_settings_as_flags(read, accepted):
    assert accepted(AS_FLAGS).settings.loss == read(EXAMPLE).settings.loss
    assert read("tis_upper_bound: 3\n", AS_FLAGS).settings.loss.tis_clip == 3, "the file takes precedence"


def test_without_use_tis_nothing_is_weighed(read):
    validated = read(EXAMPLE.replace("use_tis: true", "use_tis: false"), f"{FUNCTION} --get-mismatch-metrics")
    loss = validated.settings.loss
    assert not loss.use_tis and not loss.use_rs and loss.get_mismatch_metrics
    assert any("weighs and rejects nothing" in note.why for note in validated.accepted)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("use_tis: true\ntis_upper_bound: high\n", "--tis-upper-bound high: must be a finite number above 0"),
        ("use_tis: true\ntis_mode: cap\ntis_upper_bound: 2\n", "--tis-mode cap: no such mode of this function"),
        (
            "use_tis: true\ntis_mode: mask\ntis_upper_bound: 2\ntis_batch_normalize: true\n",
            "--tis-batch-normalize: with --tis-mode mask .* drop it, or give --tis-mode clip",
        ),
    ],
)
def test_settings_without_a_counterpart_are_refused(read, text, expected):
    with pytest.raises(FlagError, match=expected):
        read(text)


def test_without_its_settings_the_error_says_where_to_give_them(read):
    with pytest.raises(
        FlagError, match="not here; give its settings as flags or in --custom-config-path, or use --use-tis"
    ):
        read("eps_clip: 0.1\n", f"{FUNCTION} --use-tis")


def test_a_function_of_the_users_reads_these_names_itself(read, tmp_path, monkeypatch):
    (tmp_path / "mis.py").write_text("def compute_mis_weights(inputs):\n    return inputs.old_log_probs.exp()\n")
    monkeypatch.chdir(tmp_path)
    loss = read("tis_upper_bound: 3\n", "--use-tis --custom-tis-function-path mis:compute_mis_weights").settings.loss
    assert loss.custom_tis_function_path == "mis:compute_mis_weights" and loss.tis_clip == 2
