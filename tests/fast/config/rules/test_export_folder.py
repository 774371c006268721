"""An export never takes the place of a folder that the run reads or writes otherwise: weights would be lost."""

import pytest

REMOVES = "and an export removes the weights that are in its folder; give another folder"
REPLACES = "and an export takes the place of its whole folder; give another folder"


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--save-hf ./some/model/", f"is the folder of --hf-checkpoint some/model, {REMOVES}"),
        ("--save-hf some", f"holds the folder of --hf-checkpoint some/model, {REPLACES}"),
        ("--save-hf a --save b/../a", f"is the folder of --save b/../a, {REMOVES}"),
        ("--save-hf a --save a/b/c", f"holds the folder of --save a/b/c, {REPLACES}"),
        ("--save-hf a --load a", f"is the folder of --load a, {REMOVES}"),
        ("--save-hf a --output-dir a", f"is the folder of --output-dir a, {REMOVES}"),
        ("--save-hf outputs", f"holds the folder of --output-dir outputs/run, {REPLACES}"),
        (
            "--save-hf r --use-kl-loss --kl-loss-coef 0.1 --ref-load r",
            f"is the folder of --ref-load r, {REMOVES}",
        ),
        ("--save-hf m{iteration} --save m40", f"is the folder of --save m40, {REMOVES}"),
        (
            "--save-hf m{rollout_id} --save m4/a",
            f"holds the folder of --save m4/a, {REPLACES}",
        ),
        (
            "--save-hf a/iter_0000004 --save a",
            "is the place of a checkpoint in --save a; give another folder",
        ),
        ("--save-hf a/iter_0000004/hf --load a", "is the place of a checkpoint in --load a; give another folder"),
        ("--save-hf memory://b/run --save memory://b/run/", f"is the folder of --save memory://b/run/, {REMOVES}"),
        (
            "--save-hf file:///data/a --save /data/a",
            f"is the folder of --save /data/a, {REMOVES}",
        ),
        (
            "--save-hf outputs/run/remote --save memory://b/run",
            f"is the folder of --remote-cache outputs/run/remote, {REMOVES}",
        ),
    ],
)
def test_an_export_over_another_folder_is_refused(refused, flags, message):
    (error,) = refused(flags)
    assert error.endswith(message) and error.startswith(f"--save-hf {flags.split()[1]}: ")


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
