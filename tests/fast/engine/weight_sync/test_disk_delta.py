"""Weights sent as a delta equal a full update, bit for bit, whatever has happened to files and hosts."""

import asyncio
import json
import logging
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.engine.weight_sync.deltas import (
    MANIFEST,
    CopiedWeights,
    DeltaWriter,
    LocalCopy,
    OfferedWeights,
    OtherWeights,
    chunks_in,
    copy_folder,
)
from miles.engine.weight_sync.disk import DiskDeltaTransport
from miles.engine.weight_sync.transport import Delivery
from miles.types.weights import WeightChunk, in_chunks, unpack

DTYPES = [torch.bfloat16, torch.float32, torch.float16, torch.int8, torch.int64, torch.float8_e4m3fn]
SHAPES = [(), (7,), (40, 17)]


class Host:
    """A ``WeightReceiver`` on a separate host: its engine reads the host's copy of the weights."""

    num_ranks = 1

    def __init__(self, number, folder):
        self.url = f"http://host-{number}"
        self.copies = str(folder / f"host-{number}")
        self.weights = {}

    async def load_copy(self, source, version):
        folder = await asyncio.to_thread(replace(source, copies=self.copies).update_copy)
        chunks = await asyncio.to_thread(lambda: list(chunks_in(Path(folder.path))))
        self.weights = {name: tensor.clone() for chunk in chunks for name, tensor in chunk.tensors.items()}


@dataclass
class Sync:
    """A trainer and its engines: ``send`` is a weight update, as a delta if there is one."""

    folder: Path

    def __post_init__(self):
        self.root = self.folder / "shared"
        self.writer = DeltaWriter(self.root)
        self.transport = DiskDeltaTransport(self.root, None)
        self.hosts = [Host(number, self.folder) for number in range(2)]
        self.version = 0
        self.offer = None

    def export(self, weights):
        """Take new weights, and return the delta or all weights, as a trainer does."""
        self.version += 1
        self.offer = self.writer.update(in_chunks(weights.items(), bucket_bytes=600))
        if self.offer is None:
            return [unpack(chunk) for chunk in self.writer.newest()]
        return OfferedWeights(self.offer, lambda: map(unpack, self.writer.whole(self.offer.result)))

    def send(self, chunks, hosts=None):
        """Return how often the delta was refused; None if there was none."""
        delivery = Delivery(self.hosts if hosts is None else hosts)
        asyncio.run(self.transport.send(delivery, chunks, self.version))
        for failure in delivery.failures.values():
            raise failure
        return chunks.refusals if isinstance(chunks, OfferedWeights) else None

    def copy(self, host):
        return Path(copy_folder(host.copies, str(self.root)))


def raw(tensor):
    return (tensor.dtype, tuple(tensor.shape), tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def same(actual, expected):
    return {n: raw(t) for n, t in actual.items()} == {n: raw(t) for n, t in expected.items()}


def random_bits(random, shape, dtype):
    size = int(np.prod(shape)) * dtype.itemsize
    return torch.frombuffer(bytearray(random.bytes(size)), dtype=torch.uint8).view(dtype).reshape(shape)


def first_weights(random):
    return {
        f"layer.{i}": random_bits(random, shape, dtype)
        for i, (shape, dtype) in enumerate((shape, dtype) for dtype in DTYPES for shape in SHAPES)
    }


def changed(random, weights, share):
    """Return weights, about ``share`` of them with other bits, NaNs and negative zeros among them."""
    new_weights = {}
    for name, tensor in weights.items():
        old = tensor.reshape(-1).view(torch.uint8).reshape(tensor.numel(), tensor.dtype.itemsize)
        new = random_bits(random, tensor.shape, tensor.dtype).reshape(-1).view(torch.uint8).reshape(old.shape)
        moves = torch.from_numpy(random.random((tensor.numel(), 1)) < share)
        new_weights[name] = torch.where(moves, new, old).reshape(-1).view(tensor.dtype).reshape(tensor.shape)
    return new_weights


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at % len(data)] ^= 1 << (at % 8)
    path.write_bytes(data)


