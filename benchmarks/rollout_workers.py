"""Measure generation in several processes (``--num-rollout-workers``): CPU per request, memory, open files, exactness.

``python benchmarks/rollout_workers.py --requests 100000 --workers 8 --connections 4096`` has the production rollout
side (pipeline, collector, workers in Ray actors, SGLang client, tokenizer, the reward "length") ask fake servers
(fake_servers.py) for all requests at once, over real sockets, and prints one JSON object.

The fake servers are one address, as a router is. ``--connections`` is ``--sglang-server-concurrency``: so many requests
are at the server at once, over as many sockets, and the others wait in the workers. With ``--workers 1`` the rollout
process does everything itself.

CPU seconds count the rollout process and the workers. Ray's own processes are counted apart, and the fake servers are
not counted. Memory is the sum of the proportional set sizes of all these, so shared pages count once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import ray
from fake_servers import seen, start

from miles.config.cluster import ClusterArguments
from miles.config.model import ModelArguments
from miles.config.rollout import RolloutArguments
from miles.config.servers.flags import SglangArguments
from miles.config.settings import Settings
from miles.config.tracking import TrackingArguments
from miles.config.training import TrainingArguments
from miles.config.validate import validate
from miles.engine.base import LocalHost
from miles.rollout.ordering import Start
from miles.rollout.pipeline import RolloutPipeline, build_pipeline
from miles.run.cpu_tuning import malloc_environment
from miles.run.engine_actors import worker_starter
from miles.tasks.data.settings import DataArguments
from miles.tasks.rewards.settings import RewardArguments
from miles.types.sample import PromptGroup

SAMPLES = 8  # per prompt
LOOK_SECONDS = 2.0  # between two looks at memory and open files
ROOT = Path(__file__).resolve().parents[1]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100_000, help="requests at once: prompts x 8 samples")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--connections", type=int, default=4096, help="requests at the server at once")
    parser.add_argument("--tokens", type=int, default=256, help="tokens per answer")
    parser.add_argument("--prompt-len", type=int, default=256)
    parser.add_argument("--median-seconds", type=float, default=2.0, help="median latency of the fake servers")
    parser.add_argument("--model", help="a folder with a configuration and a tokenizer; default: a tiny Llama")
    return parser.parse_args()


def tiny_model(folder: Path) -> str:
    """Write a configuration and a tokenizer of one token per character. No weights are read."""
    from miles.models.tiny import character_tokenizer

    config = {"model_type": "llama", "vocab_size": 101, "hidden_size": 8, "num_hidden_layers": 1, "eos_token_id": 0}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config | {"num_attention_heads": 1, "intermediate_size": 8}))
    character_tokenizer().save_pretrained(folder)
    return str(folder)


def settings_of(options: argparse.Namespace, address: str, folder: Path) -> Settings:
    prompts = folder / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "a" * options.prompt_len, "label": "1"}) + "\n")
    model = options.model or tiny_model(folder / "model")
    settings = Settings(
        model=ModelArguments(hf_checkpoint=model),
        data=DataArguments(prompt_data=str(prompts), input_key="prompt"),
        reward=RewardArguments(rm_type="length"),
        rollout=RolloutArguments(
            rollout_engine="sglang",
            num_rollout_workers=options.workers,
            num_rollout=1,
            rollout_batch_size=options.requests // SAMPLES,
            n_samples_per_prompt=SAMPLES,
            rollout_max_response_len=options.tokens,
        ),
        sglang=SglangArguments(
            rollout_external=True,
            rollout_external_engine_addrs=(address,),
            update_weight_transfer_mode="disk",
            sglang_server_concurrency=options.connections,
            rollout_health_check_timeout=600.0,  # this benchmark is about many requests on few cores
        ),
        training=TrainingArguments(global_batch_size=options.requests // SAMPLES * SAMPLES),
        cluster=ClusterArguments(actor_num_gpus_per_node=1),
        tracking=TrackingArguments(output_dir=str(folder / "run")),
    )
    return validate(settings).settings


def cpu_seconds(processes: list[psutil.Process]) -> float:
    """Return the CPU seconds of the processes so far."""
    total = 0.0
    for process in processes:
        with suppress(psutil.NoSuchProcess):  # Ray ends its idle processes
            total += sum(process.cpu_times()[:2])
    return total


@dataclass
class Watch:
    """Look at memory and open files of processes every now and then, in a thread."""

    processes: list[psutil.Process]
    peak_bytes: int = 0
    most_files: int = 0  # of one process
    all_files: int = 0
    own_seconds: float = 0.0  # of CPU, for looking
    _ended: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Watch:
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self._look()

    def _run(self) -> None:
        while not self._ended.wait(LOOK_SECONDS):
            self._look()
        self.own_seconds = time.thread_time()

    def _look(self) -> None:
        files, memory = [], 0
        for process in self.processes:
            with suppress(FileNotFoundError, ProcessLookupError):  # Ray ends its idle processes
                files.append(len(os.listdir(f"/proc/{process.pid}/fd")))
                memory += proportional_bytes(process)
        self.most_files, self.all_files = max(self.most_files, *files), max(self.all_files, sum(files))
        self.peak_bytes = max(self.peak_bytes, memory)


def proportional_bytes(process: psutil.Process) -> int:
    """Return the proportional set size: its own pages, and its share of those that others have too."""
    for line in Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("the kernel reports no Pss")


def exact(groups: list[PromptGroup], requests: int, tokens: int) -> bool:
    """Return whether every group and trajectory is there once, in order, scored, with all tokens."""
    ids = [sample.trajectory_id for group in groups for sample in group.samples]
    whole = all(len(s.response_ids) == len(s.rollout_log_probs) == tokens for g in groups for s in g.samples)
    scored = all(sample.reward is not None for group in groups for sample in group.samples)
    in_order = [group.group_index for group in groups] == list(range(requests // SAMPLES))
    return whole and scored and in_order and ids == list(range(requests))


async def measure(options: argparse.Namespace, settings: Settings, url: str) -> dict[str, Any]:
    placement: Any = SimpleNamespace(generation_worker_options=lambda: {"num_cpus": 0})
    start_worker = partial(worker_starter, settings, placement) if options.workers > 1 else None
    began = time.perf_counter()
    pipeline = await build_pipeline(settings, LocalHost("cpu"), start_worker)
    try:
        return await measured(options, pipeline, url, time.perf_counter() - began)
    finally:
        await pipeline.producer.close()


async def measured(
    options: argparse.Namespace, pipeline: RolloutPipeline, url: str, start_seconds: float
) -> dict[str, Any]:
    own = psutil.Process()
    below = own.children(recursive=True) if options.workers > 1 else []
    workers = [process for process in below if "GenerationActor" in " ".join(process.cmdline())]
    assert len(workers) == (options.workers if options.workers > 1 else 0), [p.cmdline() for p in below]
    rays = [process for process in below if process not in workers and is_of_ray(process)]
    senders = [own, *workers]
    before, own_before = times(senders, rays), cpu_seconds([own])
    with Watch([*senders, *rays]) as watch:
        groups = await collected(pipeline)
        after, own_after = times(senders, rays), cpu_seconds([own])
    cpu, of_ray, wall = (now - then for now, then in zip(after, before, strict=True))
    cpu, own_cpu = cpu - watch.own_seconds, own_after - own_before - watch.own_seconds
    answers, seeds = seen(url)
    asked = options.requests // SAMPLES * SAMPLES
    return {
        "requests_at_once": asked,
        "workers": options.workers,
        "connections": options.connections,
        "tokens": options.tokens,
        "exact": exact(groups, asked, options.tokens) and answers == seeds == asked,
        "seconds": round(wall, 1),
        "start_seconds": round(start_seconds, 1),
        "cpu_ms_per_request": round(1000 * cpu / asked, 3),
        "of_which_rollout_process": round(1000 * own_cpu / asked, 3),
        "ray_cpu_ms_per_request": round(1000 * of_ray / asked, 3),
        "peak_memory_gb": round(watch.peak_bytes / 2**30, 2),
        "most_open_files_of_a_process": watch.most_files,
        "open_files": watch.all_files,
    }


def times(senders: list[psutil.Process], rays: list[psutil.Process]) -> tuple[float, float, float]:
    return cpu_seconds(senders), cpu_seconds(rays), time.perf_counter()


def is_of_ray(process: psutil.Process) -> bool:
    """Return whether a process below this one is Ray's own, and not a fake server."""
    words = " ".join(process.cmdline())
    return "ray/" in words and "ray::IDLE" not in words


async def collected(pipeline: RolloutPipeline) -> list[PromptGroup]:
    await pipeline.update_weights(None, 0)  # those that the servers have
    async with pipeline.collecting(Start(0, None, 0)) as collected:
        return collected.scored.groups


def with_ray(run: Callable[[], dict[str, Any]], workers: int) -> dict[str, Any]:
    """Return the result of ``run``, with a local Ray if workers need it, set up as in a run."""
    if workers == 1:
        return run()
    for name, value in malloc_environment("cpu", os.environ).items():
        os.environ.setdefault(name, value)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    os.environ.setdefault("RAY_worker_niceness", "0")
    ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=True, object_store_memory=2**30)
    try:
        return run()
    finally:
        ray.shutdown()


def main() -> None:
    options = parse()
    server, urls = start(1, options.tokens, options.median_seconds, options.connections)
    try:
        with tempfile.TemporaryDirectory() as name:
            settings = settings_of(options, urls[0].removeprefix("http://"), Path(name))
            result = with_ray(lambda: asyncio.run(measure(options, settings, urls[0])), options.workers)
            print(json.dumps(result))
    finally:
        server.terminate()


if __name__ == "__main__":
    main()
