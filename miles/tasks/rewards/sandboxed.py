"""The sandbox's own process: ``python -I sandboxed.py``, with a request of ``sandbox.py`` as JSON on standard input.

It is three kinds of processes. The outermost moves into new namespaces (users, network, processes, IPC), counts the
processes, the memory and the processor time below it, and answers, a line per test. Its child is process 1 of the new
process namespace, so that everything ends with it: it makes a root that shows the interpreter and the system's
libraries, read-only, and starts the third, the program, once per test, in an empty folder in memory, under rlimits,
without privileges and without the system calls that make the kernel keep memory that no process shows. Results are
files that the program cannot see by name. Imports nothing of miles.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import resource
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

CHECK_SECONDS = 0.05  # between two looks at processes and memory
FOLDER = "/sandbox"  # the program's own, in the new root
FOLDER_BYTES = 64 << 20  # or a quarter of the memory, if that is less
FOLDER_FILES = 4096
SYSTEM_PATHS = (  # of the system, in the new root, with the interpreter's own files alongside
    *("/usr", "/bin", "/lib", "/lib32", "/lib64", "/nix/store", "/etc/alternatives", "/etc/ld.so.cache"),
    *("/etc/localtime", "/dev/null", "/dev/full", "/dev/random", "/dev/urandom"),
)
OPEN_FILES = 64
OPEN_FILE_BYTES = 256 << 10  # at most, in the buffers of a pipe (64 KiB) or of a socket (208 KiB)
SIGNALS = 256  # queued, timers included
INSIDE = 1000  # its user in the sandbox: not 0, so that starting a program drops every privilege
EPERM = 1

_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
_CLONE_NEWUSER, _CLONE_NEWPID, _CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
_MS_RDONLY = 0x1
_MS_NOSUID = 0x2
_MS_NODEV = 0x4
_MS_NOEXEC = 0x8
_MS_BIND = 0x1000
_MS_REC = 0x4000
_MS_PRIVATE = 0x40000
_MNT_DETACH = 2
_MOUNT_SETATTR = 442  # the number of the system call
_AT_FDCWD = -100
_AT_RECURSIVE = 0x8000
_MOUNT_ATTR_RDONLY = 0x1
_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 22, 2
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38

# System calls that a program does without: their numbers on x86_64 and aarch64. Through them it could have the kernel
# keep memory that no process shows: files without a name, segments, queues, keys, watches, or pages in pipes.
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_REFUSED_CALLS = {
    "memfd_create": (319, 279),
    **{"shmget": (29, 194), "semget": (64, 190), "msgget": (68, 186), "mq_open": (240, 180)},
    **{"sendfile": (40, 71), "splice": (275, 76), "tee": (276, 77), "vmsplice": (278, 75)},
    **{"inotify_init": (253, 26), "inotify_init1": (294, 26), "fanotify_init": (300, 262)},
    **{"add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219)},
    **{"io_setup": (206, 0), "perf_event_open": (298, 241), "bpf": (321, 280), "userfaultfd": (323, 282)},
}
_REFUSED_WITHOUT_NETWORK = {  # a pair of connected sockets remains, for asyncio and the pipes of multiprocessing
    **{"socket": (41, 198), "setsockopt": (54, 208), "sendmsg": (46, 211), "sendmmsg": (307, 269)},
}
_MMAP, _FCNTL = (9, 222), (72, 25)
_SHARED_ANONYMOUS, _F_SETPIPE_SZ = 0x21, 1031
_FIRST_NEW_CALL = 424  # of Linux 5.2 and later, the same everywhere; the C library does without them
_ENOSYS = 38

_libc = ctypes.CDLL(None, use_errno=True)

# Runs in the program's process. The names of the prelude are built-in, so that the program's own names hide them.
START = """
def start():
    import builtins, sys
    names = {}
    exec(sys.argv.pop(), names)
    del names["__builtins__"]
    vars(builtins).update(names)
    sys.setrecursionlimit(50_000)
    sys.set_int_max_str_digits(50_000)
    sys.argv[:] = ["answer.py"]
