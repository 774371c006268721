"""Choose which iterations are recorded as traces."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Optional

from miles.base.flags import Errors, count, flag

FOLDER = "profile"  # in --output-dir
MOST_RANKS = 8  # recorded by default; --profile-ranks can name more


@dataclass(frozen=True)
class ProfilingArguments:
    """profiling: a trace of some iterations, and a table of their seconds."""

    profile: bool = flag(
        False, "record iterations in profile/ of --output-dir: a trace for Perfetto, and a table of the seconds by kind"
    )
    use_pytorch_profiler: bool = flag(False, "the same as --profile")
    profile_step_start: int = flag(
        1,
        "first iteration to record, counted from 0; iteration 0 has the warm-up in it",
        needs="--profile or --use-pytorch-profiler",
        at_least=0,
    )
    profile_step_end: Optional[int] = flag(
        None,
        "first iteration that is not recorded any more; default: one is recorded",
        needs="--profile or --use-pytorch-profiler",
        metavar="ITERATION",
    )
    profile_ranks: Optional[tuple[int, ...]] = flag(
        None,
        f"trainer ranks to record; default: the first {MOST_RANKS}",
        needs="--profile or --use-pytorch-profiler",
        at_least=0,
        nargs="+",
        type=int,
        metavar="RANK",
    )

    @property
    def is_on(self) -> bool:
        """Whether anything is recorded."""
        return self.profile or self.use_pytorch_profiler

    @property
    def iterations(self) -> range:
        """The iterations that are recorded."""
        if not self.is_on:
            return range(0)
        end = self.profile_step_start + 1 if self.profile_step_end is None else self.profile_step_end
        return range(self.profile_step_start, end)

    def ranks(self, world_size: int) -> tuple[int, ...]:
        """Return the trainer ranks that are recorded."""
        return tuple(range(min(world_size, MOST_RANKS))) if self.profile_ranks is None else self.profile_ranks


def check_profiling(profiling: ProfilingArguments, num_iterations: int | None, world_size: int, errors: Errors) -> None:
    """Check that the iterations and ranks exist.

    Args:
        profiling: The section.
        num_iterations: Iterations of the run; None if they are not known yet.
        world_size: Trainer ranks.
        errors: Collects the errors.
    """
    if not profiling.is_on:
        return
    start, end = profiling.profile_step_start, profiling.profile_step_end
    if end is not None and end <= start:
        rule = f"must be above --profile-step-start {start}: it is the first iteration that is not recorded"
        errors.refuse("profile_step_end", end, rule, f"give {start + 1} or more")
    if num_iterations is not None and start >= num_iterations:
        rule = f"the run has {count(num_iterations, 'iteration')}, counted from 0, so nothing would be recorded"
        errors.refuse("profile_step_start", start, rule, f"give at most {num_iterations - 1}")
    elif num_iterations is not None and end is not None and end > num_iterations:
        rule = f"the run has {count(num_iterations, 'iteration')}, counted from 0"
        errors.refuse("profile_step_end", end, rule, f"give at most {num_iterations}")
    wrong = [rank for rank in profiling.profile_ranks or () if not 0 <= rank < world_size]
    if wrong:
        rule = f"the run has {count(world_size, 'trainer rank')}, counted from 0"
        errors.refuse("profile_ranks", wrong[0], rule, f"give ranks from 0 to {world_size - 1}")


def explain_profiling(profiling: ProfilingArguments, output_dir: str, num_iterations: int | None) -> Iterator[str]:
    """List the profiling files of a run of so many iterations (None: not known yet) that starts at its first one."""
    if profiling.is_on:
        first, last = profiling.iterations[0], profiling.iterations[-1]
        which = f"iteration {first}" if first == last else f"iterations {first} to {last}"
        unsure = ", if the run has so many" if num_iterations is None else ""
        yield f"{output_dir}/{FOLDER}: a trace and a table of {which}{unsure}"