def cut(path, at):
    path.write_bytes(path.read_bytes()[: at % path.stat().st_size])


def of_delta(sync, at):
    return sorted(Path(sync.offer.folder).iterdir())[at % len(list(Path(sync.offer.folder).iterdir()))]


def of_copy(sync, at):
    files = sorted(sync.copy(sync.hosts[0]).glob("*.safetensors"))
    return files[at % len(files)]


def contents(sync):
    return sync.copy(sync.hosts[0]) / "contents.json"


FAULTS = {
    "none": lambda sync, at: None,
    "cut file": lambda sync, at: cut(of_delta(sync, at), at),
    "flipped bit": lambda sync, at: flip(of_delta(sync, at), at),
    "missing file": lambda sync, at: of_delta(sync, at).unlink(),
    "missing folder": lambda sync, at: shutil.rmtree(sync.offer.folder),
    "lost copy": lambda sync, at: shutil.rmtree(sync.copy(sync.hosts[0])),
    "flipped bit of a copy": lambda sync, at: flip(of_copy(sync, at), at),
    "cut copy": lambda sync, at: cut(of_copy(sync, at), at),
    "update that died halfway": lambda sync, at: contents(sync).unlink(),
    "copy of other code": lambda sync, at: contents(sync).write_text("[]"),
    "missed update": lambda sync, at: None,
}
HARMLESS = {"none", "flipped bit", "flipped bit of a copy"}  # a flipped bit may be in white space, or be overwritten

steps = st.lists(
    st.tuples(st.sampled_from([0.0, 0.01, 0.1, 1.0]), st.sampled_from(sorted(FAULTS)), st.integers(0, 2**20)),
    min_size=1,
    max_size=5,
)


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 2**32), steps)
def test_engines_have_the_weights_of_a_full_update_after_any_faults(seed, steps):
    random = np.random.default_rng(seed)
    weights = first_weights(random)
    with TemporaryDirectory() as folder:
        sync = Sync(Path(folder))
        assert sync.send(sync.export(weights)) is None, "the first update has nothing to compare with"
        for share, fault, at in steps:
            if fault == "missed update":
                weights = changed(random, weights, 0.05)
                sync.send(sync.export(weights), sync.hosts[1:])
            before, weights = weights, changed(random, weights, share)
            chunks = sync.export(weights)
            FAULTS[fault](sync, at)
            refusals = sync.send(chunks)
            assert all(same(host.weights, weights) for host in sync.hosts)
            assert not refusals or fault != "none"
            assert refusals or fault in HARMLESS or same(before, weights), "who holds the result needs no delta"


def bf16_weights(seed=0):
    torch.manual_seed(seed)
    return {f"layer.{i}": (0.02 * torch.randn(64, 64)).bfloat16() for i in range(4)}


def test_a_delta_is_small_and_says_how_much_has_changed(tmp_path):
    sync, weights = Sync(tmp_path), bf16_weights()
    sync.send(sync.export(weights))
    weights["layer.2"][3, ::16] += 1.0
    assert sync.send(chunks := sync.export(weights)) == 0
    metrics = {name: metric.value for name, metric in chunks.metrics(0.5).items()}
    assert metrics["weight_sync/changed_fraction"] == 4 / (4 * 64 * 64)
    assert metrics["weight_sync/bytes"] < 2000 < chunks.offer.whole_bytes == 4 * 64 * 64 * 2
    assert metrics["weight_sync/whole"] == 0 and metrics["weight_sync/load_seconds"] == 0.5
    on_disk = sum(file.stat().st_size for file in Path(sync.offer.folder).iterdir())
    assert on_disk == metrics["weight_sync/bytes"]


def test_a_refusal_counts_as_an_update_of_all_weights_and_is_noted(tmp_path, caplog):
    sync, weights = Sync(tmp_path), bf16_weights()
    sync.send(sync.export(weights))
    weights["layer.0"] += 1
    chunks = sync.export(weights)
    (Path(sync.offer.folder) / MANIFEST).unlink()
    assert sync.send(chunks) == 2
    metrics = {name: metric.value for name, metric in chunks.metrics(0.5).items()}
    assert metrics["weight_sync/whole"] == 1 and metrics["weight_sync/bytes"] > chunks.offer.whole_bytes
    assert "the engine at http://host-1 gets all weights" in caplog.text and MANIFEST in caplog.text