start()
del start
"""
SCRIPT = """
__file__ = "answer.py"
exec(compile(open(__file__, "rb").read(), __file__, "exec"))
"""
# A test that calls a function, or that follows the program's text. Statements fail a program that has replaced what
# they rely on: Python's functions, or equality by objects that equal everything.
HARNESS = """
import builtins, json, os, sys, types
def is_forged():
    if any(vars(builtins).get(name) is not value for name, value in names.items() if name not in ("print", "input")):
        return True
    classes = {object}
    while (more := {one for above in classes for one in type.__subclasses__(above)} - classes):
        classes |= more
    for one in classes:
        for make in (lambda: one, lambda: one.__new__(one)):
            try:
                if one.__module__ == "answer" and all(make() == other for other in (object(), 0, "")):
                    return True
            except Exception:
                pass
    return False
request = json.load(sys.stdin)
names = dict(vars(builtins))
answer = sys.modules["answer"] = types.ModuleType("answer")
scope = vars(answer)
exec(compile(request["program"], "answer.py", "exec"), scope)
if request["function"]:
    function = scope.get(request["function"])
    if function is None and "Solution" in scope:
        function = getattr(scope["Solution"](), request["function"])
    result = json.dumps(function(*request["arguments"]), default=lambda value: value.tolist())  # of numpy
else:
    exec(compile(request["test"], "test.py", "exec"), scope)
    result = "" if is_forged() else request["mark"]
os.write(request["result"], result.encode())
"""


def main() -> None:
    """Answer the request in lines: ``{"run": …}`` per test; ``{"refused": why}`` or ``{"ended": why}`` is the last."""
    request = json.load(sys.stdin)
    request["priority"] = max(os.getpriority(os.PRIO_PROCESS, 0), 0)  # of ordinary children
    _go_first()
    if request["isolated"]:
        try:
            _unshare(_CLONE_NEWUSER | _CLONE_NEWNET | _CLONE_NEWPID | _CLONE_NEWIPC | _CLONE_NEWUTS)
        except OSError as error:
            _answer({"refused": f"new namespaces: {error.strerror}"})
            return
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # without namespaces, a detached process becomes a child of this process
    signal.signal(signal.SIGTERM, _stop)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    try:
        reader, writer = os.pipe()
        first = os.fork()
        if first == 0:
            _first(request, reader, writer)
        os.close(writer)
        try:
            _watch(first, reader, request)
        finally:
            os.kill(first, signal.SIGKILL)  # with it, all processes of its namespace end at once
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        _end_below()


def _go_first() -> None:
    """Have this process and process 1 run before the program's forks, as far as their user may.

    RLIMIT_NPROC exempts root, so that only these two end a program that forks without end. With a priority alone they
    would get less of the processor the more there are, and lose the race on a busy host.
    """
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, -20)
    with suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))


def _have_ordinary_children() -> None:
    """Keep the settings that ``_go_first`` has made for this process from its children."""
    if os.sched_getscheduler(0) == os.SCHED_RR:
        os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(1))


def _stop(*_: Any) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once: the following calls must not be interrupted
    sys.exit(1)


def _first(request: dict[str, Any], reader: int, writer: int) -> None:
    """Be process 1: answer each test, and end."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _have_ordinary_children()
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    _prctl(_PR_SET_DUMPABLE, 0)  # the program must not read this process's memory
    os.close(reader)
    with os.fdopen(writer, "w") as file:
        try:
            if request["isolated"]:
                _close_file_system(request["folder"])
            else:
                _prctl(_PR_SET_CHILD_SUBREAPER, 1)
            _refuse_calls(request["isolated"])
            for test in request["tests"]:
                _enter_empty_folder(request)
                print(json.dumps({"run": _run(request, test)}), file=file, flush=True)
        except OSError as error:
            why = f"{error.strerror} ({error.filename})" if error.filename else str(error)
            print(json.dumps({"refused": why}), file=file, flush=True)
        except BaseException:
            print(json.dumps({"ended": traceback.format_exc()[-500:]}), file=file, flush=True)
    os._exit(0)


