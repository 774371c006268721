"""Find out which node and GPU each bundle of a placement group has, and order them: rank i takes slot i.

Ray packs bundles onto as few nodes as it can: of two nodes of eight GPUs, one would hold two times four ranks.
"""

import gc
import json
import os
import pickle
import secrets
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import ray
import ray.exceptions
from ray._common.utils import get_default_system_temp_dir
from ray._private import ray_constants
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from miles.base.disk_faults import WriteFailed
from miles.base.host import GIB, memory_bytes
from miles.base.locks import reading
from miles.config.checkpoint import NOT_OF_ITS_OWN
from miles.config.host_share import threads
from miles.config.settings import Settings
from miles.run.failures import FailureFiles, cause_of, in_one_line, is_death, is_stopped_soon, show
from miles.run.resume import resume_point
from miles.run.stop_requests import StopRequests
from miles.training.checkpoint_files import newest

_PROBE_SHARE = 0.01  # of a GPU, for a task that looks at it


@dataclass(frozen=True)
class GpuSlot:
    """A GPU that a bundle holds.

    Attributes:
        bundle: The bundle's index in its placement group.
        node: The Ray node.
        gpu: The GPU, as CUDA_VISIBLE_DEVICES of that node names it.
    """

    bundle: int
    node: str
    gpu: str


def find_slots(group: PlacementGroup, bundles: int) -> tuple[GpuSlot, ...]:
    """Return the slots of the first ``bundles`` bundles, each of one GPU: node by node, and by device in a node.

    Ray fills bundles in any order, so consecutive ranks would otherwise be on different nodes.
    """
    probe = ray.remote(num_cpus=0, num_gpus=_PROBE_SHARE)(_look)
    calls = [
        probe.options(
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
        ).remote()
        for bundle in range(bundles)
    ]
    return in_order([GpuSlot(bundle, *found) for bundle, found in enumerate(ray.get(calls))])


def _look() -> tuple[str, str]:
    return ray.get_runtime_context().get_node_id(), str(ray.get_gpu_ids()[0])


def in_order(slots: Sequence[GpuSlot]) -> tuple[GpuSlot, ...]:
    """Order slots by node, the node of the first bundle first, and by device.

    >>> [slot.bundle for slot in in_order([GpuSlot(0, "b", "1"), GpuSlot(1, "a", "0"), GpuSlot(2, "b", "0")])]
    [2, 0, 1]
    """
    nodes = list(dict.fromkeys(slot.node for slot in slots))

    def key(slot: GpuSlot) -> tuple[int, int, str]:
        return nodes.index(slot.node), int(slot.gpu) if slot.gpu.isdigit() else 0, slot.gpu

    return tuple(sorted(slots, key=key))


def is_as_asked(nodes_of_ranks: Sequence[str], nodes: int, per_node: int) -> bool:
    """Return whether the ranks are on ``nodes`` nodes, ``per_node`` on each."""
    return list(Counter(nodes_of_ranks).values()) == [per_node] * nodes


