"""Train a language model by reinforcement learning (the same as ``python train.py``).

Parse and validate the flags, start Ray, place the actors, and run the loop. Wrong flags are reported before torch or
Ray are imported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles.arguments.files.run_config import FILE_NAME, run_config
from miles.arguments.launch.notes import grouped
from miles.arguments.parser import main_parse
from miles.hidden_secrets import hidden_in_output, hide_on_command_line
from miles.secret_values import secrets_in

if TYPE_CHECKING:
    from miles.arguments.checkpoint import CheckpointArguments
    from miles.arguments.launch.notes import Note
    from miles.arguments.settings import Settings
    from miles.arguments.validate import Validated
    from miles.cluster.session import Placement
    from miles.cluster.stop_requests import StopRequests


def main(argv: Sequence[str]) -> int:
    """Run the training command and return 0.

    Raises:
        SystemExit: With status 2 for wrong flags, before anything starts; with 1 if the run fails.
    """
    hide_on_command_line(argv)
    validated = main_parse(argv)
    if validated.settings.rehearsal.rehearse:
        from miles.rehearsal.command import rehearse  # imports torch

        return rehearse(validated)
    start(validated)
    return 0


def start(validated: Validated) -> None:
    """Run a command that was validated: lock and check its folders, then train.

    Raises:
        SystemExit: With status 1 if the run fails.
    """
    from miles.cluster.failures import exit_with_message  # imports Ray and torch

    launch(validated, exit_with_message)


def launch(
    validated: Validated, ending: Callable[[CheckpointArguments, StopRequests], AbstractContextManager[None]]
) -> None:
    """Lock the folders of a run, find where it begins, and run it to its end.

    Args:
        validated: What to run.
        ending: Makes the context that handles whatever ends the run early (``exit_with_message``).
    """
    from miles.cluster.folders.folder_lock import locked_folders
    from miles.cluster.folders.resume_point import check_frozen_models, resume_point
    from miles.cluster.folders.run_identity import check_load_folder, own_save_folder
    from miles.cluster.stop_requests import StopRequests
    from miles.objective.hooks import check_hooks
    from miles.training.checkpoint_folder import remove_unfinished

    settings = validated.settings
    written = {"--output-dir": settings.tracking.output_dir, "--save": settings.checkpoint.save}
    stop = StopRequests(settings.cluster.stop_timeout)
    secrets = secrets_in("settings", asdict(settings))
    with hidden_in_output(secrets), ending(settings.checkpoint, stop), stop.listening():
        check_hooks(settings.loss)
        with locked_folders((flag, Path(folder)) for flag, folder in written.items() if folder is not None):
            notes = [*validated.notes, *check_load_folder(settings.checkpoint)]
            point = resume_point(settings.checkpoint)
            for note in (*notes, *point.notes, *check_frozen_models(settings.model)):
                print(f"note: {note}")
            if validated.accepted:
                print("\n".join(["note: flags of the command that were accepted:", *_indented(validated.accepted)]))
            checkpoint = own_save_folder(point.checkpoint, point.damaged)
            if checkpoint.save is not None:
                remove_unfinished(Path(checkpoint.save))
            with ending(checkpoint, stop):  # --start-over changes where to resume from
                run(replace(settings, checkpoint=checkpoint), stop, settings.checkpoint)


def _indented(accepted: Sequence[Note]) -> list[str]:
    return [f"  {line}" for line in grouped(accepted)]


def run(settings: Settings, stop: StopRequests, given: CheckpointArguments) -> None:
    """Start Ray, train, and stop what was started; restart up to ``--max-restarts`` times if a worker process fails.

    Args:
        settings: The run, with the checkpoint that it begins from and the folder that it saves into.
        stop: Requests to stop it.
        given: Its flags of checkpoints as the user gave them, for run.yaml.
    """
    from miles.cluster.failures import report_loss
    from miles.cluster.restarts import with_restarts
    from miles.cluster.session import EngineLayout, ray_session

    engines = EngineLayout(settings.num_engines, settings.sglang.rollout_num_gpus_per_engine, settings.trains)
    with ray_session(settings.cluster, engines, lambda loss: report_loss(loss, settings.checkpoint)) as placement:
        with_restarts(settings, lambda settings: train(settings, placement, stop, given))


def train(settings: Settings, placement: Placement, stop: StopRequests, given: CheckpointArguments) -> None:
    """Start the actors and run the loop, from the newest checkpoint of ``--load`` if there is one.

    Args:
        settings: The run, or an attempt of it that resumes.
        placement: The devices.
        stop: Requests to stop it.
        given: The flags of checkpoints as the user gave them, for run.yaml.
    """
    from miles.cluster.folders.run_identity import RunIdentity
    from miles.cluster.liveness import Workers
    from miles.cluster.rollout_actor import RolloutDriver
    from miles.cluster.train_actor import TrainDriver
    from miles.loop import GenerationLoop, TrainingLoop
    from miles.objective.explain import objective_formula, objective_in_words
    from miles.report.sink import ReportSink
    from miles.tracking.provenance import provenance
    from miles.tracking.run_header import RunHeader
    from miles.tracking.tracker import Tracker

    offload = settings.offload(placement.device)
    workers = Workers(settings.cluster.worker_timeout)
    with (
        ReportSink(settings.tracking) as report,
        # First, so that the trainer's processes import while the rollout worker starts its engines.
        TrainDriver(settings, placement, workers) if settings.trains else nullcontext() as trainer,
        RolloutDriver(settings, placement, workers) as rollout,
    ):
        if offload.rollout:
            rollout.release_memory()  # the trainer is built in the memory that this frees
        total_steps = rollout.num_iterations * settings.steps_per_iteration
        found = provenance(settings)
        header = RunHeader.from_sections(
            "miles",
            settings,
            objective_in_words(settings.loss, settings.step_shape),
            objective_formula(settings.loss, settings.step_shape),
            total_steps,
            found,
        )
        config = _config(replace(settings, checkpoint=given), found)
        if trainer is not None:
            trainer.build(total_steps)
        with Tracker(settings.tracking, header, [report], config) as tracker:
            if trainer is None:
                GenerationLoop(rollout, tracker, settings.evaluation, settings.steps_per_iteration, stop).run()
                return
            loop = TrainingLoop(
                rollout,
                trainer,
                tracker,
                evaluation=settings.evaluation,
                checkpoint=settings.checkpoint,
                offload=offload,
                steps_per_iteration=settings.steps_per_iteration,
                run_state=RunIdentity.new().to_state(),
                stop=stop,
                is_synchronous=settings.rollout.async_steps == 0,
            )
            loop.run()


def _config(settings: Settings, found: dict[str, Any]) -> str:
    """Return the text of run.yaml."""
    from miles.tracking.provenance import in_words

    path = Path(settings.tracking.output_dir) / FILE_NAME
    checkpoint = settings.checkpoint
    resumes = checkpoint.load is not None and checkpoint.load == checkpoint.save
    more = [" load=null"] * resumes + [" --start-over"] * (checkpoint.save is not None)
    repeat = f"miles train --config {path}{''.join(more)} repeats this run; flags after that win."
    return run_config(settings, [*in_words(found), repeat])