def _watch(first: int, reader: int, request: dict[str, Any]) -> None:
    """Pass on the lines of process 1, until it ends or must be ended."""
    top = psutil.Process(first)
    rest = b""
    number = 0
    while True:
        if select.select([reader], [], [], CHECK_SECONDS)[0]:
            chunk = os.read(reader, 1 << 20)
            if not chunk:
                break
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                sys.stdout.write(line.decode() + "\n")
            sys.stdout.flush()
            number += len(lines)
            continue
        below = top.children(recursive=True)
        if sum(_total(f"/proc/{process.pid}/status", "Threads:") or 0 for process in below) > request["processes"]:
            return _answer({"ended": f"started more than {request['processes']} processes"})
        unseen = sum(_kernel_bytes(process.pid) for process in below)
        if uses_more((process.pid for process in below), request["memory"] - unseen):
            return _answer({"ended": f"used more than {request['memory'] >> 20} MiB of memory"})
        if sum(map(_processor_seconds, below)) > request["cpu_seconds"]:
            for process in below:  # this test alone has failed; the dead are counted until process 1 has ended it
                with suppress(psutil.Error):
                    process.kill()
    if number < len(request["tests"]):
        _answer({"ended": "ended its sandbox"})


def uses_more(pids: Iterable[int], limit: int) -> bool:
    """Return whether processes hold more than ``limit`` bytes that no file backs. A page they share counts once."""
    at_most = {pid: _total(f"/proc/{pid}/status", "RssAnon:", "RssShmem:", "VmSwap:") or 0 for pid in pids}
    if sum(at_most.values()) <= limit >> 10:
        return False
    names = ("Pss_Anon:", "Pss_Shmem:", "SwapPss:")
    shares = {pid: _total(f"/proc/{pid}/smaps_rollup", *names) for pid in at_most}  # slow if it is big
    return sum(at_most[pid] if share is None else share for pid, share in shares.items()) > limit >> 10


def _total(path: str, *names: str) -> int | None:
    """Return the sum of the lines ``names``, KiB or a count; None if one is missing or the file cannot be read."""
    try:
        rows = [line.split() for line in Path(path).read_text().splitlines()]
    except OSError:
        return None
    numbers = [int(row[1]) for row in rows if row and row[0] in names]
    return sum(numbers) if len(numbers) == len(names) else None


def _kernel_bytes(pid: int) -> int:
    """Return the bytes of a process's page tables, and the most that the buffers of its open files hold."""
    try:
        files = len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:  # it has ended, or not started
        files = 0
    return ((_total(f"/proc/{pid}/status", "VmPTE:") or 0) << 10) + files * OPEN_FILE_BYTES


def _processor_seconds(process: psutil.Process) -> float:
    """Return the processor time of a process and of those it has waited for."""
    try:
        times = process.cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system + times.children_user + times.children_system)


def _end_below() -> None:
    """End and reap all processes below this one."""
    while below := psutil.Process().children(recursive=True):
        for process in below:
            with suppress(psutil.Error):
                process.kill()
        with suppress(ChildProcessError):
            os.waitpid(-1, 0)


def _run(request: dict[str, Any], test: dict[str, Any]) -> dict[str, Any]:
    """Run one test; return its exit status, output, result and the end of its errors, as text."""
    with (
        tempfile.TemporaryFile(dir=".") as stdin,
        tempfile.TemporaryFile(dir=".") as output,
        tempfile.TemporaryFile(dir=".") as errors,
        tempfile.TemporaryFile(dir=".") as result,
    ):
        if test["kind"] == "input":
            Path("answer.py").write_text(request["program"], encoding="utf-8", errors="replace")
            code, text = SCRIPT, test["input"]
        else:
            code = HARNESS
            text = json.dumps({"program": request["program"], "result": result.fileno(), **test})
        stdin.write(text.encode("utf-8", "replace"))
        stdin.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", START + code, request["prelude"]],
            stdin=stdin,
            stdout=output,
            stderr=errors,
            env={"HOME": os.getcwd(), "TMPDIR": os.getcwd(), "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"},
            pass_fds=[result.fileno()],
            start_new_session=True,
            preexec_fn=_limits(request),
        )
        try:
            status: int | None = process.wait(request["wall_seconds"])
        except subprocess.TimeoutExpired:
            status = None
        _end_all(process)
        texts = {"output": _text(output), "errors": _text(errors)[-500:], "result": _text(result)}
        return {"status": status, **texts}


