"""Check the runs that are only half of a run: ``--debug-rollout-only`` and ``--debug-train-only``."""

from __future__ import annotations

import os
from collections.abc import Iterator

from miles.base.flags import Errors
from miles.config.checkpoint import first_iteration
from miles.config.components import ENGINES, TRAIN_BACKENDS, engine_spec, names_with, train_backend_spec
from miles.config.host_share import is_on_cpu
from miles.config.model import local_config
from miles.config.rollout import names_iteration, path_of_iteration
from miles.config.settings import Settings
from miles.config.sglang.flags import known_server_flags
from miles.models.packing import model_type
from miles.models.reading import READ_AS


def check_saved_samples(settings: Settings, errors: Errors) -> None:
    """Check that the first file of ``--load-debug-rollout-data`` is there."""
    path = settings.rollout.load_debug_rollout_data
    if path is None or not names_iteration(path):
        return
    first = first_iteration(settings.checkpoint)
    if first is not None:
        file = path_of_iteration(path, first)
        if not os.path.isfile(file):
            rule = f"no such file: {file}, of the first iteration of the run"
            errors.refuse("load_debug_rollout_data", path, rule, "check the path")


def notes_on_saved_samples(settings: Settings) -> Iterator[str]:
    """Yield a note on the first iteration of ``--load-debug-rollout-data`` that has no file."""
    path, last = settings.rollout.load_debug_rollout_data, settings.rollout.num_rollout
    if path is None or last is None or not names_iteration(path):
        return
    first = first_iteration(settings.checkpoint)
    if first is None:
        return
    files = (path_of_iteration(path, iteration) for iteration in range(first, last))
    missing = next((file for file in files if not os.path.isfile(file)), None)
    if missing is not None:
        yield (
            f"--load-debug-rollout-data {path}: {missing} is missing, so the run will stop there, before the "
            f"{last} iterations of --num-rollout"
        )


def check_debug_modes(settings: Settings, errors: Errors) -> None:
    """Check that one mode is chosen, and that no flag is given for the half that does not run."""
    rollout = settings.rollout
    if rollout.debug_rollout_only and rollout.debug_train_only:
        errors.refuse("debug_train_only", True, "contradicts --debug-rollout-only", "keep one of the two")
        return
    if rollout.debug_train_only and not settings.is_given_samples:
        what_to_do = (
            "name a file of samples with --load-debug-rollout-data, or use --loss-type sft_loss with conversations"
        )
        errors.refuse("debug_train_only", True, "needs samples to train on", what_to_do)
    if rollout.debug_rollout_only:
        if settings.is_given_samples:
            rule = "would generate nothing: this run reads the samples that it trains on"
            what_to_do = "drop it, or drop --load-debug-rollout-data and --loss-type sft_loss"
            errors.refuse("debug_rollout_only", True, rule, what_to_do)
        if settings.cluster.colocate:
            rule = "has no trainer to share devices with, with --debug-rollout-only, which trains and saves nothing"
            errors.refuse("colocate", True, rule, "give the engines --rollout-num-gpus instead")


# Check ``--deterministic-mode``: two runs of one command give the same weights, bit for bit.


# Modes that let the order of completion decide which answers an iteration has.
BY_COMPLETION = ("partial_rollout", "over_sampling_early_stop", "fully_async")


def check_deterministic(settings: Settings, errors: Errors) -> None:
    """Check that nothing which two runs may do differently decides which data are trained on."""
    if not settings.training.deterministic_mode:
        return
    why = "with --deterministic-mode: the order in which answers complete would decide which are trained on"
    for name in BY_COMPLETION:
        if getattr(settings.rollout, name):
            errors.refuse(name, True, f"is not possible {why}", "drop one of the two")
    if settings.sglang.rollout_external and settings.generates:
        rule = "names engines that others start, which --deterministic-mode cannot have repeat their answers"
        errors.refuse("rollout_external", True, rule, "drop one of the two")
    if settings.cluster.device == "cpu":
        check_deterministic_on_cpu(settings, errors)


def check_deterministic_on_cpu(settings: Settings, errors: Errors) -> None:
    """Refuse servers on CPU, which draw other answers in each run."""
    name = settings.rollout.rollout_engine
    if settings.training.deterministic_mode and settings.generates and engine_spec(name).has_servers:
        others = " or ".join(engine for engine, spec in ENGINES.items() if not spec.has_servers)
        rule = f"needs answers that repeat, and --rollout-engine {name} repeats them on GPUs only"
        errors.refuse("deterministic_mode", True, rule, f"use --rollout-engine {others}, or drop it")


# Refuse settings that need more than a run in one process without Ray (run/one_process/sides.py).


