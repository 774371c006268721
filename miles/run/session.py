"""The Ray session of one run and the placement of its actors."""

from __future__ import annotations

import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psutil
import ray
from ray._private.node import Node
from ray._private.state import available_resources_per_node
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from miles.base.attributes import set_within
from miles.base.disk_faults import WriteFailed
from miles.base.flags import count
from miles.base.host import has_gpu
from miles.base.locks import release_at_end
from miles.base.processes import importing_miles, kill_all
from miles.base.text import few_lines, tell
from miles.config.cluster import ClusterArguments
from miles.run.cpu_tuning import malloc_environment
from miles.run.failure_files import FailureFiles
from miles.run.failures import cause_of, is_death, is_stopped_soon
from miles.run.liveness import ActorLost
from miles.run.local_access import loopback_environment, loopback_only, make_token_private, private_session_root
from miles.run.placement import GpuSlot, check_engines, choose_nodes, find_slots, is_as_asked, ranks_by_node
from miles.run.ray_watch import RayWatch, are_alive, own_node, parts_of_ray
from miles.run.run_guard import END_SECONDS, RunGuard
from miles.run.stop_requests import StopRequests, stops_later

if TYPE_CHECKING:
    from miles.run.restarts import Continuation

PLACEMENT_SECONDS = 300
CHOSEN_SECONDS = 20  # for bundles on chosen nodes, whose devices are free
NODE_ID = "ray.io/node-id"  # the label that Ray gives every node
START_TRIES = 3
_NO_MESSAGES = "99"  # of PyTorch's profiler, which prints when it starts and stops
SENDER_SHARE = 0.1  # of a GPU, for a process that broadcasts weights from it
RAY_DEFAULTS = {
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_prestart_worker_first_driver": "0",  # Ray would start a worker per CPU, and further ones for the actors
    "RAY_worker_niceness": "0",  # Ray's own 15 starves trainer and engine alongside anything else that runs
}
# A local Ray records no task events, which only its dashboard and state API read: for each call the GCS would keep
# 3 KiB, up to 100,000 calls, and each worker has 5 MiB and more threads to report them.
LOCAL_RAY = {"RAY_task_events_report_interval_ms": "0"}


@dataclass(frozen=True)
class EngineLayout:
    """The servers that a run starts: ``count`` engines of ``size`` devices each; 0 with the embedded engine.

    ``with_trainer`` is false in a run without a trainer, whose only devices are those for generation. The devices of
    an engine are on ``nodes`` nodes, as many on each.
    """

    count: int = 0
    size: int = 1
    with_trainer: bool = True
    nodes: int = 1

    @property
    def per_node(self) -> int:
        """The devices that an engine has on each of its nodes."""
        return self.size // self.nodes


