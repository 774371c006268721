"""Any damaged file of a checkpoint is found before it is loaded, and the message names the file and the fault."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_checkpoint import one_rank, save_checkpoint, tensors

from miles.training.checkpoint_check import check_checkpoint, check_weights
from miles.training.checkpoint_files import (
    MANIFEST,
    STATE,
    DamagedFile,
    at,
    hash_files_of_rank,
    publish,
    read_manifest,
    read_run_state,
    reference_folder,
    staging,
    write_manifest,
    write_run_state,
)
from miles.training.checkpoint_io import loading, restore_random_state, restricted_loading
from miles.training.fsdp import checkpoint

SHARD, RANDOM, INDEX = "__0_0.distcp", "random_state_rank0.pt", ".metadata"
FILES = (SHARD, RANDOM, INDEX, STATE, MANIFEST)


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return save_checkpoint(tmp_path_factory.mktemp("checkpoints"), 4)


@pytest.fixture
def saved(original, tmp_path):
    return Path(shutil.copytree(original, tmp_path / original.name))


def truncate(path):
    os.truncate(path, path.stat().st_size // 2)


def empty(path):
    os.truncate(path, 0)


def alter(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)


def fault_of(folder):
    with pytest.raises(DamagedFile) as raised:
        check_checkpoint(folder)
    message = str(raised.value)
    assert "\n" not in message and len(message) < 400
    return message


def test_a_complete_checkpoint_lists_every_file(saved):
    cost = check_checkpoint(saved)
    assert read_manifest(saved).keys() == {SHARD, RANDOM, INDEX, STATE}
    assert cost.files == 4 and cost.bytes == sum((saved / name).stat().st_size for name in FILES if name != MANIFEST)


def test_a_launcher_that_checks_a_checkpoint_does_not_import_torch(saved):
    code = "import sys; from pathlib import Path; from miles.training.checkpoint_check import check_checkpoint; "
    code += "print(check_checkpoint(Path(sys.argv[1])).files, 'torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code, saved], text=True).split() == ["4", "False"]


@pytest.mark.parametrize("damage", [truncate, empty, Path.unlink, alter])
@pytest.mark.parametrize("name", FILES)
def test_damage_to_any_file_names_the_file_and_the_fault(saved, name, damage):
    damage(saved / name)
    fault = fault_of(saved)
    assert name in fault or name == MANIFEST, fault
    words = {"truncate": ("truncated", "not valid JSON"), "empty": ("empty",), "unlink": ("missing",)}
    assert any(word in fault for word in words.get(damage.__name__, ("altered", "valid", "malformed", "outside")))


def test_every_file_of_a_manifest_is_verified_whole(saved):
    """Also files of other ranks, critic, reference and adapter, and files that no other check reads."""
    for part in ("critic", "reference"):
        shutil.copytree(saved, saved.parent / part, ignore=shutil.ignore_patterns(MANIFEST, "critic"))
        (saved.parent / part).rename(saved / part)
    for name in ("__1_0.distcp", "random_state_rank1.pt", "adapter/adapter_model.safetensors", "a/b/c", ".hidden"):
        (saved / name).parent.mkdir(parents=True, exist_ok=True)
        (saved / name).write_bytes(name.encode())
    write_manifest(saved, hash_files_of_rank(saved, 1))
    cost = check_checkpoint(saved)
    assert cost is not None and cost.files == len(read_manifest(saved)) == 4 + 4 + 4 + 5
    for name in read_manifest(saved):
        if name.endswith(STATE):
            continue  # read first, and tested above
        data = (saved / name).read_bytes()
        for place in (0, len(data) // 2, len(data) - 1):
            (saved / name).write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
            assert fault_of(saved) == f"{name} was altered (its SHA-256 is not the one in {MANIFEST})"
        (saved / name).write_bytes(data)
    assert check_checkpoint(saved) is not None


@pytest.mark.parametrize("part", ["critic", "reference"])
def test_a_part_that_the_manifest_does_not_list_is_a_fault(saved, part):
    """It would be loaded without a check: of another checkpoint, say."""
    shutil.copytree(saved, saved.parent / part, ignore=shutil.ignore_patterns(MANIFEST))
    (saved.parent / part).rename(saved / part)
    assert fault_of(saved) == f"manifest.json lists no files in {part}"


@pytest.mark.parametrize("name", [SHARD, RANDOM, INDEX, STATE])
@pytest.mark.parametrize("damage", [truncate, empty, Path.unlink])
def test_without_a_manifest_cut_and_missing_files_are_found_too(saved, name, damage):
    """Checkpoints of earlier versions have no manifest, and do not say that they should."""
    forget_manifest(saved)
    assert check_checkpoint(saved) is None
    damage(saved / name)
    assert name in fault_of(saved)


def forget_manifest(folder):
    (folder / MANIFEST).unlink()
    state = json.loads((folder / STATE).read_text())
    del state["manifest"]
    (folder / STATE).write_text(json.dumps(state))


def test_a_position_that_no_run_has_saved_is_a_fault(saved):
    state = json.loads((saved / STATE).read_text())
    state["launcher"]["prompts"]["epoch"] = None
    (saved / STATE).write_text(json.dumps(state))
    write_manifest(saved, {})  # it was saved like that
    assert fault_of(saved) == "state.json has no position in the prompts (epoch is malformed)"


def test_a_checkpoint_under_the_name_of_a_later_one_is_a_fault(saved):
    later = saved.rename(saved.with_name("iter_0000009"))
    fault = "state.json is of 4 iterations, and the name of the folder says 9"
    assert fault_of(later) == fault
    assert check_checkpoint(later.rename(later.with_name("best"))) is not None  # another name states nothing


def test_an_empty_folder_is_no_checkpoint(tmp_path):
    assert fault_of(tmp_path) == "the folder is empty"


def test_a_lost_manifest_is_a_fault(saved):
    (saved / MANIFEST).unlink()
    assert fault_of(saved) == "manifest.json is missing"


@pytest.fixture
def with_reference(tmp_path):
    """A checkpoint whose reference has followed the policy."""
    within = reference_folder(staging(tmp_path, 4))
    with one_rank():
        dcp.save({"model": tensors()["model"]}, checkpoint_id=within)
        write_run_state(within, "fsdp", {}, {"steps_done": 0})
    return publish(tmp_path, 4)


def test_a_reference_is_checked_against_the_manifest_around_it(with_reference, tmp_path):
    """It has no manifest, random state or run state, and can be given as ``--ref-load``."""
    reference = with_reference / "reference"
    assert at(reference) == reference
    cost = check_weights(reference)
    assert cost is not None and cost.files == 3
    moved = Path(shutil.copytree(reference, tmp_path / "elsewhere" / "reference"))
    assert check_weights(moved) is None, "nothing lists its files"
    alter(reference / SHARD)
    with pytest.raises(DamagedFile, match=f"reference/{SHARD} was altered"):
        check_weights(reference)
    (moved / INDEX).unlink()
    with pytest.raises(DamagedFile, match=f"{INDEX} is missing"):
        check_weights(moved)


def test_a_reference_whose_manifest_is_lost_is_a_fault(original, with_reference, tmp_path):
    saved = Path(shutil.copytree(original, tmp_path / "other" / original.name))
    shutil.copytree(with_reference / "reference", saved / "reference")
    with pytest.raises(DamagedFile, match="manifest.json lists no files in reference"):
        check_weights(saved / "reference")
    (saved / MANIFEST).unlink()
    with pytest.raises(DamagedFile, match="manifest.json is missing"):
        check_weights(saved / "reference")


class Hostile:
    """Calls a function when it is unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