def choose_nodes(
    free: Mapping[str, float], nodes: int, per_node: int, engines: Sequence[float] = ()
) -> list[str] | None:
    """Return the nodes for the ranks: those with the fewest free devices that suffice, so that larger ones stay free.

    None if there are not enough, or the engines do not fit alongside the ranks.

    Args:
        free: The free devices of each node.
        nodes: How many nodes the ranks have.
        per_node: Their devices on each.
        engines: The devices of each part of an engine, which is on one node; all have as many.

    >>> choose_nodes({"a": 8, "b": 4, "c": 3, "d": 4}, nodes=2, per_node=4)
    ['b', 'd']
    """
    chosen = [node for node in sorted(free, key=lambda node: free[node]) if free[node] >= per_node][:nodes]
    left = [have - (per_node if node in chosen else 0) for node, have in free.items()]
    room = sum(int(have // engines[0]) for have in left) if engines else 0
    return chosen if len(chosen) == nodes and room >= len(engines) else None


def ranks_by_node(nodes_of_ranks: Sequence[str], names: Mapping[str, str]) -> str:
    """Say which ranks are on which node; ``names`` is what to call each.

    >>> ranks_by_node(["a", "a", "a", "b"], {"a": "10.0.0.1", "b": "10.0.0.2"})
    'ranks 0-2 on 10.0.0.1, 3 on 10.0.0.2'
    """
    parts = []
    for node in dict.fromkeys(nodes_of_ranks):
        ranks = [rank for rank, of_rank in enumerate(nodes_of_ranks) if of_rank == node]
        follows = len(ranks) > 1 and ranks == list(range(ranks[0], ranks[-1] + 1))
        numbers = f"{ranks[0]}-{ranks[-1]}" if follows else " ".join(map(str, ranks))
        parts.append(f"{numbers} on {names.get(node, node)}")
    return f"ranks {', '.join(parts)}"


def check_engines(slots: Sequence[GpuSlot], size: int, per_node: int) -> None:
    """Check that every process of an engine has its devices, ``per_node`` consecutive slots, on one node.

    Args:
        slots: The slots of all engines.
        size: The devices of an engine.
        per_node: Its devices on each of its nodes.

    Raises:
        ValueError: Ray has spread the devices so that one has not.
    """
    for first in range(0, len(slots), per_node):
        nodes = list(dict.fromkeys(slot.node for slot in slots[first : first + per_node]))
        if len(nodes) > 1:
            held = " and ".join(str(sum(slot.node == node for slot in slots)) for node in nodes)
            devices = "the devices" if per_node == size else f"{per_node} devices"
            raise ValueError(
                f"--rollout-num-gpus-per-engine {size}: with --colocate {devices} of engine {first // size} are on "
                f"{len(nodes)} nodes, which hold {held} of the trainer's devices; free whole nodes, or give a smaller "
                "engine"
            )


# Settings of worker processes: their share of the cores, the memory that their allocator keeps, faster imports.


_PLENTY = 16 * GIB  # of memory: enough to keep some for speed
_LARGE_BLOCK = 2 << 20


def malloc_environment(device: str, given: Mapping[str, str], memory: int | None = None) -> dict[str, str]:
    """Return environment variables for worker processes on ``device``, without those that ``given`` already sets.

    By default glibc returns large blocks to the kernel when they are freed, which clears their pages for the next
    allocation: a fifth of the time of a training pass (docs/performance.md has the figures). A host with plenty of
    memory lets each process keep an eighth of it. On others, blocks above 2 MiB are returned. One heap instead of one
    per thread wastes less in either case. glibc reads the variables when a process starts.

    Args:
        device: Of the workers; nothing is set for CUDA.
        given: The variables that are set.
        memory: Bytes that this host may use; by default they are looked up.
    """
    if device != "cpu":
        return {}
    memory = memory_bytes() if memory is None else memory
    wanted = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": str(_LARGE_BLOCK)}
    if memory >= _PLENTY:
        wanted |= {"MALLOC_MMAP_THRESHOLD_": str(memory), "MALLOC_TRIM_THRESHOLD_": str(memory // 8)}
    return {name: value for name, value in wanted.items() if name not in given}


@contextmanager
def importing() -> Iterator[None]:
    """Disable garbage collection while the block imports, and leave the imported objects out of later collections.

    Modules stay, and they have a million objects. Passing over them takes a tenth of the time of the imports, and
    0.3 s in each later full collection.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def use_threads(device: str, sharers: int) -> None:
    """On CPU, split the cores over the ``sharers`` processes that compute at the same time (launch/host_share.py).

    Ray sets OMP_NUM_THREADS to the actor's logical CPUs, which are not cores here, so PyTorch's number of threads is
    set directly.
    """
    if device == "cpu":
        import torch  # not at the top: the launcher imports this module

        torch.set_num_threads(threads(sharers))


# Keep a Ray that a run starts on this machine to this machine and this user: its sockets, its token, its files.


LOOPBACK = "127.0.0.1"
# The collectives listen too, gloo at the address of the host's name, NCCL at the address of the first network
# interface.
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_TOKEN_BYTES = 32
_TOKEN_VARIABLES = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


def loopback_environment(given: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables that make workers' collectives listen on the loopback interface only.

    Variables that ``given`` already sets are left out.
    """
    return {name: "lo" for name in _INTERFACES if name not in given}


@contextmanager
def loopback_only() -> Iterator[None]:
    """Have a local Ray that the block starts listen on the loopback interface, and not on all of them.

    Ray replaces ``_node_ip_address="127.0.0.1"`` by the host's own address. With this switch it keeps
    127.0.0.1, as it does on systems on which it supports one machine only (macOS and Windows).
    """
    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


def make_token_private() -> None:
    """Make Ray's file with the authentication token readable for this user only; create it if there is none.

    Ray would create it readable for everybody, and whoever has the token can run code as this user. A token that is
    given in the environment is the user's own affair.
    """
    if any(os.environ.get(name) for name in _TOKEN_VARIABLES) or os.environ.get("RAY_AUTH_MODE", "token") != "token":
        return
    path = Path.home() / ".ray" / "auth_token"
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        if path.stat().st_mode & 0o077:
            path.chmod(0o600)
        return
    with os.fdopen(file, "w") as token:
        token.write(secrets.token_hex(_TOKEN_BYTES))


def private_session_root() -> Path:
    """Return a folder for the files of runs, Ray's sessions too, that only this user can enter; create it if needed.

    Ray opens the folder of a session for everybody, and again with each worker, so the folder above it must be closed.
    The log files in it hold the environment variables of workers, and its sockets belong to the raylet.

    Raises:
        ValueError: If another user has taken the name.
    """
    parent = Path(get_default_system_temp_dir()) / f"ray-{os.getuid()}"
    parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if parent.is_symlink() or parent.stat().st_uid != os.getuid():
        raise ValueError(
            f"{parent}: belongs to another user, who could read what Ray writes there; remove it, or set RAY_TMPDIR to "
            "a folder of your own"
        )
    parent.chmod(0o700)
    return parent


# ``--max-restarts``: restart a run from its last checkpoint, after a worker process or the run's own Ray has died.
#
# After the death of a worker, the launcher starts the workers again in the same Ray. If Ray itself is lost, its calls
# may wait for ever or end the process, so the launcher becomes another program, in the same process: a launcher that
# starts another Ray and resumes.


@dataclass
class Restarts:
    """How many restarts a run has left."""

    left: int

    def take(self, why: str, settings: Settings, files: FailureFiles | None = None) -> Settings:
        """Use one, and return ``settings`` changed to resume from the run's last checkpoint; reports it.

        Args:
            why: The error that ended the run.
            settings: The attempt that has ended.
            files: The files kept of its failure.

        Raises:
            ValueError: If everything that the run has saved is damaged.
        """
        resumed, notes = resuming(settings)
        for note in notes:
            print(f"note: {note}")
        start = "its last checkpoint" if resumed.checkpoint.load else "the beginning, as nothing was saved yet"
        self.left -= 1
        kept = "" if files is None else files.in_words()
        print(
            f"train.py: {why}; restarting from {start} ({self.left} restarts left){kept}", file=sys.stderr, flush=True
        )
        if files is not None:
            files.next_attempt()
        return resumed


def with_restarts(
    settings: Settings,
    attempt: Callable[[Settings], None],
    restarts: Restarts | None = None,
    files: FailureFiles | None = None,
    stop: StopRequests | None = None,
) -> None:
    """Call ``attempt(settings)``, and again if a worker process dies or fails, as often as ``restarts`` allows.

    Every further attempt resumes the newest checkpoint in ``--save``, or starts from the beginning if there is none.
    ``attempt`` leaves no process behind, however it ends. A ``ValueError`` and a full disk, which the user
    has to fix, and a failure of the launcher itself are raised at once.

    Args:
        settings: The run.
        attempt: Runs it to its end.
        restarts: How many are left; None for ``--max-restarts``.
        files: The files that are kept of a failure.
        stop: Requests to stop the run, after which it is not restarted.
    """
    restarts = Restarts(settings.cluster.max_restarts) if restarts is None else restarts
    while True:
        try:
            return attempt(settings)
        except ray.exceptions.RayError as error:
            is_stopping = stop is not None and (stop.is_requested or (is_death(error) and is_stopped_soon(stop)))
            if restarts.left == 0 or is_stopping or isinstance(cause_of(error), ValueError | WriteFailed):
                raise
            show(error)
            if files is not None:
                files.keep_ray_logs()
            settings = restarts.take(in_one_line(error), settings, files)


def resuming(settings: Settings) -> tuple[Settings, tuple[str, ...]]:
    """Return ``settings`` changed to resume from its last whole checkpoint, and notes; unchanged if none was saved.

    Raises ``ValueError`` if everything it has saved is damaged.
    """
    resumed = loading_its_own(settings)
    if resumed is settings:
        return settings, ()
    point = resume_point(resumed.checkpoint)
    return replace(resumed, checkpoint=point.checkpoint), point.notes


def loading_its_own(settings: Settings) -> Settings:
    """Return ``settings`` changed to load from ``--save``; unchanged if nothing was saved.

    Raises ``ValueError`` if the folder cannot be read.
    """
    given = settings.checkpoint
    with reading(f"--save {given.save}"):
        if given.save is None or newest(given.local(given.save)) is None:
            return settings
    whole: dict[str, Any] = dict.fromkeys(NOT_OF_ITS_OWN, False)
    return replace(settings, checkpoint=replace(given, load=given.save, **whole))


class Continuation:
    """A program that replaces this one in its process.

    Args:
        function: ``module:function``, which is called with ``state`` and exits.
        state: Anything that can be pickled. It passes through memory: no file and no command line shows it.
        environment: The environment variables of the program.
    """

    def __init__(self, function: str, state: Any, environment: Mapping[str, str]) -> None:
        self._function = function
        self._state = pickle.dumps(state)
        self._environment = dict(environment)

    def take_over(self, output: Mapping[int, int]) -> NoReturn:
        """Become the program. Its standard output and error are those that ``output`` names by their numbers."""
        state = os.memfd_create("miles-continuation")
        os.write(state, self._state)
        module, name = self._function.split(":")
        code = "import sys, json; [each.reconfigure(errors='backslashreplace') for each in (sys.stdout, sys.stderr)]; "
        code += f"sys.path[:] = json.loads(sys.argv[2]); from {module} import {name}; "
        code += f"from {__name__} import handed_over; {name}(handed_over(int(sys.argv[1])))"
        for number in map(int, os.listdir("/proc/self/fd")):
            if number > 2:
                _close_later(number)
        for number, copy in output.items():
            os.dup2(copy, number)
        os.set_inheritable(state, True)
        words = [sys.executable, "-c", code, str(state), json.dumps([path or os.getcwd() for path in sys.path])]
        os.execve(sys.executable, words, self._environment)


def handed_over(file: int) -> Any:
    """Return the state of a ``Continuation`` in the program that took over."""
    with os.fdopen(file, "rb") as state:
        state.seek(0)
        return pickle.load(state)


def _close_later(file: int) -> None:
    """Have the next program not inherit ``file``: libraries open some for all programs."""
    try:
        os.set_inheritable(file, False)
    except OSError:  # it was closed meanwhile
        return
