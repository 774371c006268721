"""The file of a sweep, YAML or TOML: common flags, variants or a grid, seeds, and what to compare.

Scalars are taken as written, as ``--config`` takes them; only true, false and null have a meaning of their
own.
"""

import itertools
import re
import shlex
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from miles.base.flags import LARGEST, LONGEST_VALUE, Errors, FlagError, flag_name
from miles.base.storage import is_url
from miles.base.text import one_line
from miles.compat.border import read_command
from miles.config.files import FLAG
from miles.config.host_share import is_on_cpu
from miles.config.model import ModelArguments, fetch_configs
from miles.config.parser import Command, judge
from miles.config.rollout import names_iteration
from miles.config.settings import Settings
from miles.config.spelling import group_words

LARGEST_FILE = 200_000  # characters
MOST_RUNS = 10_000
LONGEST_NAME = 150  # characters of a variant, which names a folder
SEED_OFFSET = "seed_offset"
TABLE_JSON, TABLE_CSV, PAGE = "table.json", "table.csv", "sweep.html"  # alongside the folders of the variants
KEYS = ("config", "flags", "grid", "variants", "seeds", "baseline", "metrics", "last", "output")
OF_THE_SWEEP = ("seed", "rollout_seed", "output_dir")  # fields that the sweep sets for each run

_NAME = re.compile(r"\w[\w.,=+-]*")


@dataclass(frozen=True)
class SweepVariant:
    """Settings that are run with every seed.

    Attributes:
        name: Its name, and the name of the folder of its runs.
        flags: The flags in which it differs, by field: text, True, False, None, or a list or a dict of these. False and
            None take a common flag back.
        seed_offset: A number added to each seed. The same settings under other seeds show the noise of a comparison.
    """

    name: str
    flags: Mapping[str, Any]
    seed_offset: int = 0


@dataclass(frozen=True)
class Definition:
    """A sweep as its file describes it.

    Attributes:
        path: The file.
        words: The words of a command line that all runs begin with.
        flags: Common flags by field, which win over ``words``.
        variants: The settings that are compared.
        seeds: One run of each variant per seed.
        baseline: The name of the variant that the others are compared with.
        metrics: The metrics of the table; None: the usual ones.
        last: How many of the last values of a metric are averaged.
        output: The folder of all runs.
    """

    path: Path
    words: tuple[str, ...]
    flags: Mapping[str, Any]
    variants: tuple[SweepVariant, ...]
    seeds: tuple[int, ...]
    baseline: str
    metrics: tuple[str, ...] | None
    last: int
    output: Path


def read_definition(path: Path) -> Definition:
    """Read the file of a sweep.

    Raises:
        FlagError: With one message per fault; each names the key, its value, the rule and what to do.
    """
    values = _Values(path, _parsed(path))
    values.check_keys()
    variants = values.variants()
    definition = Definition(
        path=path,
        words=values.words(),
        flags=values.common(),
        variants=variants,
        seeds=values.seeds(),
        baseline=values.baseline(variants),
        metrics=values.metrics(),
        last=values.number("last", 10),
        output=values.output(),
    )
    runs = len(definition.variants) * len(definition.seeds)
    if runs > MOST_RUNS:
        values.refuse(f"the sweep has {runs} runs, more than {MOST_RUNS}; give fewer values or seeds")
    if values.faults:
        raise FlagError(*values.faults)
    return definition


