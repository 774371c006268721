"""Record iterations of a run in all of its processes (``--profile``), and write a trace and a table of each."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from miles.base.disk_faults import disk_fault
from miles.base.profiling import ProcessTrace
from miles.base.recorder import LoopPhases, clock_name, clock_offset
from miles.config.profiling import FOLDER, ProfilingArguments
from miles.observe.profile import table, write_trace
from miles.run.liveness import Workers
from miles.run.rollout_actor import RolloutDriver
from miles.run.train_actor import TrainDriver

CLOCK_READINGS = 5  # of another machine's clock; the fastest counts


class IterationProfiler:
    """Records the iterations that the flags name, while the loop works on them.

    Attributes:
        on_phase: Called with every phase too.
    """

    def __init__(
        self,
        profiling: ProfilingArguments,
        output_dir: str,
        trainer: TrainDriver | None,
        rollout: RolloutDriver,
        workers: Workers,
    ) -> None:
        self.on_phase: Callable[[str | None], None] = lambda name: None
        self._profiling = profiling
        self._folder = Path(output_dir) / FOLDER
        self._trainer = trainer
        self._rollout = rollout
        self._workers = workers
        self._loop = LoopPhases()
        self._has_begun = False

    def phase(self, name: str | None) -> None:
        """Note the phase of the loop."""
        self._loop.phase(name)
        self.on_phase(name)

    def iteration(self, number: int) -> AbstractContextManager[None]:
        """Record the block if the flags name the iteration.

        A run that resumes after those iterations reports it, unless an earlier attempt has recorded them.
        """
        if not self._has_begun:
            self._has_begun = True
            self._note_missed(number)
        return self._recorded(number) if number in self._profiling.iterations else nullcontext()

    @contextmanager
    def _recorded(self, number: int) -> Iterator[None]:
        # Starting and stopping take seconds, and the processes wait: both are outside the recording.
        trainers = [] if self._trainer is None else self._trainer.profiled
        starting = [actor.start_profile.remote() for actor in trainers]
        self._rollout.start_profile()
        self._workers.results(starting)
        self._loop.begin()
        yield
        loop = self._loop.end(clock_name())
        stopping = [actor.stop_profile.remote() for actor in trainers]
        of_rollout = self._rollout.stop_profile()
        traces = [*self._workers.results(stopping), of_rollout]
        pairs = zip([*trainers, self._rollout.worker], traces, strict=True)
        processes = [self._by_own_clock(actor, trace) for actor, of_actor in pairs for trace in of_actor]
        self._write(number, loop, [process.within(loop) for process in processes])

    def _note_missed(self, first: int) -> None:
        """Name the iterations that are done before the first one of this process and were never recorded."""
        missed = [each for each in self._profiling.iterations if each < first and not self._trace(each).is_file()]
        if missed:
            which = f"iteration {missed[0]}" if len(missed) == 1 else f"iterations {missed[0]} to {missed[-1]}"
            print(
                f"note: --profile: the run continues with iteration {first}, so {which} cannot be recorded; give "
                f"--profile-step-start {first} or more",
                flush=True,
            )

    def _by_own_clock(self, actor: Any, trace: ProcessTrace) -> ProcessTrace:
        """Return the recording of a process, by this machine's clock."""
        if trace.clock == clock_name():
            return trace
        readings = []
        for _ in range(CLOCK_READINGS):
            before = time.time_ns()
            _, there = self._workers.results([actor.read_clock.remote()])[0]
            readings.append((before, there, time.time_ns()))
        return trace.shifted(-clock_offset(readings))

    def _trace(self, number: int) -> Path:
        return self._folder / f"iteration_{number}.json.gz"

    def _write(self, number: int, loop: ProcessTrace, processes: list[ProcessTrace]) -> None:
        """Write both files. A full disk does not end the run."""
        trace = self._trace(number)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            write_trace(trace, [loop, *processes])
            trace.with_name(f"iteration_{number}.txt").write_text(table(loop, processes, number), encoding="utf-8")
        except OSError as error:
            with suppress(OSError):
                trace.unlink()  # half of it would seem to be the whole
            why = disk_fault(trace, error) or error
            print(f"note: --profile: {trace} was not written, because {why}", file=sys.stderr)
            return
        print(f"note: --profile: {trace} opens in https://ui.perfetto.dev; the table is alongside it", flush=True)
