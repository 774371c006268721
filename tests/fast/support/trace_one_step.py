"""Run one GRPO iteration in this process and print the files of miles that it enters, as JSON.

Direct calls replace Ray between the loop and the actors' methods. Everything else is production code: the loop, the
actors, the pipeline, the torch engine, the batch, the trainer, FSDP and the weight update.

    python tests/fast/support/trace_one_step.py MODEL_FOLDER PROMPTS.jsonl OUTPUT_FOLDER
"""

import asyncio
import json
import sys
import threading
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import torch.distributed as dist

import miles
from miles.compat.border import parse_or_exit
from miles.observe.console import PhaseTimer
from miles.observe.run_files import RunHeader
from miles.observe.tracker import Tracker
from miles.run.checkpoints import RunCheckpoints
from miles.run.loop import Drivers, TrainingLoop
from miles.run.rollout_actor import GeneratedIteration, RolloutActor, Start
from miles.run.stop_requests import StopRequests
from miles.run.train_actor import TrainActor

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


class InProcess:
    """Replace both drivers: call the actors' methods directly."""

    def __init__(self, settings):
        placement = SimpleNamespace(device="cpu", cluster=settings.cluster)
        self.settings = settings
        self.rollout = RolloutActor(settings, placement)
        self.event_loop = asyncio.new_event_loop()
        threading.Thread(target=self.event_loop.run_forever, daemon=True).start()
        self.num_iterations = self.call(self.rollout.prepare())
        self.trainer = TrainActor(0, settings, "cpu")
        self.trainer.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.trainer.connect(("127.0.0.1", self.trainer.store.port), self.num_iterations)

    def call(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self.event_loop).result()

    weight_metrics = {}

    def generate(self, iteration):
        summary, *shards = self.call(self.rollout.generate(Start(iteration, None, 0)))
        return GeneratedIteration(summary, shards)

    def train(self, shards_by_rank, iteration):
        settings = self.settings
        due = settings.trains_policy(iteration), settings.refreshes_reference(iteration)
        return self.trainer.train(shards_by_rank[0], *due, iteration)

    def export_weights(self):
        return list(self.trainer.backend.export_weights())

    def update_weights(self, chunks, version):
        self.call(self.rollout.pipeline.update_weights(chunks, version, None))

    def resume(self):
        return None


def main(model: str, prompts: str, output: str) -> None:
    flags = f"--hf-checkpoint {model} --prompt-data {prompts} --rm-type length --num-rollout 1 --rollout-batch-size 2"
    flags += " --n-samples-per-prompt 4 --rollout-max-response-len 8 --actor-num-gpus-per-node 1 --colocate"
    flags += f" --train-backend fsdp --rollout-engine torch --device cpu --fp32 --output-dir {output}"
    settings = parse_or_exit(flags.split()).settings
    sys.setprofile(profile)
    threading.setprofile(profile)  # also profile threads that start later
    run = InProcess(settings)
    tracker = Tracker(settings.tracking, RunHeader.from_sections("trace", settings, "", "", 1))
    actors = Drivers(run, run, True, settings.offload("cpu"), PhaseTimer())
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
