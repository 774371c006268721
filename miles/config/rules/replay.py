"""Check routing replay: the model has experts, the engine says which it chose, and the trainer can be given them."""

from __future__ import annotations

from miles.base.flags import Errors
from miles.config.components import ENGINES, engine_spec, names_with
from miles.config.model import local_config
from miles.config.settings import Settings
from miles.config.sglang.server_flags import known_server_flags
from miles.models.installed_transformers import READ_AS
from miles.models.packing import model_type

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
        rule = f"--rollout-engine {name} says which experts it chose on GPUs only"
        what_to_do = "use --rollout-engine torch, or replay the trainer's own with --use-routing-replay"
        errors.refuse("use_rollout_routing_replay", True, rule, what_to_do)


def _check_engine(settings: Settings, errors: Errors) -> None:
    """Check that the engine can return the experts that it chose; SGLang can if its servers know the flag for that."""
    name, known = settings.rollout.rollout_engine, known_server_flags()
    if not engine_spec(name).reports_experts:
        rule = f"--rollout-engine {name} does not say which experts it chose"
        errors.refuse("use_rollout_routing_replay", True, rule, f"use {names_with(ENGINES, 'reports_experts')}")
    is_ours = engine_spec(name).has_servers and not settings.sglang.rollout_external
    if is_ours and known and "--enable-return-routed-experts" not in known:
        rule = "the installed SGLang does not say which experts it chose"
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
