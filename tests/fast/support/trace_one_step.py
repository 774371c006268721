"""Run one GRPO iteration in this process and print the files of miles that it enters, as JSON.

It runs without Ray, as many short runs on a CPU do (``miles.run.one_process``).

    python tests/fast/support/trace_one_step.py MODEL_FOLDER PROMPTS.jsonl OUTPUT_FOLDER
"""

import json
import sys
import threading
from functools import cache
from pathlib import Path

import miles
from miles.compat.border import parse_or_exit
from miles.observe.console import PhaseTimer
from miles.observe.run_files import RunHeader
from miles.observe.tracker import Tracker
from miles.run.checkpoints import RunCheckpoints
from miles.run.loop import Drivers, TrainingLoop
from miles.run.one_process.drivers import both_drivers
from miles.run.stop_requests import StopRequests

PACKAGE = Path(miles.__file__).parent
entered: list[str] = []


is_tracing = False


def profile(frame, event, argument):
    if is_tracing and event == "call" and frame.f_code.co_name != "<module>":
        name = own_file(frame.f_code.co_filename)
        if name is not None and name not in entered:
            entered.append(name)


@cache
def own_file(path: str) -> str | None:
    """Return the path of a file of miles below the package; None for another file."""
    file = Path(path)
    return str(file.relative_to(PACKAGE)) if PACKAGE in file.parents else None


def main(model: str, prompts: str, output: str) -> None:
    flags = f"--hf-checkpoint {model} --prompt-data {prompts} --rm-type length --num-rollout 1 --rollout-batch-size 2"
    flags += " --n-samples-per-prompt 4 --rollout-max-response-len 8 --actor-num-gpus-per-node 1 --colocate"
    flags += f" --train-backend fsdp --rollout-engine torch --device cpu --fp32 --output-dir {output}"
    settings = parse_or_exit(flags.split()).settings
    sys.setprofile(profile)
    threading.setprofile(profile)  # also profile threads that start later
    tracker = Tracker(settings.tracking, RunHeader.from_sections("trace", settings, "", "", 1))
    with both_drivers(settings) as (rollout, trainer):
        actors = Drivers(rollout, trainer, True, settings.offload("cpu"), PhaseTimer())
        loop = TrainingLoop(
            actors,
            RunCheckpoints(actors, settings.checkpoint, {}, settings.steps_per_iteration),
            tracker,
            evaluation=settings.evaluation,
            steps_per_iteration=settings.steps_per_iteration,
            is_synchronous=True,
            stop=StopRequests(60.0),
        )
        actors.sync_weights(version=0)
        global is_tracing
        is_tracing = True
        loop.run_iteration(0)
        is_tracing = False
    print(json.dumps(entered))


if __name__ == "__main__":
    main(*sys.argv[1:])