@dataclass
class Placement:
    """The bundles of a run's actors: one per trainer rank and, unless colocated, bundles for generation.

    With the embedded engine, generation has one bundle of one device, for the rollout actor. With servers it has one
    bundle per server and node; the rollout actor then computes nothing and shares the bundle of the first trainer rank,
    from whose GPU it sends the weights (NCCL refuses to send from the GPU of an engine). With ``--colocate`` it has no
    GPU.
    """

    group: PlacementGroup | None  # None before ``place``
    cluster: ClusterArguments
    device: str  # cpu or cuda
    engines: EngineLayout
    slots: tuple[GpuSlot, ...] = ()  # the GPU of each trainer rank; none on CPU, where rank i takes bundle i
    nodes: frozenset[str] = frozenset()  # the ids of all nodes with bundles

    def renew(self) -> None:
        """Take other devices for a new attempt of the run, if a node of a joined cluster with some of them was lost.

        Raises:
            ActorLost: If the cluster does not have the devices in time.
        """
        if not self.cluster.ray_address or are_alive(self.nodes):
            return
        print(f"note: a node was lost; waiting up to {PLACEMENT_SECONDS} s until the cluster has other devices")
        self.remove()
        try:
            self.place()
        except ValueError as error:
            raise ActorLost(None, f"a node of the cluster was lost, and {error}") from None

    def place(self) -> None:
        """Reserve the devices. Raises ``ValueError`` if the cluster does not have them in time."""
        bundles = _bundles(self.cluster, self.engines, self.device)
        group = self.group = _place(bundles, self.cluster)
        if self.engines.with_trainer:
            group = self.group = _on_nodes_as_asked(group, bundles, self.cluster)
            self.slots = find_slots(group, self.cluster.world_size) if self.device == "cuda" else ()
        if self.cluster.colocate and self.engines.count:
            check_engines(self.slots, self.engines.size, self.engines.per_node)
        if self.cluster.ray_address:
            self.nodes = frozenset(_nodes_of_bundles(group))

    def remove(self) -> None:
        """Release the devices, if there are any."""
        if self.group is not None:
            remove_placement_group(self.group)
            self.group = None

    def trainer_options(self, rank: int) -> dict[str, Any]:
        """Return the Ray actor options of trainer rank ``rank``."""
        return self._options(self._bundle(rank), self._share - self._sender_share)

    def rollout_options(self) -> dict[str, Any]:
        """Return the Ray actor options of the rollout actor."""
        if self.engines.count:
            return self._options(self._bundle(0), self._sender_share)
        return self._options(self._bundle(0) if self.cluster.colocate else self._first_engine, self._share)

    def generation_worker_options(self) -> dict[str, Any]:
        """Return the Ray actor options of a generation worker, which computes nothing: it is next to the rollout actor.

        The router in front of the servers may listen on that node only.
        """
        options = self.rollout_options()
        return options | {name: 0 for name in ("num_cpus", "num_gpus") if name in options}

    def engine_options(self, number: int, node: int = 0) -> dict[str, Any]:
        """Return the Ray actor options of engine ``number``, on its node ``node``."""
        part = number * self.engines.nodes + node
        if self.cluster.colocate:
            return self._options(self._bundle(part * self.engines.per_node), self._share)
        return self._options(self._first_engine + part, float(self.engines.per_node))

    def engine_gpus(self, number: int, node: int = 0) -> tuple[str, ...]:
        """Return the GPUs of engine ``number`` on its node ``node``: the GPUs of consecutive ranks.

        Empty if its actor has them on its own. Otherwise Ray shows the actor the GPU of its own bundle only, and the
        other bundles of the engine belong to trainer ranks.
        """
        if not (self.cluster.colocate and self.slots):
            return ()
        size = self.engines.per_node
        first = (number * self.engines.nodes + node) * size
        return tuple(slot.gpu for slot in self.slots[first : first + size])

    def _bundle(self, rank: int) -> int:
        return self.slots[rank].bundle if self.slots else rank

    @property
    def _first_engine(self) -> int:
        """The first bundle for generation, on separate devices."""
        return self.cluster.world_size if self.engines.with_trainer else 0

    @property
    def _share(self) -> float:
        return 0.5 if self.cluster.colocate else 1.0  # two actors on one bundle, or one

    @property
    def _sender_share(self) -> float:
        sends = self.engines.count > 0 and self.engines.with_trainer and not self.cluster.colocate
        return SENDER_SHARE if sends and self.device == "cuda" else 0.0

    def _options(self, bundle: int, share: float) -> dict[str, Any]:
        strategy = PlacementGroupSchedulingStrategy(self.group, bundle)  # type: ignore[arg-type]  # place() comes first
        resources = {"num_gpus": share, "num_cpus": 0} if self.device == "cuda" else {"num_cpus": share}
        return {"scheduling_strategy": strategy, "max_restarts": 0, **resources}