def _end_all(process: subprocess.Popen[bytes]) -> None:
    """End whatever the program has started, and reap it."""
    if os.getpid() == 1:
        with suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)  # in a namespace of processes: all but this one
        with suppress(ChildProcessError):
            while True:
                os.waitpid(-1, 0)
    else:
        _end_below()
    process.returncode = 0  # reaped above


def _text(file: Any) -> str:
    file.seek(0)
    text: bytes = file.read()
    return text.decode("utf-8", "replace")


def _limits(request: dict[str, Any]) -> Callable[[], None]:
    """Return the function that the program's process calls before the program starts."""

    def limit() -> None:
        cpu = int(request["cpu_seconds"])
        resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu))
        for kind, value in (
            (resource.RLIMIT_AS, request["memory"]),
            (resource.RLIMIT_FSIZE, request["file_bytes"]),
            (resource.RLIMIT_NOFILE, OPEN_FILES),
            (resource.RLIMIT_CORE, 0),
            (resource.RLIMIT_SIGPENDING, SIGNALS),
        ):
            resource.setrlimit(kind, (value, value))
        resource.setrlimit(resource.RLIMIT_STACK, _stack_limits(request))
        if request["isolated"]:  # outside a namespace it would count all processes of the user
            resource.setrlimit(resource.RLIMIT_NPROC, (request["processes"], request["processes"]))
        os.setpriority(os.PRIO_PROCESS, 0, request["priority"])
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    return limit


