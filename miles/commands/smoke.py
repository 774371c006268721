"""Run a training command for a few iterations on a tiny random model of the same family, and check its metrics.

Write the flags of the training command after ``--``. Everything is written into a separate folder. Exit status 0: all
checks passed; 1: a check failed; 2: wrong flags; 3: the run failed; 4: it took longer than --timeout.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import operator
import os
import pickle
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from difflib import get_close_matches
from itertools import islice
from numbers import Real
from pathlib import Path
from typing import Any

from miles.base.flags import changed, count, flag_name
from miles.base.host import has_bf16
from miles.base.junit import CheckResult, write_junit
from miles.base.processes import die_with_parent, end, same_imports
from miles.base.secrets import hide_on_command_line
from miles.base.text import InputError, one_line
from miles.base.user_code import import_function
from miles.compat.border import parse_or_exit
from miles.config.checkpoint import CheckpointArguments
from miles.config.command_parser import CommandParser
from miles.config.evaluation import EvaluationArguments
from miles.config.explain import explain
from miles.config.megatron.rules import TRIED
from miles.config.model import ModelArguments
from miles.config.rollout import RolloutArguments
from miles.config.servers.passed_on import ServerFlags
from miles.config.settings import Settings
from miles.config.tracking import TrackingArguments
from miles.config.validate import validate
from miles.objective.settings import LossArguments
from miles.observe.run_files import RunFiles
from miles.tasks.data.settings import DataArguments
from miles.tasks.rewards.registry import get_reward_function
from miles.tasks.rewards.settings import RewardArguments
from miles.types.sample import Sample

# Expectations of a run's metrics: ``eval/heldout/accuracy >= 0.9``, ``max(train/grad_norm) < 100``.


_SUMMARIES: dict[str, Callable[[Sequence[float]], float]] = {
    "last": lambda values: values[-1],
    "first": lambda values: values[0],
    "min": min,
    "max": max,
    "mean": statistics.fmean,
}
_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}
_NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
_NAME = r"[^\s()<>=!]+"
_FORM = re.compile(rf"\s*(?:(\w+)\(\s*({_NAME})\s*\)|({_NAME}))\s*(>=|<=|==|!=|>|<)\s*({_NUMBER})\s*")


@dataclass(frozen=True)
class Expectation:
    """A bound on one number that the run logs: a metric's last, first, lowest, highest or mean value over the steps."""

    text: str
    summary: str
    metric: str
    comparison: str
    bound: float

    @classmethod
    def parse(cls, text: str, where: str = "--expect") -> Expectation:
        """Read ``METRIC OP NUMBER`` or ``SUMMARY(METRIC) OP NUMBER``; without a summary it is the last value.

        Raises:
            InputError: The text has another form; the message begins with ``where``.
        """
        match = _FORM.fullmatch(text)
        if match is None:
            what_to_do = "write METRIC OP NUMBER, such as 'eval/heldout/accuracy >= 0.9'"
            raise InputError(f"{where} {one_line(text, 200)!r}: is not an expectation; {what_to_do}")
        summary, inside, alone, comparison, number = match.groups()
        if summary is not None and summary not in _SUMMARIES:
            what_to_do = f"give one of {', '.join(_SUMMARIES)}"
            raise InputError(f"{where} {one_line(text, 200)!r}: {summary} is not a summary; {what_to_do}")
        return cls(" ".join(text.split()), summary or "last", inside or alone, comparison, float(number))

    def fault(self, metrics: Mapping[str, Sequence[float]]) -> str | None:
        """Say why the run does not meet the expectation; None if it does.

        Args:
            metrics: The values of each metric, of the steps that logged it; NaN for values that are not finite.
        """
        values = metrics.get(self.metric, ())
        if not values:
            near = get_close_matches(self.metric, metrics, n=3)
            return f"the run logged no {self.metric}" + (f"; near: {', '.join(near)}" if near else "")
        bad = sum(map(math.isnan, values))
        if bad:
            return f"{self.metric} is not a finite number in {bad} of {count(len(values), 'step')}"
        value = _SUMMARIES[self.summary](values)
        if _COMPARISONS[self.comparison](value, self.bound):
            return None
        return f"{self.summary}({self.metric}) is {value:.6g}"


