"""Shares of a machine: every core once, GPUs of one's own, and a default that fits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sweep_files import planned

from miles.base.flags import FlagError
from miles.commands.sweeps.run_queue import Machine, devices_of, slots
from miles.config.settings import Settings


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    return planned(tmp_path_factory.mktemp("slots"))[1][0].settings


def on_gpus(settings: Settings, ranks: int, **changes: object) -> Settings:
    cluster = replace(settings.cluster, device="cuda", actor_num_gpus_per_node=ranks, **changes)  # type: ignore[arg-type]
    return replace(settings, cluster=cluster)


@given(cores=st.sets(st.integers(0, 200), min_size=1, max_size=64), jobs=st.integers(1, 80))
def test_places_share_the_cores_evenly(settings: Settings, cores: set[int], jobs: int) -> None:
    all_slots = slots(jobs, [settings] * 80, Machine(tuple(sorted(cores)), len(cores), ()))
    shares = [slot.cores for slot in all_slots]
    assert len(shares) == jobs and all(share <= cores for share in shares)
    if jobs <= len(cores):
        assert sorted(core for share in shares for core in share) == sorted(cores)
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
    else:
        assert all(len(share) == 1 for share in shares) and frozenset().union(*shares) == cores


def test_by_default_as_many_runs_as_have_their_own_devices(settings: Settings) -> None:
    assert devices_of(settings) == 2  # a trainer rank and the engine
    many = [settings] * 20
    assert len(slots(None, many, Machine(tuple(range(9)), 9, ()))) == 4
    assert len(slots(None, many, Machine((0,), 1, ()))) == 1
    assert len(slots(None, many, Machine(tuple(range(64)), 4.5, ()))) == 2, "the control group allows 4.5 of 64 cores"
    assert len(slots(None, many[:3], Machine(tuple(range(64)), 64, ()))) == 3, "no more places than runs"


def test_a_run_sees_its_own_gpus(settings: Settings) -> None:
    run = on_gpus(settings, 2, rollout_num_gpus=1)
    machine = Machine(tuple(range(8)), 8, ("4", "5", "6", "7", "GPU-a", "GPU-b", "x"))
    all_slots = slots(None, [run] * 9, machine)
    assert [slot.environment["CUDA_VISIBLE_DEVICES"] for slot in all_slots] == ["4,5,6", "7,GPU-a,GPU-b"]
    shared = slots(4, [run] * 9, machine)
    assert len(shared) == 4 and all(len({*(slot.gpus or ())}) == 3 for slot in shared), "asked for: GPUs are shared"
    assert slots(None, [on_gpus(settings, 4, colocate=True)] * 9, machine)[0].gpus == ("4", "5", "6", "7")


def test_a_run_that_needs_more_gpus_than_there_are_is_refused(settings: Settings) -> None:
    with pytest.raises(FlagError, match="a run needs 9 GPUs and this machine has 1"):
        slots(None, [on_gpus(settings, 8)], Machine((0, 1), 2, ("0",)))


def test_a_joined_cluster_runs_one_at_a_time_unless_asked(settings: Settings) -> None:
    joined = [on_gpus(settings, 8, ray_address="10.0.0.1:6379")] * 4
    (one,) = slots(None, joined, Machine((0, 1), 2, ()))
    assert one.gpus is None and one.cores == {0, 1}
    assert len(slots(3, joined, Machine((0, 1), 2, ()))) == 3


def test_runs_with_the_same_engines_are_one_at_a_time(settings: Settings) -> None:
    """Each would write its weights to the servers that the others generate with."""
    external = replace(settings, sglang=replace(settings.sglang, rollout_external=True))
    machine = Machine(tuple(range(8)), 8, ())
    assert len(slots(None, [external] * 4, machine)) == len(slots(1, [external] * 4, machine)) == 1
    with pytest.raises(FlagError, match="--jobs 2: all runs write their weights .*; give --jobs 1, or drop"):
        slots(2, [external] * 4, machine)
    assert len(slots(2, [external, settings], machine)) == 2, "only one of them has these engines"
    train_only = replace(external, rollout=replace(external.rollout, debug_train_only=True))
    assert len(slots(2, [train_only] * 4, machine)) == 2, "nothing is generated"


def test_the_gpus_of_this_process_are_those_that_it_may_see(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia3", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert Machine.here({}, tmp_path).gpus == ("0", "1")
    assert Machine.here({"CUDA_VISIBLE_DEVICES": "3, GPU-b"}, tmp_path).gpus == ("3", "GPU-b")
    assert Machine.here({"CUDA_VISIBLE_DEVICES": ""}, tmp_path).gpus == ()