@pytest.mark.parametrize("embedded", [False, True])
def test_all_weights_after_a_refusal_are_compared_with_those_offered(tmp_path, embedded):
    """The copy is lost then, so that the next update does not begin with damaged weights."""
    sync, weights = Sync(tmp_path), bf16_weights()
    sync.send(sync.export(weights))
    weights["layer.0"] += 1
    damaged = {**weights, "layer.3": weights["layer.3"].clone()}
    damaged["layer.3"][5, 7] += 1
    sync.export(weights)
    chunks = OfferedWeights(sync.offer, lambda: in_chunks(damaged.items(), bucket_bytes=600))
    (Path(sync.offer.folder) / MANIFEST).unlink()
    with pytest.raises(OtherWeights, match="are not those that the trainer has sent"):
        if embedded:
            list(CopiedWeights(LocalCopy(sync.copy(sync.hosts[0])), chunks, "2"))
        else:
            sync.send(chunks)
    assert not contents(sync).exists()


def test_a_new_host_and_a_run_that_resumes_get_all_weights(tmp_path):
    sync, weights = Sync(tmp_path), bf16_weights()
    sync.send(sync.export(weights))
    sync.hosts.append(Host(2, tmp_path))
    weights["layer.1"] *= 2
    assert sync.send(sync.export(weights)) == 1
    resumed = Sync(tmp_path)  # the copies of the hosts are still there, with other weights of the same version
    older = bf16_weights(seed=1)
    assert resumed.send(resumed.export(older)) is None
    older["layer.1"] *= 2
    assert resumed.send(resumed.export(older)) == 0
    assert all(same(host.weights, older) for host in resumed.hosts)


def test_engines_of_one_host_share_its_copy(tmp_path):
    sync, weights = Sync(tmp_path), bf16_weights()
    sync.hosts[1].copies = sync.hosts[0].copies
    sync.send(sync.export(weights))
    weights["layer.1"] *= 2
    assert sync.send(sync.export(weights)) == 0
    assert all(same(host.weights, weights) for host in sync.hosts)


@pytest.mark.parametrize(
    "other", [{"renamed": torch.ones(3)}, {"w": torch.ones(4)}, {"w": torch.ones(3).bfloat16()}, {}]
)
def test_weights_of_another_form_have_no_delta(tmp_path, other):
    writer = DeltaWriter(tmp_path)
    base = {"v": torch.ones(2)}
    assert writer.update([WeightChunk(base | {"w": torch.ones(3)})]) is None
    assert writer.update([WeightChunk(base | other)]) is None
    assert not list(tmp_path.iterdir())
    assert writer.update([WeightChunk(base | other)]) is not None


def test_an_export_that_fails_halfway_leaves_nothing_to_compare_with(tmp_path):
    def failing():
        yield WeightChunk({"v": torch.zeros(2)})
        raise RuntimeError("a rank was lost")

    writer = DeltaWriter(tmp_path)
    chunks = [WeightChunk({"v": torch.ones(2)}), WeightChunk({"w": torch.ones(2)})]
    assert writer.update(chunks) is None
    with pytest.raises(RuntimeError, match="a rank was lost"):
        writer.update(failing())
    assert writer.update(chunks) is None
    assert writer.update(chunks).changed == 0
    assert [folder.name for folder in tmp_path.iterdir()] == ["delta_0000004"]