@contextmanager
def ray_session(
    cluster: ClusterArguments,
    engines: EngineLayout | None = None,
    on_loss: Callable[[str], Continuation | int] | None = None,
    files: FailureFiles | None = None,
) -> Iterator[Placement]:
    """Start a local Ray or join the one at ``--ray-address``; on exit, release what this run took and nothing else.

    If Ray itself dies, nothing can be released in order: this process then ends at once, or becomes another program
    that continues the run.

    Args:
        cluster: The flags on the cluster.
        engines: The servers that the run starts.
        on_loss: States what happened to Ray before the process ends, and returns the exit status, 1 without it, or how
            the run continues.
        files: Gets the folder of Ray's logs.

    Raises:
        ValueError: If the cluster does not have the devices that the run needs, or this process has a Ray already.
        ConnectionError: If no Ray answers at ``--ray-address``.
    """
    if ray.is_initialized():
        raise ValueError("Ray is connected in this process already; call ray.shutdown() before the run")
    device = resolve_device(cluster)
    engines = engines or EngineLayout()
    placement = Placement(None, cluster, device, engines)
    num_cpus = int(sum(bundle["CPU"] for bundle in _bundles(cluster, engines, device)))
    for name, value in RAY_DEFAULTS.items():
        os.environ.setdefault(name, value)
    # Actors import the same miles as the launcher, also when it runs from a checkout that is not installed.
    environment = {**importing_miles(), **malloc_environment(device, os.environ)}
    environment.setdefault("KINETO_LOG_LEVEL", os.environ.get("KINETO_LOG_LEVEL", _NO_MESSAGES))
    guard: RunGuard | None = None
    watch: RayWatch | None = None

    try:
        if not cluster.ray_address:
            guard = RunGuard(private_session_root())
            if files is not None:
                files.run_folder = guard.folder
        _connect(cluster, device, num_cpus, environment, guard)
        watch = RayWatch(parts_of_ray(), lambda loss: _end_after(loss, guard, on_loss), own_node())
        placement.place()
        yield placement
    finally:
        try:
            if watch is not None:
                watch.end_with_ray()
            placement.remove()
            ray.shutdown()
        finally:  # also if a signal interrupts this
            if guard is not None:
                guard.close()


@contextmanager
def keeping_logs(files: FailureFiles, stop: StopRequests) -> Iterator[None]:
    """Keep Ray's logs if the block, inside a session, fails for a reason that they may tell.

    A worker that died of the signal which stops the run, as one to all processes does, is no failure.
    """
    try:
        yield
    except Exception as error:
        is_explained = isinstance(cause_of(error), ValueError | WriteFailed | BrokenPipeError)
        if not is_explained and not (is_death(error) and is_stopped_soon(stop)):
            files.keep_ray_logs()
        raise


def _end_after(loss: str, guard: RunGuard | None, on_loss: Callable[[str], Continuation | int] | None) -> None:
    """End the process after the loss of Ray, also if ``on_loss`` fails."""
    result: Continuation | int = 1
    try:
        if on_loss is None:
            print(loss, file=sys.stderr)
        else:
            result = on_loss(loss)
    except BaseException:  # the process ends, whatever it was
        with suppress(Exception):
            print(few_lines(traceback.format_exc()), file=sys.stderr)
    finally:
        end_at_once(guard, result)


def end_at_once(guard: RunGuard | None, result: Continuation | int = 1) -> None:
    """End the rest of the run, and this process. Calls nothing of Ray, which may wait for ever or complain.

    The locks of its folders are released if no other process of the run is left: those on a joined cluster may be.

    Args:
        guard: Cleans up after a local Ray.
        result: The exit status. With a continuation this process becomes its program, with the same process id, output
            and input.
    """
    output = {number: os.dup(number) for number in (1, 2)}
    with open(os.devnull, "wb") as nothing:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # nobody reads it any more
                stream.flush()
        for number in (1, 2):  # no messages of other threads and Ray about the consequences
            os.dup2(nothing.fileno(), number)
    status = 1
    try:
        has_ended = guard is not None and guard.close()
        if isinstance(result, int):
            status = result
            if has_ended:
                release_at_end()
        else:
            result.take_over(output)
    finally:
        os._exit(status)


@contextmanager
def _starting(guard: RunGuard | None) -> Iterator[None]:
    """Handle a signal that stops the run after the block, where Ray starts; a second one ends this process.

    Handlers raise, and where Ray's native code calls Python that ends the process with "Aborted". Nor may Ray set its
    own handler for SIGTERM, which exits.
    """

    def end(number: int) -> None:
        tell(f"stopped by {signal.Signals(number).name} while Ray was starting")
        end_at_once(guard, 128 + number)

    with set_within(ray._private.utils, set_sigterm_handler=lambda handler: None), stops_later(end):
        yield