def check_one_process(settings: Settings) -> None:
    """Refuse a run that needs more than one process.

    Raises:
        FlagError: With one message per flag.
    """
    cluster, checkpoint, errors = settings.cluster, settings.checkpoint, Errors()
    where = "a run in one process"
    if not is_on_cpu(settings):
        errors.add(f"--device {cluster.device}: {where} computes on CPU; give --device cpu")
    if settings.trains and cluster.world_size > 1:
        ranks = cluster.world_size
        errors.add(f"--actor-num-gpus-per-node: {where} has one trainer rank, not {ranks}; give 1, on one node")
    if not settings.trains:
        errors.add(f"--debug-rollout-only: {where} trains; drop it")
    if settings.num_engines:
        errors.add(f"--rollout-engine {settings.rollout.rollout_engine}: {where} starts no servers; give torch")
    if settings.rollout.num_rollout_workers > 1:
        number = settings.rollout.num_rollout_workers
        errors.add(f"--num-rollout-workers {number}: {where} has no further processes; drop it")
    backend = settings.training.train_backend
    if not train_backend_spec(backend).trains_without_ray:
        able = names_with(TRAIN_BACKENDS, "trains_without_ray")
        errors.add(f"--train-backend {backend}: {where} trains with {able}; give {able}")
    if cluster.ray_address:
        errors.add(f"--ray-address {cluster.ray_address}: {where} uses no Ray; drop it")
    if settings.sends_deltas:
        errors.add(f"--update-weight-transfer-mode: {where} passes whole weights; drop it")
    for flag, folder in (("--save", checkpoint.save), ("--load", checkpoint.load)):
        if folder is not None:
            errors.add(f"{flag} {folder}: {where} neither saves nor resumes; drop {flag}")
    if checkpoint.urls:
        errors.add(f"--save-hf {checkpoint.save_hf}: {where} uploads nothing; give a folder")
    if settings.profiling.is_on:
        errors.add(f"--profile: {where} is not recorded; drop it")
    errors.raise_if_any()


# Check routing replay: the model has experts, the engine reports which it chose, and the trainer can be given them.


# Types whose routers can be given experts, on the backends that train them and the torch engine
# (miles/models/routers.py).
WITH_KNOWN_ROUTERS = (
    "qwen3_moe",
    "qwen3_next",
    "qwen3_5_moe",
    "qwen3_5_moe_text",
    "deepseek_v3",
    "deepseek_v32",
    "glm4_moe",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "nemotron_h",
)


def check_replay(settings: Settings, errors: Errors) -> None:
    """Check ``--use-rollout-routing-replay`` and ``--use-routing-replay``."""
    rollout, training = settings.rollout, settings.training
    given = {"use_rollout_routing_replay": rollout.use_rollout_routing_replay}
    given["use_routing_replay"] = training.use_routing_replay
    for name in (name for name, switch in given.items() if switch):
        if settings.reads_conversations:
            errors.refuse(name, True, "has nothing to repeat: conversations are not generated", "drop it")
        elif errors.none_about("hf_checkpoint"):
            with errors.catching():
                _check_model(name, settings, errors)
        if settings.megatron.mtp_heads:
            rule = "heads of multi-token prediction have experts that no engine chooses"
            errors.refuse(name, True, f"cannot be obeyed with --mtp-num-layers: {rule}", "drop one of the two")
    if rollout.use_rollout_routing_replay and not settings.is_given_samples:
        _check_engine(settings, errors)
        if settings.cluster.device == "cpu":
            check_replay_on_cpu(settings, errors)


def check_replay_on_cpu(settings: Settings, errors: Errors) -> None:
    """Refuse servers on CPU: SGLang 0.5.23 keeps experts in page-locked memory, which only a GPU's driver gives."""
    name = settings.rollout.rollout_engine
    wants = settings.rollout.use_rollout_routing_replay and not settings.is_given_samples
    if wants and engine_spec(name).has_servers and not settings.sglang.rollout_external:
        rule = f"--rollout-engine {name} reports which experts it chose on GPUs only"
        what_to_do = "use --rollout-engine torch, or replay the trainer's own with --use-routing-replay"
        errors.refuse("use_rollout_routing_replay", True, rule, what_to_do)


def _check_engine(settings: Settings, errors: Errors) -> None:
    """Check that the engine can return the experts that it chose; SGLang can if its servers know the flag for that."""
    name, known = settings.rollout.rollout_engine, known_server_flags()
    if not engine_spec(name).reports_experts:
        rule = f"--rollout-engine {name} does not report which experts it chose"
        errors.refuse("use_rollout_routing_replay", True, rule, f"use {names_with(ENGINES, 'reports_experts')}")
    is_ours = engine_spec(name).has_servers and not settings.sglang.rollout_external
    if is_ours and known and "--enable-return-routed-experts" not in known:
        rule = "the installed SGLang does not report which experts it chose"
        what_to_do = "install SGLang 0.5.23, or replay the trainer's own with --use-routing-replay"
        errors.refuse("use_rollout_routing_replay", True, rule, what_to_do)


def _check_model(name: str, settings: Settings, errors: Errors) -> None:
    """Check the model, if its configuration can be read without a network."""
    config = local_config(settings.model, "hf_checkpoint")
    if config is None:
        return
    kind = model_type(config)
    if READ_AS.get(kind, kind) not in WITH_KNOWN_ROUTERS:
        rule = f"{', '.join(WITH_KNOWN_ROUTERS)} have routers that can be given experts, and this model is {kind}"
        errors.refuse(name, True, rule, "drop it, or choose another model")