class _Values:
    """The values of a file, and their faults."""

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self.entries = values
        self.faults: list[str] = []
        self._path = path

    def refuse(self, message: str) -> None:
        self.faults.append(f"{self._path}: {message}")

    def check_keys(self) -> None:
        for key in self.entries.keys() - {*KEYS}:
            self.refuse(f"{one_line(str(key), LONGEST_VALUE)}: no such key; give one of {', '.join(KEYS)}")

    def words(self) -> tuple[str, ...]:
        config, flags = self.entries.get("config"), self.entries.get("flags")
        words = []
        if config is not None:
            for name in config if isinstance(config, list) else [config]:
                words.append(f"{FLAG}={name}")
        if isinstance(flags, str):
            try:
                tokens = shlex.split(flags, comments=True)
            except ValueError as error:
                self.refuse(f"flags: cannot be read as a command line ({error}); check its quotes")
                return tuple(words)
            for flag, _ in group_words(tokens):
                self._check_field("flags", flag.removeprefix("--").replace("-", "_"))
            words += tokens
        return tuple(words)

    def common(self) -> dict[str, Any]:
        flags = self.entries.get("flags")
        return {} if flags is None or isinstance(flags, str) else self._fields("flags", flags)

    def variants(self) -> tuple[SweepVariant, ...]:
        grid, listed = self.entries.get("grid"), self.entries.get("variants")
        if grid is not None and listed is not None:
            self.refuse("grid and variants: a sweep has one of the two; write the combinations as variants")
        elif grid is not None:
            return self._combined(grid)
        elif listed is not None:
            return self._listed(listed)
        return (SweepVariant(name="run", flags={}),)

    def _listed(self, listed: Any) -> tuple[SweepVariant, ...]:
        if not isinstance(listed, Mapping) or not listed:
            self.refuse("variants: must map names to flags; write NAME: {flag: value}, or NAME: {} without changes")
            return ()
        variants = []
        for name, flags in listed.items():
            where = f"variants: {one_line(str(name), LONGEST_VALUE)}"
            if not _NAME.fullmatch(str(name)) or len(str(name)) > LONGEST_NAME:
                rule = f"must be letters, digits and . , = + - _, at most {LONGEST_NAME}, as it names a folder"
                self.refuse(f"{where}: {rule}; give another name")
            elif name in (TABLE_JSON, TABLE_CSV, PAGE):
                self.refuse(f"{where}: is the name of a file that the sweep writes; give another name")
            fields = self._fields(where, {} if flags is None else flags)
            offset = self._whole(f"{where}: {SEED_OFFSET}", fields.pop(SEED_OFFSET, "0"), 0)
            variants.append(SweepVariant(str(name), fields, offset or 0))
        self._refuse_equal(variants)
        return tuple(variants)

    def _combined(self, grid: Any) -> tuple[SweepVariant, ...]:
        fields = self._fields("grid", grid)
        for name, values in fields.items():
            if not isinstance(values, list) or not values:
                self.refuse(f"grid: {name}: must be a list of values; write {name}: [VALUE, VALUE]")
                return ()
        variants = []
        for values in itertools.product(*fields.values()):
            flags = dict(zip(fields, values, strict=True))
            name = ",".join(f"{field}={_in_a_name(value)}" for field, value in flags.items()) or "run"
            if len(name) > LONGEST_NAME:
                rule = f"the name has more than {LONGEST_NAME} characters"
                self.refuse(f"grid: {one_line(name, LONGEST_VALUE)}: {rule}; name the combinations under variants")
                return ()
            variants.append(SweepVariant(name, flags))
        self._refuse_equal(variants)
        return tuple(variants)

    def _refuse_equal(self, variants: list[SweepVariant]) -> None:
        for name, number in Counter(variant.name for variant in variants).items():
            if number > 1:
                self.refuse(f"grid: {number} combinations have the name {name}; name them under variants")

    def seeds(self) -> tuple[int, ...]:
        entry = self.entries.get("seeds", "1")
        if isinstance(entry, list):
            seeds = [self._whole("seeds", value, 0) for value in entry]
            if len({*seeds}) < len(seeds):
                self.refuse(f"seeds: {entry}: one is given twice; give different ones")
            if not seeds:
                self.refuse("seeds: the list is empty; give one seed or more, or their number")
            return tuple(seed for seed in seeds if seed is not None)
        number = self._whole("seeds", entry, 1)
        if number is not None and number > MOST_RUNS:
            self.refuse(f"seeds: {number}: is more than {MOST_RUNS}; a list gives the seeds themselves: [{number}]")
            return ()
        return tuple(range(1, (number or 0) + 1))

    def baseline(self, variants: tuple[SweepVariant, ...]) -> str:
        names = [variant.name for variant in variants]
        entry = self.entries.get("baseline")
        if entry is None:
            return names[0] if names else ""
        if str(entry) not in names and names:
            excerpt = one_line(str(entry), LONGEST_VALUE)
            self.refuse(f"baseline: {excerpt}: no such variant; give one of {one_line(', '.join(names), 1000)}")
        return str(entry)

    def metrics(self) -> tuple[str, ...] | None:
        entry = self.entries.get("metrics")
        if entry is None:
            return None
        if not isinstance(entry, list) or not entry or not all(isinstance(name, str) for name in entry):
            self.refuse("metrics: must be a list of names of metrics; write metrics: [rollout/reward]")
            return None
        return tuple(dict.fromkeys(entry))

    def output(self) -> Path:
        entry = self.entries.get("output")
        if entry is not None and (not isinstance(entry, str) or not entry.strip()):
            self.refuse(f"output: {one_line(str(entry), LONGEST_VALUE)}: must be a folder; write output: DIR")
        return Path("outputs", self._path.stem) if entry is None else Path(str(entry))

    def number(self, key: str, default: int) -> int:
        value = self._whole(key, self.entries.get(key, str(default)), 1)
        return default if value is None else value

    def _fields(self, where: str, flags: Any) -> dict[str, Any]:
        """Return flags by field name."""
        if not isinstance(flags, Mapping):
            self.refuse(f"{where}: must map flags to values; write flag: value")
            return {}
        fields: dict[str, Any] = {}
        for key, value in flags.items():
            name = str(key).removeprefix("--").replace("-", "_")
            if name in fields:
                self.refuse(f"{where}: {name}: is set twice; keep one of the two")
            self._check_field(where, name)
            fields[name] = value
        return fields

    def _check_field(self, where: str, name: str) -> None:
        if name in OF_THE_SWEEP:
            instead = "output or --out" if name == "output_dir" else "seeds"
            self.refuse(f"{where}: {flag_name(name)}: the sweep sets it for each run; drop it, and use {instead}")
        elif name == "config" and where != "flags":
            self.refuse(
                f"{where}: config: is no flag of a variant; write the key config alongside {where.split(':')[0]}"
            )
        elif name == "config" and not isinstance(self.entries["flags"], str):
            self.refuse("flags: config: is not a setting of a run; write the key config alongside flags")

    def _whole(self, where: str, value: Any, least: int) -> int | None:
        text = str(value)
        if isinstance(value, bool) or not re.fullmatch(r"\d{1,19}", text) or not least <= int(text) <= LARGEST:
            excerpt = one_line(text, LONGEST_VALUE)
            self.refuse(f"{where}: {excerpt}: must be a whole number of at least {least}; give {least} or more")
            return None
        return int(text)