def read_expectations(path: Path) -> list[Expectation]:
    """Read a file with one expectation per line; empty lines and what follows ``#`` are skipped.

    Raises:
        InputError: The file cannot be read, or a line is not an expectation; the message names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--expect-file {path}: cannot be read ({error}); check the path") from error
    texts = [(number, line.split("#")[0]) for number, line in enumerate(lines, start=1)]
    return [Expectation.parse(text, f"{path}:{number}:") for number, text in texts if text.strip()]


# The reward function of a run on a tiny random model: the user's, with a difference within each group.
#
# Random answers mostly get the same reward, so that no advantage and no gradient is left to check. If all answers of a
# call have one reward, every second one gets 1 more.


MODULE = "miles_smoke_reward"


def write_module(folder: Path, reward: RewardArguments) -> str:
    """Write a module into ``folder`` whose function gives the rewards of ``reward``; return its import path.

    Args:
        folder: A folder on the import path of the run's processes.
        reward: The section of the run. A key in it is in the file too, so that only this user may read that.
    """
    set_here = changed(reward, [field.name for field in dataclasses.fields(reward)])
    values = {name: getattr(reward, name) for name in set_here}
    text = '"""Written by miles smoke."""\nfrom miles.commands.smoke import with_spread\n\n'
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{MODULE}.py"
    with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as opened:
        opened.write(f"{text}reward = with_spread({values!r})\n")
    return f"{MODULE}:reward"


def with_spread(values: Mapping[str, Any]) -> Callable[[Sequence[Sample]], Any]:
    """Return the reward function of a section, whose rewards differ within a call of two or more samples.

    Args:
        values: The fields of ``RewardArguments`` that are not their defaults.
    """
    section = RewardArguments(**values)
    key = section.reward_key if section.rm_type is None else None
    function: Callable[[Sequence[Sample]], Any]
    if section.rm_type is None:
        assert section.custom_rm_path is not None, "written for a section with a reward"
        function = import_function(section.custom_rm_path, "--custom-rm-path")
    else:
        function = get_reward_function(section)

    def reward(samples: Sequence[Sample]) -> Any:
        results = function(samples)
        return _awaited(results, key) if inspect.isawaitable(results) else _spread(results, key)

    return reward


async def _awaited(results: Awaitable[Any], key: str | None) -> Any:
    return _spread(await results, key)


def _spread(results: Any, key: str | None) -> Any:
    """Return the numbers, changed if all are equal; values that are no numbers stay, for the caller to report."""
    values = results if key is None else [result[key] for result in results]
    if not isinstance(values, list | tuple) or not all(isinstance(value, Real) for value in values):
        return values
    if len(values) > 1 and len(set(values)) == 1:
        return [value + number % 2 for number, value in enumerate(values)]
    return values


# Shrink a run to seconds on two cores: few short samples, at most two ranks, everything written into one folder.
#
# What stays is what a run could break on: backend, engine, objective, estimator, reward, filters, custom functions,
# precision as far as the machine has it, tensor, context, pipeline or expert parallelism over two ranks, asynchronous
# generation, saving and exporting. Imports no torch.


PROMPTS = 4
SAMPLES = 4
RESPONSE = 16  # tokens
ROWS = 64  # of a prompt set
EVAL_ROWS = 8
MODEL, RUN, REWARD = "model", "run", "reward"  # folders


def shrink(settings: Settings, folder: Path, iterations: int) -> tuple[Settings, list[str]]:
    """Return the small run, and in words what differs. Prompts and the reward's module are written into ``folder``.

    Args:
        settings: A run that was validated.
        folder: Takes everything that the run reads and writes; the model is expected in its folder ``model``.
        iterations: The iterations of the small run.
    """
    steps = min(settings.steps_per_pass, 2)
    rollout = _rollout(settings, folder, iterations)
    small = replace(
        _on_two_ranks(settings),
        model=ModelArguments(
            hf_checkpoint=str(folder / MODEL),
            opd_teacher_load=str(folder / MODEL) if settings.loss.use_opd else None,
        ),
        loss=_loss(settings.loss),
        data=_data(settings.data, folder),
        reward=_reward(settings.reward, folder),
        rollout=rollout,
        training=replace(
            settings.training,
            global_batch_size=None,
            num_steps_per_rollout=steps,
            bf16=settings.training.bf16 and has_bf16(),
            fp32=not (settings.training.bf16 and has_bf16()),
        ),
        critic=replace(
            settings.critic, num_critic_only_steps=min(settings.critic.num_critic_only_steps, iterations - 1)
        ),
        checkpoint=_checkpoint(settings.checkpoint, folder),
        evaluation=_evaluation(settings.evaluation, folder, iterations, settings.data.multimodal_keys is not None),
        tracking=TrackingArguments(
            output_dir=str(folder / RUN),
            report_samples=settings.tracking.report_samples,
            samples_max_mb=settings.tracking.samples_max_mb,
            metrics_max_mb=settings.tracking.metrics_max_mb,
            no_report=settings.tracking.no_report,
        ),
        megatron_overrides=tuple((name, value) for name, value in settings.megatron_overrides if name in TRIED),
        server_flags=ServerFlags(),
    )
    if settings.rollout.loads_samples:  # their number is given
        small = replace(small, training=replace(small.training, num_steps_per_rollout=settings.steps_per_pass))
    return small, list(_notes(settings, small))


def _on_two_ranks(settings: Settings) -> Settings:
    """Return the run on at most two ranks, which share the model by the first kind of parallelism that the run has."""
    sizes, cluster, parallel = settings.megatron, settings.cluster, settings.parallel
    kinds = {
        "tensor_model_parallel_size": sizes.tensor_model_parallel_size,
        "context_parallel_size": parallel.context_parallel_size,
        "pipeline_model_parallel_size": sizes.pipeline_model_parallel_size,
    }
    chosen = next((name for name, size in kinds.items() if size > 1), None)
    size = {name: 2 if name == chosen else 1 for name in kinds}
    experts = 2 if sizes.expert_model_parallel_size > 1 and size["pipeline_model_parallel_size"] == 1 else 1
    has_servers = settings.engine.has_servers and not _needs_gpus(settings)
    device_of_engine = 1 if has_servers and settings.generates and not cluster.colocate else None
    return replace(
        settings,
        cluster=replace(
            cluster,
            ray_address=None,
            device="cpu",
            actor_num_nodes=1,
            actor_num_gpus_per_node=min(2, cluster.world_size),
            rollout_num_gpus=device_of_engine,
            max_restarts=0,
            offload_train=False,
            offload_rollout=False,
            no_offload_train=False,
            no_offload_rollout=False,
        ),
        parallel=replace(parallel, context_parallel_size=size["context_parallel_size"]),
        megatron=replace(
            sizes,
            tensor_model_parallel_size=size["tensor_model_parallel_size"],
            pipeline_model_parallel_size=size["pipeline_model_parallel_size"],
            decoder_first_pipeline_num_layers=None,
            decoder_last_pipeline_num_layers=None,
            num_layers_per_virtual_pipeline_stage=None,
            expert_model_parallel_size=experts,
            expert_tensor_parallel_size=1 if experts == 2 else None,
            sequence_parallel=sizes.sequence_parallel and size["tensor_model_parallel_size"] > 1,
        ),
        sglang=replace(
            settings.sglang,
            rollout_num_gpus_per_engine=1,
            rollout_external=False,
            rollout_external_engine_addrs=None,
            update_weight_disk_dir=None,
            update_weight_copy_dir=None,
        ),
    )


def _rollout(settings: Settings, folder: Path, iterations: int) -> RolloutArguments:
    rollout = settings.rollout
    assert rollout.rollout_batch_size is not None
    saved, longest = rollout.save_debug_rollout_data, rollout.rollout_max_response_len
    small = replace(
        rollout,
        num_rollout=iterations,
        num_epoch=None,
        rollout_engine="torch" if _needs_gpus(settings) else rollout.rollout_engine,
        async_steps=min(rollout.async_steps, 1),
        save_debug_rollout_data=None if saved is None else str(folder / "samples_{iteration}.jsonl"),
    )
    if rollout.loads_samples:
        return small
    prompts = min(rollout.rollout_batch_size, PROMPTS)
    return replace(
        small,
        rollout_batch_size=prompts,
        n_samples_per_prompt=min(rollout.n_samples_per_prompt, SAMPLES),
        rollout_max_response_len=None if longest is None else min(longest, RESPONSE),  # None: of conversations
        over_sampling_batch_size=None if rollout.over_sampling_batch_size is None else 2 * prompts,
    )


def _needs_gpus(settings: Settings) -> bool:
    """Return whether the run asks of its engine what SGLang does on GPUs only."""
    asks = settings.rollout.use_rollout_routing_replay or settings.training.deterministic_mode
    return asks and settings.engine.has_servers


def _reward(reward: RewardArguments, folder: Path) -> RewardArguments:
    if reward.rm_type is None and reward.custom_rm_path is None:
        return reward
    module = write_module(folder / REWARD, reward)
    return RewardArguments(
        custom_rm_path=module,
        custom_reward_post_process_path=reward.custom_reward_post_process_path,
        reward_error=reward.reward_error,
        reward_error_value=reward.reward_error_value,
        reward_timeout=reward.reward_timeout,
        reward_memory=reward.reward_memory,
        log_passrate=reward.log_passrate,
    )


def _checkpoint(section: CheckpointArguments, folder: Path) -> CheckpointArguments:
    """Save if the run saves, and load nothing."""
    saves = section.save is not None
    return CheckpointArguments(
        save=str(folder / "checkpoints") if saves else None,
        save_interval=1 if saves else None,
        save_keep_last=section.save_keep_last,
        save_retain_interval=section.save_retain_interval,
        save_best=section.save_best if saves else None,
        async_save=section.async_save and saves,
        save_hf=str(folder / "export") if section.save_hf is not None else None,
    )


def _evaluation(
    evaluation: EvaluationArguments, folder: Path, iterations: int, with_images: bool
) -> EvaluationArguments:
    if not evaluation.has_sets:
        return evaluation
    words = evaluation.eval_prompt_data
    if words is not None and not with_images:
        names, sources = words[::2], words[1::2]
        cut = [_cut(source, folder, f"eval_{number}", EVAL_ROWS) for number, source in enumerate(sources)]
        words = tuple(str(word) for pair in zip(names, cut, strict=True) for word in pair)
    longest = evaluation.eval_max_response_len
    return replace(
        evaluation,
        eval_prompt_data=words,
        eval_interval=iterations,
        n_samples_per_eval_prompt=1,
        eval_max_response_len=None if longest is None else min(longest, RESPONSE),
    )


def _data(data: DataArguments, folder: Path) -> DataArguments:
    """Return the prompts with the first rows of each file. Rows with images may name files by their own folder."""
    if data.multimodal_keys is not None:
        return data
    mix = data.prompt_mix
    if mix is not None:
        mix = tuple(str(_cut(word, folder, f"prompts_{i}", ROWS)) if i % 2 else word for i, word in enumerate(mix))
    return replace(data, prompt_data=_cut(data.prompt_data, folder, "prompts", ROWS), prompt_mix=mix)


def _cut(source: str | None, folder: Path, name: str, rows: int) -> str | None:
    """Return a source with the first rows of a file; other sources are returned unchanged."""
    if source is None or not source.endswith((".jsonl", ".parquet")):
        return source
    path = (folder / name).with_suffix(Path(source).suffix)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".jsonl":
        with open(source, "rb") as lines:
            path.write_bytes(b"".join(islice((line for line in lines if line.strip()), rows)))
        return str(path)
    from pyarrow import Table
    from pyarrow.parquet import ParquetFile, write_table

    with ParquetFile(source) as file:
        write_table(Table.from_batches(islice(file.iter_batches(rows), 1), file.schema_arrow), path)
    return str(path)


def _loss(loss: LossArguments) -> LossArguments:
    """Return the objective with a teacher in the trainer, if there is one."""
    teacher = "trainer" if loss.use_opd else None
    return replace(loss, opd_type=teacher, opd_teacher_urls=None, opd_teacher_key=LossArguments.opd_teacher_key)


def _notes(settings: Settings, small: Settings) -> Iterator[str]:
    """Yield in words the features that a smaller run does not check."""
    ranks = (settings.cluster.world_size, small.cluster.world_size)
    if ranks[0] != ranks[1] or settings.dims != small.dims:
        yield f"{ranks[0]} trainer ranks become {ranks[1]}, on CPU, with {_parallel_text(small)}"
    if settings.training.bf16 and not small.training.bf16:
        yield "--bf16 becomes --fp32: this CPU has no bf16 arithmetic"
    if settings.rollout.rollout_engine != small.rollout.rollout_engine:
        yield "the torch engine generates: SGLang repeats answers, and states which experts it chose, on GPUs only"
    if settings.model.ref_load is not None:
        yield "--ref-load is left out: the reference is the tiny model"
    if settings.loss.use_opd:
        yield "the teacher is the tiny model, in the trainer"
    if settings.checkpoint.load is not None:
        yield "--load is left out: the run starts fresh"
    elsewhere = ["use_wandb", "use_mlflow", "report_to", "notify_url", "prometheus_port"]
    if left_out := [flag_name(name) for name in changed(settings.tracking, elsewhere)]:
        yield f"{', '.join(left_out)}: left out"
    if settings.server_flags != ServerFlags():
        yield "--sglang-* and --router-* flags are left out: servers start with the defaults of CPU"
    if settings.reward != small.reward:
        yield "if all answers to a prompt get the same reward, every second one gets 1 more: there must be a gradient"


def _parallel_text(settings: Settings) -> str:
    kinds = {
        "tensor": settings.megatron.tensor_model_parallel_size,
        "context": settings.parallel.context_parallel_size,
        "pipeline": settings.megatron.pipeline_model_parallel_size,
        "expert": settings.megatron.expert_model_parallel_size,
    }
    return " and ".join(f"{kind} parallel" for kind, size in kinds.items() if size > 1) or "data parallel"


PASSED, CHECK_FAILED, RUN_FAILED, TOO_SLOW = 0, 1, 3, 4
END_SECONDS = 30.0  # for a run that is stopped
LOG_LINES = 40  # printed of a run that failed
LOG = "log.txt"


def main(argv: Sequence[str]) -> int:
    """Run the command, print the checks and return their status.

    Raises:
        SystemExit: With status 2 for wrong flags, of this command or after ``--``.
    """
    hide_on_command_line(argv)
    parser = CommandParser(
        prog="miles smoke", usage="%(prog)s [options] -- FLAGS", description=__doc__, allow_abbrev=False
    )
    parser.add_argument(
        "--expect", action="append", default=[], metavar="TEXT", help="a check, 'METRIC >= NUMBER'; may be repeated"
    )
    parser.add_argument("--expect-file", type=Path, metavar="FILE", help="a file with one check per line")
    parser.add_argument("--iterations", type=int, default=2, help="iterations to run (default: 2)")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds that the run may take (default: 300)")
    parser.add_argument(
        "--model", metavar="FOLDER", help="configuration and tokenizer, if --hf-checkpoint is not on this machine"
    )
    parser.add_argument("--folder", type=Path, help="a new folder for all files (default: a temporary one, removed)")
    parser.add_argument("--junit", type=Path, metavar="FILE", help="also write the checks as JUnit XML")
    words = list(argv)
    end = words.index("--") if "--" in words else len(words)
    options = parser.parse_args(words[:end])
    if end == len(words):
        parser.error("the flags of a training command are missing; write them after --")
    for flag, value in (("--iterations", options.iterations), ("--timeout", options.timeout)):
        if not 1 <= value < float("inf"):
            parser.error(f"{flag} {value:g}: must be finite and at least 1; give 1 or more")
    if options.folder is not None and options.folder.exists():
        parser.error(f"--folder {options.folder}: is there already; give a new one")
    try:
        expectations = [Expectation.parse(text) for text in options.expect]
        if options.expect_file is not None:
            expectations += read_expectations(options.expect_file)
    except InputError as error:
        parser.error(str(error))
    model = [] if options.model is None else ["--hf-checkpoint", options.model]
    settings = _settings([*words[end + 1 :], *model])
    with _folder(options.folder) as folder:
        try:
            small, notes = shrink(settings, folder, options.iterations)
        except (InputError, ValueError, OSError) as error:
            parser.error(str(error))
        for note in notes:
            print(f"note: {note}", flush=True)
        status, results = _run(small, str(settings.model.hf_checkpoint), folder, options.timeout)
        if status == PASSED:
            results += _check(folder, expectations)
            status = CHECK_FAILED if any(result.fault is not None for result in results) else PASSED
    for result in results:
        print(f"passed  {result.name}" if result.fault is None else f"FAILED  {result.name}: {result.fault}")
    print(f"{'passed' if status == PASSED else 'failed'} in {results[0].seconds:.0f} s")
    if options.junit is not None:
        try:
            write_junit(options.junit, "smoke", results)
        except OSError as error:
            parser.error(f"--junit {options.junit}: cannot be written ({error.strerror}); give another file")
    return status


@contextmanager
def _folder(path: Path | None) -> Iterator[Path]:
    if path is not None:
        path.mkdir(parents=True)
        yield path.absolute()
        return
    # Processes of a run that was killed may still write while it is removed.
    with tempfile.TemporaryDirectory(prefix="miles-smoke-", ignore_cleanup_errors=True) as temporary:
        yield Path(temporary)


def _settings(flags: Sequence[str]) -> Settings:
    """Return the settings of a training command; exit for wrong flags, and after ``--explain``."""
    validated = parse_or_exit(flags, starts=False)
    if validated.explains:
        print(explain(validated))
        raise SystemExit(0)
    return validated.settings


def _run(settings: Settings, model: str, folder: Path, seconds: float) -> tuple[int, list[CheckResult]]:
    """Run the small run in a separate process; return the status, and whether the run ended well as a check."""
    began = time.perf_counter()
    status, fault = PASSED, None
    with (folder / LOG).open("wb") as log:
        child = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=same_imports(str(folder / REWARD)),
        )
        try:
            child.communicate(pickle.dumps((settings, model, folder)), timeout=seconds)
        except subprocess.TimeoutExpired:
            status, fault = TOO_SLOW, f"it was stopped after {seconds:g} s (--timeout)"
        finally:
            end(child, END_SECONDS)  # with SIGTERM it ends its processes
    if status == PASSED and child.returncode != 0:
        status, fault = RUN_FAILED, f"it ended with status {child.returncode}"
    lines = (folder / LOG).read_text(encoding="utf-8", errors="replace").splitlines()
    if fault is not None:
        print("\n".join(lines[-LOG_LINES:]), file=sys.stderr)
    elapsed = time.perf_counter() - began
    return status, [CheckResult("the run ends", elapsed, fault, "\n".join(lines[-LOG_LINES:]))]


def _check(folder: Path, expectations: Sequence[Expectation]) -> list[CheckResult]:
    """Return the verdict of the run's metrics on each expectation."""
    metrics: dict[str, list[float]] = {}
    for row in RunFiles(folder / RUN).read_metrics():
        for name, value in row.items():
            metrics.setdefault(name, []).append(value)
    fault = None
    if "train/grad_norm" in metrics:  # some runs log no gradient
        fault = Expectation.parse("max(train/grad_norm) > 0").fault(metrics)
    results = [CheckResult("a gradient arrives", 0.0, fault)]
    return results + [CheckResult(each.text, 0.0, each.fault(metrics)) for each in expectations]


def _train() -> None:
    """Train the small run that standard input describes: the process that ``_run`` starts."""
    die_with_parent(os.getppid())
    settings, source, folder = pickle.load(sys.stdin.buffer)
    from miles.models.tiny import write_like
    from miles.run.launcher import launch

    write_like(source, folder / MODEL)
    launch(validate(settings))


if __name__ == "__main__":
    _train()
