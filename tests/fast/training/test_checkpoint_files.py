"""An export appears whole, and replaces an older one without leaving its weights behind."""

import shutil
from pathlib import Path

import pytest

from miles.training import checkpoint_files
from miles.training.checkpoint_files import appearing_whole, recover_exports


def export(folder, **files):
    with appearing_whole(folder) as staged:
        for name, text in files.items():
            (staged / name.replace("__", ".")).write_text(text)
        assert not folder.exists() or "new" not in content(folder).values()  # the block has not ended


def content(folder):
    return {path.name: path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_an_export_replaces_the_weights_of_an_older_one_and_keeps_other_files(tmp_path):
    folder = tmp_path / "deep" / "hf"
    export(folder, config__json="old", **{"model-00001-of-00002__safetensors": "old", "README__md": "mine"})
    export(folder, config__json="new", model__safetensors="new")
    assert content(folder) == {"config.json": "new", "model.safetensors": "new", "README.md": "mine"}
    assert [path.name for path in folder.parent.iterdir()] == ["hf"]


def test_an_export_that_fails_leaves_the_older_one(tmp_path):
    folder = tmp_path / "hf"
    export(folder, config__json="old")
    with pytest.raises(OSError, match="full"), appearing_whole(folder) as staged:
        (staged / "config.json").write_text("half")
        raise OSError("full")
    assert content(folder) == {"config.json": "old"}
    export(folder, config__json="new")  # the half-written folder does not get in the way
    assert content(folder) == {"config.json": "new"}


class Killed(BaseException):
    """Ends a call as a kill would."""


OLD = {"config__json": "old", "model-00001-of-00002__safetensors": "old", "model-00002-of-00002__safetensors": "old"}
NEW = {"config__json": "new", "model__safetensors": "new"}


def weights(folder):
    return {name: text for name, text in content(folder).items() if name.endswith((".safetensors", ".json"))}


@pytest.mark.parametrize("name", ["hf", "hf[{iteration}]", "{rollout_id}/hf"])
def test_an_export_that_is_killed_anywhere_leaves_a_whole_one_for_the_next_start(tmp_path, monkeypatch, name):
    """Every change of the folders is one call; the kill comes before the first, the second, …, until none is left."""
    template, moment, ended = str(tmp_path / name), 0, False
    folder = Path(template.replace("{iteration}", "7").replace("{rollout_id}", "7"))
    contents = []
    while not ended:
        shutil.rmtree(folder, ignore_errors=True)
        export(folder, **OLD)
        (folder / "mine").mkdir()
        (folder / "mine" / "README").write_text("mine")
        with monkeypatch.context() as patched:
            left = [moment]

            def killed(original, left=left):
                def change(*arguments, **options):
                    if left[0] == 0:
                        raise Killed
                    left[0] -= 1
                    return original(*arguments, **options)

                return change

            patched.setattr(Path, "rename", killed(Path.rename))
            patched.setattr(Path, "unlink", killed(Path.unlink))
            patched.setattr(checkpoint_files.shutil, "rmtree", killed(checkpoint_files.shutil.rmtree))
            try:
                export(folder, **NEW)
                ended = True
            except Killed:
                moment += 1
        recover_exports(template)
        contents.append(weights(folder))
        assert (folder / "mine" / "README").read_text() == "mine"
        assert not (folder.parent / f".replaced_{folder.name}").exists()
    old, new = ({name.replace("__", "."): text for name, text in files.items()} for files in (OLD, NEW))
    assert all(each in (old, new) for each in contents)
    assert contents[0] == old and contents[-1] == new and len(contents) > 4


def test_what_others_have_left_beside_an_export_stays(tmp_path):
    for name in (".replaced_hf-a", ".replaced_hf-7x", ".writing_hf-7", ".replaced_iter_0000004"):
        (tmp_path / name).mkdir()
    recover_exports(str(tmp_path / "hf-{iteration}"))
    assert len(list(tmp_path.iterdir())) == 4


def test_an_export_through_a_link_replaces_what_the_link_names(tmp_path):
    export(tmp_path / "hf", **OLD)
    (tmp_path / "link").symlink_to("hf")
    export(tmp_path / "link", **NEW)
    assert (tmp_path / "link").is_symlink() and content(tmp_path / "hf")["config.json"] == "new"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "link"]


def test_an_export_that_cannot_take_its_place_leaves_the_older_one(tmp_path, monkeypatch):
    folder = tmp_path / "hf"
    export(folder, **OLD)
    rename = Path.rename

    def fails(self, target):
        if self.name == ".writing_hf":
            raise OSError("busy")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fails)
    with pytest.raises(OSError, match="busy"):
        export(folder, **NEW)
    assert content(folder)["config.json"] == "old"