def _in_a_name(value: Any) -> str:
    if isinstance(value, list):
        return "+".join(map(_in_a_name, value))
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return re.sub(r"[^\w.+-]+", "-", str(value)) or "-"


class _Loader(yaml.SafeLoader):
    """Read every scalar as text, but true, false and null; refuse a key that is set twice."""

    yaml_implicit_resolvers: dict[Any, Any] = {}

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Construct a mapping whose keys differ."""
        names = set()
        for key, _ in node.value:
            name = str(key.value)
            if name in names:
                raise yaml.MarkedYAMLError(problem=f"{name} is set twice", problem_mark=key.start_mark)
            names.add(name)
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^(?:true|false)$"), ["t", "f"])
_Loader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"^(?:~|null|)$"), ["~", "n", ""])


def _parsed(path: Path) -> Mapping[str, Any]:
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(LARGEST_FILE + 1)
    except OSError as error:
        raise FlagError(f"{path}: cannot be read ({error.strerror}); check the path") from None
    except ValueError:
        raise FlagError(f"{path}: is not UTF-8 text; check the path") from None
    if len(text) > LARGEST_FILE:
        raise FlagError(f"{path}: has more than {LARGEST_FILE} characters; check the path")
    try:
        if path.suffix == ".toml":
            values: Any = _as_written(tomllib.loads(text, parse_float=str))
        else:
            values = yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f":{error.problem_mark.line + 1}"
        raise FlagError(f"{path}{line}: {one_line(str(error.problem), LONGEST_VALUE)}; correct the line") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise FlagError(f"{path}: cannot be read ({one_line(str(error), LONGEST_VALUE)}); correct the file") from None
    if not isinstance(values, dict):
        raise FlagError(f"{path}: holds no sweep; write seeds, and flags or config (docs/report.md has an example)")
    return values


def _as_written(value: Any) -> Any:
    """Return the numbers of TOML as text."""
    if isinstance(value, dict):
        return {key: _as_written(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_as_written(item) for item in value]
    return value if isinstance(value, bool) else str(value)


# The runs of a sweep: the words of each command, validated before anything starts.


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
        seed: Pairs runs of different variants. Its own seeds have the variant's offset.
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
    runs, errors = _planned_runs(definition, out, check)
    if not errors:
        is_any, errors = _fetch_models(definition)
        if is_any and not errors:
            runs, errors = _planned_runs(definition, out, check)
    if errors:
        raise FlagError(*_located(errors, [variant.name for variant in definition.variants]))
    return runs


def _planned_runs(
    definition: Definition, out: Path, check: Check | None
) -> tuple[list[PlannedRun], dict[str, list[str]]]:
    """Return the runs, and the variants by error."""
    runs: list[PlannedRun] = []
    errors: dict[str, list[str]] = {}
    for seed in definition.seeds:
        for variant in definition.variants:
            try:
                runs.append(_planned(definition, variant, seed, out))
                if check is not None:
                    check(runs[-1].settings)
            except FlagError as error:
                for message in error.messages:
                    errors.setdefault(message, []).append(variant.name)
            except ValueError as error:
                errors.setdefault(str(error), []).append(variant.name)
    return runs, errors


def _fetch_models(definition: Definition) -> tuple[bool, dict[str, list[str]]]:
    """Fetch the configs of models on the hub, each once. Return whether one came, and the variants by error."""
    variants: dict[ModelArguments, list[str]] = {}
    for variant in definition.variants:
        model = read_command(definition.words, {**definition.flags, **variant.flags}).settings.model
        variants.setdefault(model, []).append(variant.name)
    is_any = False
    errors = dict[str, list[str]]()
    for model, names in variants.items():
        try:
            is_any |= fetch_configs(model).is_any
        except FlagError as error:
            errors |= dict.fromkeys(error.messages, names)
    return is_any, errors


def _located(errors: Mapping[str, Iterable[str]], variants: list[str]) -> Iterator[str]:
    for message, names in errors.items():
        where = list(dict.fromkeys(names))
        if len(variants) == 1:
            yield message
        else:
            yield f"{'all variants' if len(where) == len(variants) else '; '.join(where)}: {message}"


def _planned(definition: Definition, variant: SweepVariant, seed: int, out: Path) -> PlannedRun:
    folder = out / variant.name / f"seed-{seed}"
    run_seed = seed + variant.seed_offset
    keywords = {**definition.flags, **variant.flags}
    keywords |= {"seed": run_seed, "rollout_seed": run_seed, "output_dir": str(folder)}
    section = read_command(definition.words, keywords).settings.checkpoint
    if section.save is not None:
        keywords["save"] = _own_place(section.save, folder / CHECKPOINTS, variant.name, seed)
    if section.save_hf is not None:
        exports = folder / EXPORT / "{iteration}" if names_iteration(section.save_hf) else folder / EXPORT
        keywords["save_hf"] = _own_place(section.save_hf, exports, variant.name, seed)
    command = _on_one_rank(read_command(definition.words, keywords))
    settings = _judged(command, folder, run_seed)
    resuming = None
    if section.save is not None:
        from_checkpoint = {"load": keywords["save"], **dict.fromkeys(_STARTING_POINT)}
        resumed = _on_one_rank(read_command(definition.words, keywords | from_checkpoint))
        judge(resumed)
        resuming = resumed.expanded.words
    return PlannedRun(variant.name, seed, folder, command.expanded.words, resuming, settings)


def _own_place(path: str, local: Path, variant: str, seed: int) -> str:
    """Return the path that a run of the sweep saves to: its own folder, or one inside the URL of all runs."""
    if not is_url(path):
        return str(local)
    return f"{path.rstrip('/')}/{variant}/seed-{seed}"


def _on_one_rank(command: Command) -> Command:
    """Give a command on CPU one trainer rank unless it names a number.

    The default depends on the cores that a process sees. The cores of a run depend on ``--jobs``, which must not change
    its results.
    """
    if command.ranks is None or not is_on_cpu(command.settings):
        return command
    words = (*command.expanded.words, f"{flag_name('actor_num_gpus_per_node')}=1")
    return replace(command, ranks=1, expanded=replace(command.expanded, words=words))


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
    """Yield the settings that runs of a sweep cannot share, and settings that are no run."""
    settings = command.settings
    sections: dict[str, Any] = {}
    for section in (settings.tracking, settings.rollout, settings.sglang):
        sections |= vars(section)
    for name in _SHARED_PORTS:
        if sections[name]:
            rule = "two runs at once cannot have one port"
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