def _connect(
    cluster: ClusterArguments, device: str, num_cpus: int, environment: dict[str, str], guard: RunGuard | None
) -> None:
    if guard is None:
        # A job of ``ray job submit`` has a runtime environment, and its PYTHONPATH is in ours already.
        os.environ["RAY_OVERRIDE_JOB_RUNTIME_ENV"] = "1"
        with _starting(guard):
            ray.init(address=cluster.ray_address, runtime_env={"env_vars": environment}, log_to_driver=True)
    else:
        # Ray warns that its local cluster uses a token. That is intended, and the user need not act on it.
        logging.getLogger("ray._private.authentication.authentication_token_setup").setLevel(logging.ERROR)
        # Locally, Ray's CPUs only count processes: one per process, however many cores the machine has. Ray starts as
        # many processes at the same time, so there are CPUs for the trainer and the rollout worker.
        environment |= loopback_environment(os.environ)
        environment |= {name: value for name, value in LOCAL_RAY.items() if name not in os.environ}
        # On GPUs Ray chooses both: a weight update puts a whole model into the object store.
        cpus, store_bytes = (max(num_cpus, 2), 1024**3) if device == "cpu" else (None, None)
        # Inherited by Ray's processes, so that Ray need not set up a runtime environment for each worker.
        with _in_environment(environment):
            _start_local(cpus, store_bytes, guard)


@contextmanager
def _in_environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for the processes that the block starts."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def without_extras() -> AbstractContextManager[object]:
    """Have a local Ray that the block starts leave out its autoscaler and its dashboard, which no run uses.

    Each would be a process that imports all of Ray and listens. ``include_dashboard=False`` starts a dashboard without
    pages.
    """

    def start_nothing(node: Node, **options: Any) -> None: ...

    return set_within(Node, start_monitor=start_nothing, start_api_server=start_nothing)


def _start_local(num_cpus: int | None, store_bytes: int | None, guard: RunGuard) -> None:
    """Start Ray on this machine, and try again if its 30 s are not enough on a busy one."""
    make_token_private()
    for attempt in range(1, START_TRIES + 1):
        try:
            with loopback_only(), without_extras(), _starting(guard):
                ray.init(
                    address="local",  # not the cluster that was started last on this host, which Ray notes in a file
                    num_cpus=num_cpus,
                    include_dashboard=False,
                    log_to_driver=True,
                    logging_level=logging.WARNING,
                    object_store_memory=store_bytes,
                    _temp_dir=str(guard.folder),
                )
            return
        except Exception as error:  # Ray raises no separate type here
            ray.shutdown()
            _end_failed_start(guard)
            if "timed out during startup" not in str(error):
                raise
            if attempt == START_TRIES:
                raise ValueError(
                    f"Ray did not start on this machine within 30 s, {START_TRIES} times in a row; start the run again "
                    "when fewer processes compete for the cores, or start Ray yourself and give --ray-address"
                ) from None
            tell(f"Ray did not start within its 30 s; trying again ({attempt} of {START_TRIES - 1})")


def _end_failed_start(guard: RunGuard) -> None:
    """End the processes of a Ray that did not start, which Ray ends with the launcher only (2.60 _private/node.py).

    They would take the cores from the next try.
    """
    ended: list[psutil.Process] = []
    for child in psutil.Process().children():
        with suppress(psutil.Error):
            if child.pid != guard.pid and any(str(guard.folder) in word for word in child.cmdline()):
                ended += [child, *child.children(recursive=True)]
    kill_all(ended, END_SECONDS)


def resolve_device(cluster: ClusterArguments) -> str:
    """Return ``--device``, with auto resolved to cuda if PyTorch sees a GPU."""
    if cluster.device != "auto":
        return cluster.device
    if not has_gpu():
        return "cpu"
    import torch  # not at the top: it takes seconds

    return "cuda" if torch.cuda.is_available() else "cpu"