def test_a_hostile_index_is_refused_and_runs_nothing(saved, tmp_path):
    forget_manifest(saved)
    marker = tmp_path / "it ran"
    (saved / INDEX).write_bytes(pickle.dumps(Hostile(marker)))
    assert "it names pathlib.Path" in fault_of(saved) or "it names builtins.getattr" in fault_of(saved)
    state = tensors()
    with one_rank(), restricted_loading(), pytest.raises(BaseException, match="names"):
        dcp.load(state, checkpoint_id=saved)
    assert not marker.exists()
    with one_rank(), pytest.raises(BaseException, match="ranks"):
        dcp.load(state, checkpoint_id=saved)
    assert marker.exists(), "the file has to be hostile for the test to mean anything"


def damaged_pickle(folder):
    (folder / INDEX).write_bytes(b"\x80\x04.")


def hostile(folder):
    (folder / INDEX).write_bytes(pickle.dumps(Hostile(folder / "it ran")))


def shard_is_gone(folder):
    (folder / SHARD).unlink()


@pytest.mark.parametrize(
    "damage, fault",
    [
        (
            hostile,
            r"\.metadata is not the index of a checkpoint \(it names .*, which no checkpoint of miles contains\)",
        ),
        (damaged_pickle, r"\.metadata is not the index of a checkpoint \(.*\)"),
        (shard_is_gone, r"__0_0\.distcp is missing"),
    ],
)
def test_a_rank_names_the_file_and_its_fault_where_a_manifest_was_written_after_the_damage(saved, damage, fault):
    damage(saved)
    write_manifest(saved, {})
    check_checkpoint(saved)  # as the launcher does, which does not read what torch has written
    words = rf"^--load: the checkpoint {saved} is damaged: {fault}; give another one$"
    with one_rank(), pytest.raises(ValueError, match=words):
        checkpoint.load_model(saved, torch.nn.Linear(1, 1), None, with_optimizer=False)
    assert not (saved / "it ran").exists()


