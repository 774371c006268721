"""Check ``--deterministic-mode``: two runs of one command give the same weights, bit for bit."""

from __future__ import annotations

from miles.base.flags import Errors
from miles.config.components import ENGINES, engine_spec
from miles.config.settings import Settings

# Modes in which the order of completion decides which answers an iteration has.
BY_COMPLETION = ("partial_rollout", "over_sampling_early_stop", "fully_async")


def check_deterministic(settings: Settings, errors: Errors) -> None:
    """Check that nothing which two runs may do differently decides what is trained on."""
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