def _refuse_calls(isolated: bool) -> None:
    """Have the kernel answer that it lacks ``_REFUSED_CALLS``, shared anonymous mappings and larger pipes."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    if platform.machine() not in _ARCHITECTURES:
        return
    column, architecture = _ARCHITECTURES[platform.machine()]
    names = _REFUSED_CALLS | (_REFUSED_WITHOUT_NETWORK if isolated else {})
    calls = [numbers[column] for numbers in names.values()]
    load, equal, at_least, both, end = 0x20, 0x15, 0x35, 0x54, 0x06  # of the kernel's filter language
    number, architecture_field, second_argument, fourth_argument = 0, 4, 24, 40
    steps = [
        (load, 0, 0, architecture_field),
        (equal, 0, len(calls) + 10, architecture),
        (load, 0, 0, number),
        (at_least, len(calls) + 8, 0, _FIRST_NEW_CALL),
        *((equal, len(calls) + 7 - place, 0, call) for place, call in enumerate(calls)),
        (equal, 0, 3, _MMAP[column]),
        (load, 0, 0, fourth_argument),
        (both, 0, 0, _SHARED_ANONYMOUS),
        (equal, 4, 3, _SHARED_ANONYMOUS),
        (equal, 0, 2, _FCNTL[column]),
        (load, 0, 0, second_argument),
        (equal, 1, 0, _F_SETPIPE_SZ),
        (end, 0, 0, 0x7FFF0000),  # allow
        (end, 0, 0, 0x00050000 | _ENOSYS),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = struct.pack("HP", len(steps), ctypes.addressof(code))
    if _libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, program, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "a filter of system calls: " + os.strerror(ctypes.get_errno()))


def _stack_limits(request: dict[str, Any]) -> tuple[int, int]:
    """Give the stack of each thread its share of the memory, for programs that call themselves."""
    wanted = max(8 << 20, request["memory"] // request["processes"])
    _, most = resource.getrlimit(resource.RLIMIT_STACK)
    return (wanted if most == resource.RLIM_INFINITY else min(wanted, most)), most


def _unshare(flags: int) -> None:
    """Move into new namespaces, as the user ``INSIDE``."""
    user, group = os.getuid(), os.getgid()
    if _libc.unshare(flags) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{INSIDE} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{INSIDE} {group} 1")


def _close_file_system(folder: str) -> None:
    """Change to a root that holds the interpreter and ``SYSTEM_PATHS``, read-only, and a /proc of this namespace.

    Nothing else has a name there, so neither files of the user nor Unix sockets and FIFOs of other processes can be
    opened. Being in a changed root also forbids the program further namespaces of users.
    """
    if _libc.unshare(_CLONE_NEWNS) != 0:
        raise OSError(ctypes.get_errno(), "new mounts: " + os.strerror(ctypes.get_errno()))
    _mount(None, "/", None, _MS_REC | _MS_PRIVATE)
    quiet = _MS_NOSUID | _MS_NODEV
    _mount("tmpfs", folder, "tmpfs", quiet, "size=1m,mode=755")
    root = f"{folder}/root"
    _show_interpreter(root)
    os.mkdir(root + FOLDER)
    os.mkdir(f"{root}/proc")
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        os.symlink(f"/proc/self/fd/{number}", f"{root}/dev/{name}")
    attributes = (ctypes.c_uint64 * 4)(_MOUNT_ATTR_RDONLY, 0, 0, 0)
    changed = _libc.syscall(
        _MOUNT_SETATTR,
        _AT_FDCWD,
        os.fsencode(folder),
        _AT_RECURSIVE,
        ctypes.byref(attributes),
        ctypes.sizeof(attributes),
    )
    if changed != 0:
        raise OSError(ctypes.get_errno(), "read-only mounts: " + os.strerror(ctypes.get_errno()))
    try:
        _mount("proc", f"{root}/proc", "proc", quiet | _MS_NOEXEC | _MS_RDONLY)  # root could change /proc/sys
    except OSError as error:
        if error.errno != EPERM:  # a container hides parts of its /proc, and so forbids another one
            raise
    os.chroot(root)
    os.chdir("/")


def _show_interpreter(root: str) -> None:
    """Bind the folders and files that Python needs below ``root``, and make the symbolic links that lead to it."""
    prefixes = (sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix)
    steps = [_steps(path) for path in (*SYSTEM_PATHS, *prefixes, sys.executable) if os.path.exists(path)]
    os.mkdir(root)
    bound: set[Path] = set()
    for place in sorted({Path(place) for place, _ in steps} - {Path("/")}):  # a folder comes before its content
        if bound.isdisjoint(place.parents):
            copy = Path(f"{root}{place}")
            if place.is_dir():
                copy.mkdir(parents=True, exist_ok=True)
            else:
                copy.parent.mkdir(parents=True, exist_ok=True)
                copy.touch()
            _mount(str(place), str(copy), None, _MS_BIND | _MS_REC)
            bound.add(place)
    for _, links in steps:
        for link, target in links.items():
            if bound.isdisjoint(link.parents):
                copy = Path(f"{root}{link}")
                copy.parent.mkdir(parents=True, exist_ok=True)
                if not copy.is_symlink():
                    copy.symlink_to(target)


def _steps(path: str) -> tuple[str, dict[Path, str]]:
    """Return the real path of an existing file, and the symbolic links on the way, with their targets."""
    place, links = "/", {}
    left = path.split("/")[::-1]
    while left:
        step = os.path.normpath(os.path.join(place, left.pop()))
        if os.path.islink(step):
            target = links[Path(step)] = os.readlink(step)
            place = "/" if target.startswith("/") else place
            left += target.split("/")[::-1]
        else:
            place = step
    return place, links


def _enter_empty_folder(request: dict[str, Any]) -> None:
    """Make the next test's folder the current one, without the files of the test before."""
    if request["isolated"]:
        os.chdir("/")
        _libc.umount2(FOLDER.encode(), _MNT_DETACH)  # the first time there is none
        size = min(FOLDER_BYTES, request["memory"] // 4)
        options = f"size={size},nr_inodes={FOLDER_FILES},mode=700"
        _mount("tmpfs", FOLDER, "tmpfs", _MS_NOSUID | _MS_NODEV, options)
        os.chdir(FOLDER)
    else:
        os.chdir(request["folder"])
        for left in os.listdir("."):
            shutil.rmtree(left, ignore_errors=True)
        os.chdir(tempfile.mkdtemp(dir="."))


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    words = [None if word is None else os.fsencode(word) for word in (source, target, kind, options)]
    if _libc.mount(words[0], words[1], words[2], ctypes.c_ulong(flags), words[3]) != 0:
        raise OSError(ctypes.get_errno(), f"mount {target}: {os.strerror(ctypes.get_errno())}")


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _answer(reply: dict[str, Any]) -> None:
    print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