def test_the_weights_of_the_last_two_updates_can_be_asked_for(tmp_path):
    """Engines may still be taking an update when the trainer writes the next one."""
    writer, random = DeltaWriter(tmp_path), np.random.default_rng(0)
    sent = [first_weights(random)]
    writer.update([WeightChunk(sent[0])])
    identities = []
    for share in (0.0, 1e-2, 0.2, 1.0, 0.0):
        sent.append(changed(random, sent[-1], share))
        identities.append(writer.update(in_chunks(sent[-1].items(), bucket_bytes=600)).result)
        for weights, identity in zip(sent[-1:-3:-1], identities[-1:-3:-1], strict=False):
            chunks = [unpack(chunk).tensors for chunk in writer.whole(identity)]
            assert same({name: tensor for tensors in chunks for name, tensor in tensors.items()}, weights)
    with pytest.raises(RuntimeError, match="older than the two newest"):
        next(writer.whole(identities[1]))
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["delta_0000005", "delta_0000006"]


def test_the_next_update_waits_for_weights_that_are_being_read(tmp_path):
    """As when an engine asks for all weights while the trainer exports the next ones."""
    writer, of = DeltaWriter(tmp_path), lambda value: [WeightChunk({"w": torch.full((1000,), value)})]
    writer.update(of(1.0))
    offer = writer.update(of(2.0))
    reading = writer.whole(offer.result)
    chunk = next(reading)
    with ThreadPoolExecutor(1) as thread:
        next_update = thread.submit(writer.update, of(3.0))
        with pytest.raises(TimeoutError):
            next_update.result(timeout=0.2)
        assert unpack(chunk).tensors["w"].unique() == 2.0
        reading.close()
        assert next_update.result(timeout=60)


def test_an_embedded_engine_reads_the_copy(tmp_path):
    sync, weights = Sync(tmp_path), bf16_weights()
    copy = LocalCopy(tmp_path / "copy")

    def read(chunks):
        return {n: t for chunk in CopiedWeights(copy, chunks, str(sync.version)) for n, t in chunk.tensors.items()}

    assert same(read(sync.export(weights)), weights)
    weights["layer.3"] *= 3
    chunks = sync.export(weights)
    assert same(read(chunks), weights) and chunks.refusals == 0
    assert same(read(chunks), weights), "a second pass, as after a restart"
    weights["layer.3"] *= 3
    chunks = sync.export(weights)
    flip(of_delta(sync, 0), 200)
    assert same(read(chunks), weights) and chunks.refusals == 1


def test_the_old_copy_of_an_embedded_engine_is_gone_before_another_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(logging.getLogger("miles.engine.weight_sync.deltas"), "disabled", True)  # pytest keeps records
    sync, weights = Sync(tmp_path), bf16_weights()
    copy = LocalCopy(tmp_path / "copy")
    list(CopiedWeights(copy, sync.export(weights), "1"))
    sync.export({name: weight + 1 for name, weight in weights.items()})
    flip(of_delta(sync, 0), 200)

    def fetched():
        in_use = Path("/proc/self/maps").read_text().splitlines()  # also deleted files, which take room until then
        assert not [line for line in in_use if str(copy.folder) in line]
        return in_chunks(weights.items(), bucket_bytes=600)

    with pytest.raises(OtherWeights):
        list(CopiedWeights(copy, OfferedWeights(sync.offer, fetched), "2"))


def test_a_folder_of_another_user_is_not_entered(tmp_path, monkeypatch):
    copy = LocalCopy(tmp_path / "copy")
    copy.adopt([WeightChunk({"w": torch.ones(2)})], "1")
    assert (copy.folder.stat().st_mode & 0o777) == 0o700
    monkeypatch.setattr("os.getuid", lambda: copy.folder.stat().st_uid + 1)
    with pytest.raises(PermissionError, match="another user's; choose another --update-weight-copy-dir"):
        copy.adopt([WeightChunk({"w": torch.ones(2)})], "2")


def test_a_manifest_that_names_other_folders_is_refused(tmp_path):
    sync, weights = Sync(tmp_path), bf16_weights()
    sync.send(sync.export(weights))
    weights["layer.0"] += 1
    chunks = sync.export(weights)
    path = Path(sync.offer.folder) / MANIFEST
    manifest = json.loads(path.read_text())
    manifest["files"] = {f"../{name}": of for name, of in manifest["files"].items()}
    path.write_text(json.dumps(manifest))
    assert sync.send(chunks) == 2 and all(same(host.weights, weights) for host in sync.hosts)