def _bundles(cluster: ClusterArguments, engines: EngineLayout, device: str) -> list[dict[str, float]]:
    """Return the bundles to request: one per trainer rank, then those for generation. On CPU a device is one CPU."""
    sizes = [1] * cluster.world_size if engines.with_trainer else []
    if not cluster.colocate:
        sizes += [engines.per_node] * (engines.count * engines.nodes) or [1]
    return [{"CPU": 1.0, "GPU": float(size)} if device == "cuda" else {"CPU": float(size)} for size in sizes]


def _on_nodes_as_asked(
    group: PlacementGroup, bundles: list[dict[str, float]], cluster: ClusterArguments
) -> PlacementGroup:
    """Return ``group``, or replace it by one whose ranks are on as many nodes as the flags say.

    Ray is asked for certain nodes only if it has chosen others on its own, since bundles that ask for a node cannot run
    if it is lost. With several nodes, the nodes of the ranks are printed.
    """
    names = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    if len(names) == 1:
        return group
    ranks = cluster.world_size
    num_nodes, per_node = cluster.actor_num_nodes, cluster.actor_num_gpus_per_node
    nodes = _nodes_of_bundles(group)
    if not is_as_asked(nodes[:ranks], num_nodes, per_node):
        device = "GPU" if "GPU" in bundles[0] else "CPU"
        free = {node: have.get(device, 0.0) for node, have in available_resources_per_node().items()}
        for node, bundle in zip(nodes, bundles, strict=True):
            free[node] = free.get(node, 0.0) + bundle[device]
        chosen = choose_nodes(free, num_nodes, per_node, [bundle[device] for bundle in bundles[ranks:]])
        if chosen is not None:
            remove_placement_group(group)
            selectors: list[dict[str, str]] = [{} for _ in bundles]
            for rank in range(ranks):
                selectors[rank] = {NODE_ID: chosen[rank // per_node]}
            on_chosen = _reserve(bundles, CHOSEN_SECONDS, selectors)
            group = on_chosen or _place(bundles, cluster)  # Ray may put engines on the nodes of the ranks
            nodes = _nodes_of_bundles(group)
    rank_nodes = nodes[:ranks]
    by_node = sorted(rank_nodes, key=rank_nodes.index)  # as in_order, which numbers ranks on GPUs
    where = ranks_by_node(by_node if "GPU" in bundles[0] else rank_nodes, names)
    print(f"placement: {where}")
    if not is_as_asked(rank_nodes, num_nodes, per_node):
        wanted = f"--actor-num-nodes {num_nodes} with {count(per_node, 'device')} each"
        print(f"note: the cluster has no room for {wanted} and the engines, or Ray found none: it has chosen the nodes")
    return group


def _nodes_of_bundles(group: PlacementGroup) -> list[str]:
    """Return the node of each bundle; the bundles of the trainer's ranks come first."""
    nodes: dict[int, str] = placement_group_table(group)["bundles_to_node_id"]
    return [nodes[bundle] for bundle in range(len(nodes))]


def _reserve(
    bundles: list[dict[str, float]], seconds: float, selectors: list[dict[str, str]] | None = None
) -> PlacementGroup | None:
    """Reserve the bundles, each on a node with the labels of its selector; None if Ray has not done so in time."""
    group: PlacementGroup = placement_group(bundles, strategy="PACK", bundle_label_selector=selectors)
    ready, _ = ray.wait([group.ready()], timeout=seconds)
    if ready:
        return group
    remove_placement_group(group)
    return None


def _place(bundles: list[dict[str, float]], cluster: ClusterArguments) -> PlacementGroup:
    group = _reserve(bundles, PLACEMENT_SECONDS)
    if group is None:
        have = ray.cluster_resources()
        gpus = sum(bundle.get("GPU", 0) for bundle in bundles)
        raise ValueError(
            f"the run needs {len(bundles)} bundles with {sum(bundle['CPU'] for bundle in bundles):g} CPUs and "
            f"{gpus:g} GPUs, but Ray has {have.get('CPU', 0):g} CPUs and "
            f"{have.get('GPU', 0):g} GPUs (waited {PLACEMENT_SECONDS} s); lower --actor-num-gpus-per-node "
            f"(now {cluster.actor_num_gpus_per_node}) or --rollout-num-gpus, add --colocate, or free the cluster"
        )
    return group
