"""The Python interface: ``miles.Settings``, ``miles.train``, ``miles.explain`` and ``miles.Run``.

>>> import miles
>>> settings = miles.Settings.from_flags("--config outputs/quickstart/run.yaml", lr=2e-5)  # doctest: +SKIP
>>> miles.train(settings).metrics()["rollout/reward"].plot()  # doctest: +SKIP
"""

from __future__ import annotations

import dataclasses
import shlex
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles.base.flags import FlagError
from miles.compat.border import read_command
from miles.config import explain as explanations
from miles.config import settings as sections
from miles.config.checkpoint import CheckpointArguments
from miles.config.files import FLAG
from miles.config.notes import grouped
from miles.config.parser import Command, judge, judge_with_hub
from miles.config.run_file import run_config
from miles.config.validate import Validated, validate
from miles.observe import run_files
from miles.observe.health import verdicts
from miles.observe.metrics_file import MetricsFile
from miles.observe.run_files import METRICS, SAMPLES, RunFiles, RunHeader, SampleFile

if TYPE_CHECKING:
    import pandas

    from miles.run.failure_files import FailureFiles
    from miles.run.stop_requests import StopRequests

REWARD_LATER = "given:later"  # stands for the function that ``train`` will be given


class Settings(sections.Settings):
    """Hold the settings of a run, checked as ``miles train`` checks its flags. Sections are attributes.

    ``settings.optimizer.lr`` is the value of ``--lr``. Make one with ``from_flags`` or ``from_yaml``.
    """

    @classmethod
    def from_flags(cls, flags: str | Sequence[str] = (), **settings: Any) -> Settings:
        """Read settings from flags, from keywords, or both; keywords win.

        Args:
            flags: A command line, as text or as words: ``"--lr 1e-5 --use-kl-loss"``. It may name ``@files`` and
                ``--config`` files.
            **settings: The same by name: ``lr=1e-5, use_kl_loss=True``. Several values are a list, names with values a
                dict; None and False take back what the flags say.

        The config of a model on the Hugging Face hub is fetched if it is not on this machine.

        Raises:
            ValueError: With one line per error, each naming the flag, its value, the rule and what to do.
        """
        words = shlex.split(flags, comments=True) if isinstance(flags, str) else list(flags)
        _, validated = judge_with_hub(lambda: read_command(words, settings), _judged)
        if validated.accepted:
            lines = "\n".join(["flags that were accepted:", *grouped(validated.accepted)])
            warnings.warn(lines, stacklevel=2)
        return cls._of(validated.settings)

    @classmethod
    def from_yaml(cls, path: str | Path, **settings: Any) -> Settings:
        """Read settings from a file, such as the run.yaml of a run; keywords win, as in ``from_flags``.

        Raises:
            ValueError: With one line per error, each naming the line of the file.
        """
        return cls.from_flags([f"{FLAG}={path}"], **settings)

    @classmethod
    def _of(cls, settings: sections.Settings) -> Settings:
        return cls(**{field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)})

    def to_yaml(self) -> str:
        """Return the text of a file for ``from_yaml`` and ``--config``, without secrets.

        A reward that ``train`` will be given is left out.
        """
        if self.reward.custom_rm_path != REWARD_LATER:
            return run_config(self)
        return run_config(dataclasses.replace(self, reward=dataclasses.replace(self.reward, custom_rm_path=None)))


def _judged(command: Command) -> Validated:
    """Validate; a reward that is only missing may be given to ``train``."""
    try:
        return judge(command)
    except FlagError as error:
        if not any(message.startswith("--rm-type or --custom-rm-path is required") for message in error.messages):
            raise
    reward = dataclasses.replace(command.settings.reward, custom_rm_path=REWARD_LATER)
    return judge(dataclasses.replace(command, settings=dataclasses.replace(command.settings, reward=reward)))


