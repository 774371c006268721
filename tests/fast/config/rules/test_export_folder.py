"""An export never takes the place of a folder that the run reads or writes otherwise: weights would be lost."""

import pytest

from tests.fast.support.rows import rows

REMOVES = "and an export removes the weights that are in its folder; give another folder"
REPLACES = "and an export takes the place of its whole folder; give another folder"


@pytest.mark.parametrize("flags, message", rows(__file__, "test_an_export_over_another_folder_is_refused"))
def test_an_export_over_another_folder_is_refused(refused, flags, message):
    (error,) = refused(flags)
    assert error.endswith(message) and error.startswith(f"--save-hf {flags.split()[1]}: ")


def test_checkpoints_never_mix_with_the_files_of_the_model(refused):
    (error,) = refused("--save some/../some/model/")
    assert error.startswith("--save some/../some/model/: is the folder of --hf-checkpoint, ")


def test_folders_are_compared_through_links(refused, tmp_path):
    (tmp_path / "saved").mkdir()
    (tmp_path / "link").symlink_to("saved")
    (error,) = refused(f"--load {tmp_path}/saved --save-hf {tmp_path}/link")
    assert error.startswith(f"--save-hf {tmp_path}/link: is the folder of --load {tmp_path}/saved, ")


@pytest.mark.parametrize(
    "flags",
    [
        "--save-hf outputs/run/hf",
        "--save-hf a/hf --save a",
        "--save-hf a/iter_{iteration} --save a",
        "--save-hf some/model/trained",
        "--save-hf m{iteration} --save m4x",
        "--save-hf memory://b/hf --save memory://b/run --load memory://b/run",
    ],
)
def test_an_export_beside_or_inside_other_folders_is_allowed(validated, flags):
    assert validated(flags).settings.checkpoint.save_hf is not None
