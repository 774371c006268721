"""The runs of a sweep: the words of each command, validated before anything starts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from miles.base.flags import Errors, FlagError, flag_name
from miles.base.remote_folder import is_url
from miles.commands.sweeps.definition import OF_THE_SWEEP, Definition, Variant
from miles.config.files.hub_config import fetch_configs
from miles.config.host_share import is_on_cpu
from miles.config.model import ModelArguments
from miles.config.parser import Command, judge, read_command
from miles.config.rollout import names_iteration
from miles.config.settings import Settings

CHECKPOINTS, EXPORT = "checkpoints", "hf"  # in the folder of a run
_STARTING_POINT = ("finetune", "no_load_optim", "no_load_rng", "no_load_fallback")  # say how --load starts a run
Check = Callable[[Settings], None]
_SHARED_PORTS = ("report_port", "prometheus_port")
_SHARED_FILES = ("save_debug_rollout_data", "update_weight_disk_dir")


@dataclass(frozen=True)
class PlannedRun:
    """A run of a variant with a seed.

    Attributes:
        variant: The name of the variant.
        seed: The seed by which runs of different variants are paired. Its own seeds have the variant's offset.
        folder: Its ``--output-dir``.
        words: The flags of the command that starts it: no file is left in them.
        resuming: The flags that continue it from its checkpoints; None if it saves none.
        settings: What ``words`` say, validated.
    """

    variant: str
    seed: int
    folder: Path
    words: tuple[str, ...]
    resuming: tuple[str, ...] | None
    settings: Settings

    @property
    def name(self) -> str:
        """The run as people read it."""
        return f"{self.variant} seed {self.seed}"


def plan(definition: Definition, out: Path, check: Check | None = None) -> list[PlannedRun]:
    """Return the runs, seed by seed, so that all variants have equally many whenever the sweep is stopped.

    Args:
        definition: The sweep.
        out: The folder of all runs.
        check: Raises FlagError for settings that cannot be run here.

    Raises:
        FlagError: With every error in the flags of every variant, each with the variants that have it.
    """
    runs, found = _planned_runs(definition, out, check)
    if not found:
        is_any, found = _fetch_models(definition)
        if is_any and not found:
            runs, found = _planned_runs(definition, out, check)
    if found:
        raise FlagError(*_located(found, [variant.name for variant in definition.variants]))
    return runs


def _planned_runs(
    definition: Definition, out: Path, check: Check | None
) -> tuple[list[PlannedRun], dict[str, list[str]]]:
    """Return the runs, and the variants by error."""
    runs: list[PlannedRun] = []
    found: dict[str, list[str]] = {}
    for seed in definition.seeds:
        for variant in definition.variants:
            try:
                runs.append(_planned(definition, variant, seed, out))
                if check is not None:
                    check(runs[-1].settings)
            except FlagError as error:
                for message in error.messages:
                    found.setdefault(message, []).append(variant.name)
            except ValueError as error:
                found.setdefault(str(error), []).append(variant.name)
    return runs, found


def _fetch_models(definition: Definition) -> tuple[bool, dict[str, list[str]]]:
    """Fetch the configs of models on the hub, each once. Return whether one came, and the variants by error."""
    variants: dict[ModelArguments, list[str]] = {}
    for variant in definition.variants:
        model = read_command(definition.words, {**definition.flags, **variant.flags}).settings.model
        variants.setdefault(model, []).append(variant.name)
    is_any, found = False, dict[str, list[str]]()
    for model, names in variants.items():
        try:
            is_any |= fetch_configs(model).is_any
        except FlagError as error:
            found |= dict.fromkeys(error.messages, names)
    return is_any, found


def _located(found: Mapping[str, Iterable[str]], variants: list[str]) -> Iterator[str]:
    for message, names in found.items():
        where = list(dict.fromkeys(names))
        if len(variants) == 1:
            yield message
        else:
            yield f"{'all variants' if len(where) == len(variants) else '; '.join(where)}: {message}"


def _planned(definition: Definition, variant: Variant, seed: int, out: Path) -> PlannedRun:
    folder = out / variant.name / f"seed-{seed}"
    own = seed + variant.seed_offset
    keywords = {**definition.flags, **variant.flags}
    keywords |= {"seed": own, "rollout_seed": own, "output_dir": str(folder)}
    given = read_command(definition.words, keywords).settings.checkpoint
    if given.save is not None:
        keywords["save"] = _own_place(given.save, folder / CHECKPOINTS, variant.name, seed)
    if given.save_hf is not None:
        exports = folder / EXPORT / "{iteration}" if names_iteration(given.save_hf) else folder / EXPORT
        keywords["save_hf"] = _own_place(given.save_hf, exports, variant.name, seed)
    command = _on_one_rank(read_command(definition.words, keywords))
    settings = _judged(command, folder, own)
    resuming = None
    if given.save is not None:
        from_checkpoint = {"load": keywords["save"], **dict.fromkeys(_STARTING_POINT)}
        resumed = _on_one_rank(read_command(definition.words, keywords | from_checkpoint))
        judge(resumed)
        resuming = resumed.words
    return PlannedRun(variant.name, seed, folder, command.words, resuming, settings)


def _own_place(given: str, local: Path, variant: str, seed: int) -> str:
    """Return the path that a run of the sweep saves to: its own folder, or one inside the URL of all runs."""
    if not is_url(given):
        return str(local)
    return f"{given.rstrip('/')}/{variant}/seed-{seed}"


def _on_one_rank(command: Command) -> Command:
    """Give a command on CPU one trainer rank unless it names a number.

    The default depends on the cores that a process sees. Those of a run depend on ``--jobs``, which must not change its
    results.
    """
    if command.ranks is None or not is_on_cpu(command.settings):
        return command
    words = (*command.words, f"{flag_name('actor_num_gpus_per_node')}=1")
    return replace(command, ranks=1, words=words)


def _judged(command: Command, folder: Path, seed: int) -> Settings:
    """Validate a run, and refuse what runs of a sweep cannot share.

    Raises:
        FlagError: With all errors.
    """
    errors = Errors()
    for message in _faults(command, folder, seed):
        errors.add(message)
    with errors.catching():
        validated = judge(command)
    errors.raise_if_any()
    return validated.settings


def _faults(command: Command, folder: Path, seed: int) -> Iterator[str]:
    """Yield what runs of a sweep cannot share, and what is no run."""
    settings = command.settings
    sections: dict[str, Any] = {}
    for section in (settings.tracking, settings.rollout, settings.sglang):
        sections |= vars(section)
    for name in _SHARED_PORTS:
        if sections[name]:
            rule = "two runs at a time cannot have one port"
            yield f"{flag_name(name)} {sections[name]}: {rule}; give 0, or drop {flag_name(name)}"
    for name in _SHARED_FILES:
        if sections[name] is not None:
            rule = "all runs would write to the same place"
            yield f"{flag_name(name)} {sections[name]}: {rule}; drop {flag_name(name)}"
    if command.explains or settings.rehearsal.rehearse:
        name = "explain" if command.explains else "rehearse"
        yield f"--{name}: a sweep trains; drop it, and run miles {name} for one command"
    if (settings.tracking.output_dir, settings.training.seed, settings.data.rollout_seed) != (str(folder), seed, seed):
        names = ", ".join(map(flag_name, OF_THE_SWEEP))
        yield (
            f"--custom-config-path {settings.rollout.custom_config_path}: sets one of {names}, which the sweep sets "
            "for each run; drop it there"
        )