def train(settings: sections.Settings, reward: Callable[..., Any] | None = None) -> Run:
    """Train in processes that this one starts, until the run is finished.

    Args:
        settings: The settings of the run.
        reward: A reward function: takes ``samples: Sequence[miles.types.sample.Sample]``, returns one finite number per
            sample, in order; it may be ``async``. Any function will do, also a lambda or one of a notebook. It runs in
            a separate process, on a copy of what it refers to.

    Returns:
        The run, whose files are in ``settings.tracking.output_dir``.

    Raises:
        ValueError: A mistake in the settings, the data or the reward; the message states what to do.
        KeyboardInterrupt: A signal stopped the run; with ``save``, a checkpoint was written.
    """
    if settings.rehearsal.rehearse:
        raise ValueError("rehearse=True: miles.train does not rehearse; drop it, or run miles rehearse")
    folder = Path(settings.tracking.output_dir)
    from miles.run.launcher import launch  # imports Ray

    launch(validate(_with_reward(settings, reward, folder)), _raising)
    return Run.open(folder)


def explain(settings: sections.Settings) -> str:
    """Return what ``miles explain`` prints: objective, batch, layout, files and processes of the run."""
    return explanations.explain(validate(settings))


def _with_reward(settings: sections.Settings, reward: Callable[..., Any] | None, folder: Path) -> sections.Settings:
    section = settings.reward
    if reward is None:
        if section.custom_rm_path == REWARD_LATER:
            raise ValueError("reward: responses must be scored; give miles.train a function, or set rm_type")
        return settings
    if not callable(reward):
        raise ValueError(f"reward: {type(reward).__name__} is not a function; give one, or set rm_type to a name")
    if section.rm_type is not None or section.custom_rm_path not in (None, REWARD_LATER):
        name = section.rm_type or section.custom_rm_path
        raise ValueError(f"reward: the settings name a second one, {name}; give one of the two")
    from miles.run.function_file import function_path

    path = function_path(reward, folder, "reward")
    return dataclasses.replace(settings, reward=dataclasses.replace(section, custom_rm_path=path))


@contextmanager
def _raising(checkpoint: CheckpointArguments, stop: StopRequests, files: FailureFiles) -> Iterator[None]:
    """Raise what ended a run, from the process that failed."""
    from miles.run.failures import cause_of

    try:
        yield
    except Exception as error:
        cause = cause_of(error)
        if cause is error:
            raise
        raise cause from error


class Run:
    """A run's folder, read as data frames. The run may be unfinished: each call reads the files again.

    Attributes:
        folder: Its ``output_dir``.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        RunHeader.load(folder)

    @classmethod
    def open(cls, folder: str | Path) -> Run:
        """Open the ``output_dir`` of a run.

        Raises:
            ValueError: The folder holds no run.
        """
        return cls(Path(folder))

    def __repr__(self) -> str:
        return f"Run.open({str(self.folder)!r})"

    @property
    def settings(self) -> Mapping[str, Mapping[str, Any]]:
        """The settings by section, without secrets: ``run.settings["optimizer"]["lr"]``."""
        return RunHeader.load(self.folder).settings

    @property
    def provenance(self) -> Mapping[str, Any]:
        """What the run started with: versions, git state, checksums of the data, seeds, machine."""
        return RunHeader.load(self.folder).provenance

    def metrics(self) -> pandas.DataFrame:
        """Return one row per optimizer step and one column per metric; NaN if a step has none."""
        import pandas

        rows = RunFiles(self.folder).read_metrics()
        return pandas.DataFrame(rows, columns=None if rows else ["step"]).set_index("step")

    def samples(self, step: int | None = None) -> pandas.DataFrame:
        """Return one row per stored answer.

        Args:
            step: The last optimizer step of an iteration, to read its answers only; all of a long run are many.
        """
        import pandas

        if step is None:
            return pandas.DataFrame(run_files.read(self.folder / SAMPLES, "rollout_id"))
        iteration = SampleFile(self.folder / SAMPLES).iteration(step)
        return pandas.DataFrame(iteration.rows if iteration is not None and iteration.step == step else [])

    def verdicts(self) -> pandas.DataFrame:
        """Return the health verdicts of ``miles report``: one row per rule."""
        import pandas

        file = MetricsFile(self.folder / METRICS)
        file.refresh()
        results = verdicts(file, self.settings)
        return pandas.DataFrame([dataclasses.asdict(verdict) for verdict in results]).set_index("rule")
