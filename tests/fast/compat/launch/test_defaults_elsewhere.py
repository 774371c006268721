"""A command that relies on a default or a meaning of other launchers gets a note on its meaning here."""

import pytest

KL = "--use-kl-loss --kl-loss-coef 0.1"


def notes(accepted, flags, about):
    return [note for note in accepted(flags).notes if about in note]


def test_another_reference_is_not_where_the_policy_starts(accepted):
    for flags in (KL, "--kl-coef 0.1 --advantage-estimator reinforce_plus_plus --normalize-advantages"):
        (note,) = notes(accepted, f"{flags} --ref-load other/model", "--ref-load")
        assert "the policy starts from --hf-checkpoint some/model" in note
        assert "Related launchers start it from --ref-load too" in note


def test_no_note_on_a_reference_that_means_the_same_elsewhere(accepted, tmp_path):
    (tmp_path / "iter_0000003").mkdir()
    (tmp_path / "iter_0000003" / "manifest.json").write_text("{}")
    for flags in (
        KL,
        f"{KL} --ref-load some/model",
        f"{KL} --ref-load some/model_torch_dist",
        f"{KL} --ref-load other/model --train-backend fsdp",
        f"{KL} --ref-load other/model --load {tmp_path}",
        "--ref-load other/model",  # no KL: noted as idle, with the folder that the policy starts from
    ):
        assert notes(accepted, flags, "--ref-load") == [], flags


@pytest.mark.parametrize("backend", ["megatron", "fsdp"])
def test_biases_of_experts_are_not_updated(accepted, backend):
    flags = f"--train-backend {backend} --moe-router-enable-expert-bias"
    (note,) = notes(accepted, flags, "--moe-router-enable-expert-bias")
    assert "stay those of the checkpoint" in note and "--moe-router-bias-update-rate 0.001" in note
    assert notes(accepted, f"{flags} --moe-router-bias-update-rate 0", "--moe-router") == []
    assert notes(accepted, f"--train-backend {backend} --num-experts 4", "--moe-router") == []


@pytest.mark.parametrize("backend", ["megatron", "fsdp"])
@pytest.mark.parametrize("flags", ["--fp8-format e4m3", "--fp8-recipe blockwise"])
def test_training_in_8_bits_is_refused_by_name(refusals, backend, flags):
    """Neither backend does, so neither is recommended."""
    (message,) = refusals(f"--train-backend {backend} {flags}")
    assert message == f"{flags}: training in 8 or 4 bits is not part of this version, which has bf16 and fp32; drop it"