def test_a_rank_that_cannot_read_does_not_call_it_another_model(saved):
    words = r"cannot be read \(rank 0: FileNotFoundError: .*\); give another one"
    with one_rank(), pytest.raises(ValueError, match=words), loading(saved, "--load"):
        (saved / SHARD).unlink()
        dcp.load(tensors(), checkpoint_id=saved)


def test_a_hostile_object_among_the_tensors_is_refused_and_runs_nothing(tmp_path):
    """The index of such a checkpoint is harmless: it states that a value is an object, which torch unpickles."""
    marker = tmp_path / "it ran"
    with one_rank():
        dcp.save({"lr": Hostile(marker)}, checkpoint_id=tmp_path / "saved")
        with restricted_loading(), pytest.raises(BaseException, match="weights_only"):
            dcp.load({"lr": 0.1}, checkpoint_id=tmp_path / "saved")
        assert not marker.exists()
        dcp.load({"lr": 0.1}, checkpoint_id=tmp_path / "saved")
    assert marker.exists(), "the file has to be hostile for the test to mean anything"


def test_a_hostile_random_state_is_refused_and_runs_nothing(saved, tmp_path):
    forget_manifest(saved)
    marker = tmp_path / "it ran"
    torch.save({"cpu": Hostile(marker)}, saved / RANDOM)
    assert RANDOM in fault_of(saved) and not marker.exists()


def test_an_index_refers_to_no_file_outside_of_the_checkpoint(saved):
    forget_manifest(saved)
    index = pickle.loads((saved / INDEX).read_bytes())
    for place in index.storage_data.values():
        place.relative_path = f"../{saved.name}/{SHARD}"
    (saved / INDEX).write_bytes(pickle.dumps(index))
    assert "outside" in fault_of(saved)


def test_restricted_loading_loads_what_was_saved(saved):
    wanted, state = tensors(), tensors()
    state["model"]["w"].zero_()
    state["optimizer"]["w"] |= {"lr": 0.0, "betas": (0.0, 0.0)}
    with one_rank(), restricted_loading():
        dcp.load(state, checkpoint_id=saved)
    assert torch.equal(state["model"]["w"], wanted["model"]["w"])
    assert state["optimizer"]["w"]["lr"] == 0.5 and tuple(state["optimizer"]["w"]["betas"]) == (0.9, 0.999)


def test_restricted_loading_ends_with_its_block(saved, monkeypatch):
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    with restricted_loading():
        assert "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD" not in os.environ
    assert os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] == "1"
    assert dcp.filesystem.pickle is pickle


SMALL = st.one_of(
    st.binary(max_size=200),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
        max_leaves=12,
    ).map(lambda value: json.dumps(value).encode()),
    st.fixed_dictionaries(
        {},
        optional={
            name: st.one_of(st.none(), st.integers(), st.text(max_size=4), st.dictionaries(st.text(), st.integers()))
            for name in ("backend", "launcher", "schedule", "manifest", "format", "files")
        },
    ).map(lambda value: json.dumps(value).encode()),
    st.just(b"[" * 100_000),
    st.just(b'{"format": 1' + b"0" * 5000 + b"}"),
)


def changed(data, cuts, flips):
    """Return ``data`` cut and with some bytes changed."""
    buffer = bytearray(data[: len(data) - cuts % (len(data) + 1)])
    for place, value in flips if buffer else ():
        buffer[place % len(buffer)] = value
    return bytes(buffer)


FLIPS = st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), max_size=4)


def check_any_content(folder, name, content):
    """Whatever a file holds: it reads as before, or the fault is one sentence that names it."""
    whole = (folder / name).read_bytes()
    (folder / name).write_bytes(content)
    try:
        check_checkpoint(folder)
    except DamagedFile as fault:
        assert "\n" not in str(fault) and len(str(fault)) < 400 and str(fault).isprintable()
    try:
        read_run_state(folder, "fsdp", "--load")
        with one_rank():
            restore_random_state(folder)
    except ValueError as fault:
        assert "\n" not in str(fault) and ("--load" in str(fault))
    finally:
        (folder / name).write_bytes(whole)


@pytest.mark.parametrize("examples", [40, pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])])
@pytest.mark.parametrize(("name", "with_manifest"), [(MANIFEST, True), (STATE, True), (STATE, False), (RANDOM, False)])
def test_small_files_may_hold_anything(saved, name, with_manifest, examples):
    if not with_manifest:
        forget_manifest(saved)
    whole = (saved / name).read_bytes()

    @settings(max_examples=examples, suppress_health_check=list(HealthCheck))
    @given(st.one_of(SMALL, st.builds(changed, st.just(whole), st.integers(0, 10**6) | st.just(0), FLIPS)))
    def check(content):
        check_any_content(saved, name, content)

    state = torch.get_rng_state()
    check()
    torch.set_rng_state(state)
