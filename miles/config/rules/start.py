"""Check what only a start needs and a plan does without: the devices of this host, and the checkpoint to load."""

from __future__ import annotations

import os

from miles.base.flags import Errors, count
from miles.base.host import num_gpus
from miles.config.checkpoint import fault_of_nothing
from miles.config.components import call, engine_spec
from miles.config.host_share import is_on_cpu
from miles.config.settings import Settings
from miles.tasks.data.settings import FILE_SUFFIXES


def check_load(settings: Settings, errors: Errors) -> None:
    """Refuse a ``--load`` without a checkpoint: a run with a misspelt path would train from the beginning."""
    checkpoint = settings.checkpoint
    if "load" in checkpoint.urls:  # the launcher asks the remote storage
        return
    if (fault := fault_of_nothing(checkpoint, settings.model.ref_load)) is not None:
        errors.refuse("load", checkpoint.load, *fault)


def check_sources(settings: Settings, errors: Errors) -> None:
    """Refuse files of rows that are not there."""
    data, held_out = settings.data, settings.evaluation.eval_prompt_data
    of_flags = {
        "prompt_data": (data.prompt_data or "",),
        "prompt_mix": (data.prompt_mix or ())[1::2],
        "eval_prompt_data": (held_out or ())[1::2],
    }
    for name, sources in of_flags.items():
        for source in sources:
            if source.endswith(FILE_SUFFIXES) and not os.path.exists(source):
                errors.existing_file(name, source)


def check_devices(settings: Settings, errors: Errors) -> None:
    """Refuse valid settings that need more than this host has. Ray would wait minutes for it.

    A cluster that the run joins may have it, now or later.
    """
    cluster, there = settings.cluster, num_gpus()
    if cluster.ray_address:
        return
    if settings.trains and cluster.actor_num_nodes > 1:
        rule = "the run starts its own Ray on this host, which is 1 node"
        what_to_do = "give 1, or join the Ray cluster of the nodes with --ray-address"
        errors.refuse("actor_num_nodes", cluster.actor_num_nodes, rule, what_to_do)
        return
    if is_on_cpu(settings) or there is None or (cluster.device == "auto" and there == 0):  # PyTorch then sees no GPU
        return
    of_trainer = cluster.world_size if settings.trains else 0
    of_engines = settings.num_engines * settings.sglang.rollout_num_gpus_per_engine or 1
    needed = of_trainer + (0 if cluster.colocate else of_engines)
    if needed > there:
        parts = "" if cluster.colocate else f" ({of_trainer} for the trainer, {of_engines} for generation)"
        rule = f"the run needs {count(needed, 'GPU')}{parts}, and this host has {there or 'none'}"
        fewer = "fewer with --actor-num-gpus-per-node and --rollout-num-gpus" if there else "--device cpu"
        errors.refuse("device", cluster.device, rule, f"give {fewer}, or join a Ray cluster with --ray-address")


def check_engine_is_there(settings: Settings, errors: Errors) -> None:
    """Refuse an engine whose program is not on this host, and flags that it refuses."""
    rules = engine_spec(settings.rollout.rollout_engine).start_rules
    if rules and settings.generates:
        call(rules, settings, errors)
