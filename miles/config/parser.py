"""Read the command line into ``Settings``. Imports neither torch nor Ray, so that a wrong flag is reported at once."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

# A private name of a pinned version (2.0): the public entry points take one dataclass, not many.
from argparse_dataclass import _add_dataclass_options

import miles
from miles.base.flags import LARGEST, LONGEST_VALUE, Errors, FlagError, flag_name, flag_rules
from miles.base.host import busy_cores, has_bf16, has_gpu
from miles.base.text import one_line, program
from miles.config import files, rules
from miles.config.choice import (
    JoinedCluster,
    choose_backend,
    choose_device,
    choose_engine,
    choose_ranks,
    in_words,
    joined_cluster,
    trained_without_megatron,
)
from miles.config.cluster import ClusterArguments, is_cluster_address
from miles.config.command_parser import rephrased
from miles.config.components import TRAIN_BACKENDS
from miles.config.files import Expanded, expand_configs, located, with_words_of_files
from miles.config.host_share import fit_to_host, is_on_cpu
from miles.config.inputs import check_inputs
from miles.config.megatron.fields import DESTINATION, MODEL_FLAGS, add_megatron_flags, installed_fields
from miles.config.megatron.rules import normalize_converter, normalize_megatron
from miles.config.megatron.settings import MegatronArguments
from miles.config.model import fetch_configs
from miles.config.needs import without_effect
from miles.config.notes import READ_AS, Note, note_on, start_refused, surprises
from miles.config.rollout import names_iteration
from miles.config.servers.passed_on import ServerFlags, is_passed_on, split_server_flags
from miles.config.settings import SECTIONS, Settings
from miles.config.sglang.rules import check_server_files, check_server_heads, normalize_server_flags
from miles.config.spelling import (
    cut_lists,
    cut_spaced_words,
    flags_in,
    group_words,
    stray_words,
    with_written_flags,
)
from miles.config.suggest import environment_strings, near_choice, suggestion
from miles.config.training import fill_precision
from miles.config.validate import Validated, validate

RAY_ADDRESS = "RAY_ADDRESS"  # the variable that Ray's own commands read


class FlagParser(argparse.ArgumentParser):
    """Parse as argparse does, but collect errors, raise ``FlagError`` instead of exiting, and suggest near flags."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._negative_number_matcher = re.compile(r"-(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?$")  # argparse's lacks -1e-5
        self.errors = Errors()

    def for_command(self, errors: Errors) -> FlagParser:
        """Return a parser of the same flags that adds to ``errors``. To build one takes longer than to read with it."""
        parser = copy.copy(self)  # reading changes nothing else
        parser.errors = errors
        return parser

    def error(self, message: str) -> NoReturn:
        """Raise ``FlagError`` with the errors so far, and with this one, after which the words cannot be read on."""
        self.errors.add(rephrased(message))
        raise FlagError(*self.errors.messages)

    def read(self, words: Sequence[str], known: Mapping[str, str] = MappingProxyType({})) -> argparse.Namespace:
        """Read the words of a command line; wrong values, and flags that do not exist, are added to ``errors``.

        Args:
            words: The words.
            known: Further flags that exist, for suggestions, and what to add if one of them is suggested.

        Raises:
            FlagError: The words after an error cannot be read.
        """
        if "--" in words:
            self.error("--: is no flag; drop it")
        namespace, unknown = self.parse_known_args(words)
        flags = [word.split("=")[0] for word in unknown if word.startswith("-")]
        # A long one is cut: the search for a near one takes the square of its length.
        for flag in (one_line(flag, LONGEST_VALUE) for flag in flags):
            way_out = suggestion(flag, [*self._option_string_actions, *known])
            more = known.get(way_out.removeprefix("did you mean ").removesuffix("?"), "")
            self.errors.add(f"{flag}: no such flag; {way_out}{more}")
        if words and words[0].endswith((".yaml", ".yml")):  # all else would be about what is in this file
            raise FlagError(f"{one_line(words[0], LONGEST_VALUE)} belongs to no flag; give {files.FLAG} {words[0]}")
        for message in stray_words(words, self._option_string_actions):
            self.errors.add(message)
        return namespace

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        """Convert the words of one flag; a wrong value is added to ``errors`` and leaves the default."""
        try:
            values = super()._get_values(action, arg_strings)
        except argparse.ArgumentError as error:
            return self._refuse_value(action, arg_strings, rephrased(str(error)))
        for value in values if isinstance(values, list) else [values]:
            if isinstance(value, int) and abs(value) > LARGEST:
                excerpt = one_line(" ".join(arg_strings), LONGEST_VALUE)
                rule = f"a number beyond {LARGEST}, which no tensor holds"
                self.errors.add(f"{action.option_strings[-1]} {excerpt}: {rule}; give a smaller one")
                return action.default
        return _expanded(values)

    def _refuse_value(self, action: argparse.Action, words: list[str], message: str) -> Any:
        """Add the error of a value; return the one to check other flags with: the intended value, or the default."""
        value = words[0] if len(words) == 1 else ""
        choices = [choice for choice in action.choices or () if isinstance(choice, str)]
        meant = near_choice(value, choices) if action.nargs is None else None
        if meant is not None:
            message = message.replace("no such choice; ", f"no such choice; did you mean {meant}? Else ", 1)
        self.errors.add(message)
        return action.default if meant is None else meant


def _expanded(value: Any) -> Any:
    """Put the home folder for the ``~`` of paths, as a shell does, which YAML and ``--flag=~/path`` do not pass."""
    if isinstance(value, list):
        return [_expanded(item) for item in value]
    return os.path.expanduser(value) if isinstance(value, str) and value.startswith("~/") else value


class DefaultsFormatter(argparse.HelpFormatter):
    """Format help texts so that they end with the default of the flag, which only the dataclasses know."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=44, width=120)

    def _get_help_string(self, action: argparse.Action) -> str:
        field = declared().get(action.dest)
        text = action.help or ""
        if field is None:
            return text
        default = [] if field.default is None or field.default is False else [f"default: {field.default}"]
        more = "; ".join([*flag_rules(field), *default])
        return f"{text} ({more})".replace("%", "%%") if more else text


@cache
def declared() -> dict[str, dataclasses.Field[Any]]:
    """Return the declaration of every flag, by field name. Names are unique over all sections."""
    return {field.name: field for section in SECTIONS.values() for field in dataclasses.fields(section)}


def section_title(section: type) -> tuple[str, str]:
    """Return title and description of a section: its docstring before and after the colon."""
    title, _, description = (section.__doc__ or "").partition(":")
    return title.strip(), description.strip()


def build_parser() -> FlagParser:
    """Build the parser of ``miles train``: a group per section of ``Settings``, and ``--explain`` and ``--version``."""
    parser = FlagParser(
        prog=program(),
        usage="%(prog)s [--config FILE [key=value ...]] --flag value ... [@file]",
        description="Reinforcement-learning post-training of language models. @file reads flags from a file.",
        formatter_class=DefaultsFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        files.FLAG,
        nargs="+",
        metavar=("FILE", "KEY=VALUE"),
        help="read settings from a YAML file, such as the run.yaml of a run; flags and KEY=VALUE after it win",
    )
    parser.add_argument("--explain", action="store_true", help="print what this command would do, then stop")
    parser.add_argument(
        "--strict-flags", action="store_true", help="refuse flags that would be accepted without having an effect"
    )
    parser.add_argument("--version", action="version", version=f"miles {miles.__version__}")
    for section in SECTIONS.values():
        group = parser.add_argument_group(*section_title(section))
        _add_dataclass_options(section, group)
    return parser


@dataclass(frozen=True)
class Command:
    """Hold a command line that was read, and not yet judged.

    Attributes:
        settings: What our own flags say, with the backend and the engine chosen.
        set_fields: The fields of our sections that it sets, and Megatron's fields, under ``DESTINATION`` + name.
        choice: Which backend and engine were chosen, and why, in one line.
        ranks: The default of --actor-num-gpus-per-node on this host; None if it is given.
        joined: The GPUs of the Ray cluster that the run joins, or why they are not known; None if it was not asked.
        expanded: Its words as they were written, after each ``@file``, ``--config`` and keyword is replaced.
        errors: Wrong values, and flags that do not exist.
        explains: Whether to explain the command instead of running it.
        is_strict: Whether flags without effect are errors.
        notes: What was read in another spelling.
        later: Judges what was read of it and depends on the settings: adds errors, and returns notes.
        remarks: Yields notes on a valid run, by its settings and the fields that the command sets.
    """

    settings: Settings
    set_fields: frozenset[str]
    choice: str
    ranks: int | None
    joined: JoinedCluster | None
    expanded: Expanded
    errors: tuple[str, ...]
    explains: bool
    is_strict: bool
    notes: tuple[Note, ...] = ()
    later: Callable[[Settings, Errors], list[Note]] = lambda settings, errors: []
    remarks: Callable[[Settings, Collection[str]], Iterable[str]] = lambda settings, set_fields: ()

    def runs(self, starts: bool) -> bool:
        """Return whether the command runs on this host if it ``starts``: it is neither explained nor rehearsed."""
        return starts and not (self.explains or self.settings.rehearsal.rehearse)


def parse(argv: Sequence[str]) -> Settings:
    """Read our flags, Megatron's and SGLang's; nothing is validated yet.

    Raises:
        FlagError: The words are no flags, or values have the wrong type.
    """
    errors = Errors()
    expanded = expand(argv, {}, (), errors)
    command = read_words(expanded.words, expanded, errors)
    if command.errors:
        raise FlagError(*located(command.errors, expanded.origins))
    return command.settings


def expand(argv: Sequence[str], keywords: Mapping[str, Any], elsewhere: Collection[str], errors: Errors) -> Expanded:
    """Replace each ``@file`` and ``--config FILE`` of a command by the words in it.

    Args:
        argv: The words of the command.
        keywords: Further settings by name, as plain values; they replace the same flags among the words.
        elsewhere: Flags of neither miles, Megatron nor SGLang that a file may set.
        errors: Collects files that cannot be read, and entries that are no settings.

    Raises:
        FlagError: A file of flags cannot be read.
    """
    parser = _own_flags().for_command(errors)
    try:
        words, replaced = with_words_of_files(argv)
        words = cut_spaced_words(words, {files.FLAG})
    except ValueError as error:
        parser.error(str(error))

    def further() -> set[str]:
        return {*elsewhere, *(field.flag for field in installed_fields())}

    expanded = expand_configs(words, parser._option_string_actions, further, errors, keywords)
    return replace(expanded, replaced=(*replaced, *expanded.replaced))


def read_words(
    words: Sequence[str],
    expanded: Expanded,
    errors: Errors,
    elsewhere: Mapping[str, str] = MappingProxyType({}),
    megatron: Sequence[str] = (),
) -> Command:
    """Read words of our own sections, of Megatron and of SGLang.

    Args:
        words: The words.
        expanded: The command that they come from.
        errors: The errors so far; wrong values, and flags that do not exist, are added.
        elsewhere: Flags that exist elsewhere, and what to add if one of them is suggested.
        megatron: Further flags of Megatron in the command, which choose its backend too.

    Raises:
        FlagError: The words after an error cannot be read.
    """
    our_flags = {*_own_flags()._option_string_actions}
    known = known_flags(words, elsewhere)
    words = cut_spaced_words(words, known)
    our_words, passed_on = split_server_flags(words, our_flags)
    layout = {flag_name(field.name) for field in dataclasses.fields(MegatronArguments)}
    flags = [flag for flag in flags_in(our_words) if flag in known and (flag not in our_flags or flag in layout)]
    backend = dict(group_words(our_words)).get("--train-backend", ())[-1:]
    names_megatron = any(name in backend for name, row in TRAIN_BACKENDS.items() if row.reads_megatron_flags)
    parser = _all_flags(bool(flags or megatron) or names_megatron).for_command(errors)
    try:
        namespace = parser.read(
            cut_lists(our_words, parser._option_string_actions), {**dict.fromkeys(known - our_flags, ""), **elsewhere}
        )
    except FlagError as error:
        raise FlagError(*located(error.messages, expanded.origins)) from None
    written = flags_in(expanded.words)
    flags = sorted([*flags, *megatron], key=lambda flag: written.index(flag) if flag in written else len(written))
    return _command(namespace, passed_on, flags, flags_in(words), expanded, errors)


def known_flags(words: Sequence[str], elsewhere: Collection[str] = ()) -> set[str]:
    """Return our flags and Megatron's. The fields of its dataclasses are read only if a word may be one of them.

    Args:
        words: The words of a command.
        elsewhere: Flags that are none of these.
    """
    flags = {*_own_flags()._option_string_actions, *(field.flag for field in MODEL_FLAGS)}
    known = {*flags, *elsewhere}
    if any(flag.split()[0] not in known and not is_passed_on(flag) for flag in flags_in(words)):
        flags |= {field.flag for field in installed_fields()}
    return flags


@cache
def _own_flags() -> FlagParser:
    return build_parser()


@cache
def _all_flags(with_megatron: bool) -> FlagParser:
    """Return a parser of our flags and, if asked for, of Megatron's own dataclasses."""
    if not with_megatron:
        return _own_flags()
    parser = build_parser()
    group = parser.add_argument_group("megatron-core", "fields of its own configuration, by their names there")
    add_megatron_flags(group, taken={*declared(), *parser._option_string_actions})
    return parser


def _command(
    namespace: argparse.Namespace,
    passed_on: ServerFlags,
    megatron: Sequence[str],
    flags: Sequence[str],
    expanded: Expanded,
    errors: Errors,
) -> Command:
    by_name = {name: value for name, value in vars(namespace).items() if value is not dataclasses.MISSING}
    settings = _settings(by_name, passed_on)
    backend = choose_backend(by_name.get("train_backend"), megatron, trained_without_megatron(settings))
    servers = [flag for flag in flags if is_passed_on(flag)]
    joined = _ask_cluster(settings.cluster)
    device = choose_device(settings.cluster.device, has_gpu(), joined)
    engine = choose_engine(by_name.get("rollout_engine"), servers, device)
    ranks = None if "actor_num_gpus_per_node" in by_name else choose_ranks(device, busy_cores())
    settings = replace(
        settings,
        training=replace(settings.training, train_backend=backend.value),
        rollout=replace(settings.rollout, rollout_engine=engine.value),
    )
    return Command(
        settings,
        frozenset(name for name, value in by_name.items() if value is not None),
        in_words(backend, engine, ranks, None if joined is None else device),
        None if ranks is None else ranks.value,
        joined,
        expanded,
        tuple(errors.messages),
        namespace.explain,
        namespace.strict_flags,
    )


def _address(cluster: ClusterArguments) -> str | None:
    """Return the address of the Ray that the run joins; None if it starts its own."""
    return cluster.ray_address or os.environ.get(RAY_ADDRESS) or None  # the variable is set by ``ray job submit``


def _ask_cluster(cluster: ClusterArguments) -> JoinedCluster | None:
    """Ask the Ray cluster that the run joins for its GPUs, if nothing else states whether there is CUDA."""
    address = _address(cluster)
    if cluster.device != "auto" or has_gpu() or address is None or not is_cluster_address(address):
        return None
    return joined_cluster(address)


def _settings(by_name: Mapping[str, Any], passed_on: ServerFlags) -> Settings:
    def section(cls: type) -> Any:
        values = {field.name: by_name[field.name] for field in dataclasses.fields(cls) if field.name in by_name}
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})

    megatron_overrides = tuple(
        (name.removeprefix(DESTINATION), _flat(value))
        for name, value in by_name.items()
        if name.startswith(DESTINATION) and value is not None
    )
    sections = {name: section(cls) for name, cls in SECTIONS.items()}
    return Settings(**sections, megatron_overrides=megatron_overrides, server_flags=passed_on)


def _flat(value: Any) -> Any:
    """Join the lists of numbers that one flag has (``1 1``, or ``[1]*2``)."""
    if isinstance(value, list) and value and all(isinstance(part, list) for part in value):
        return [number for part in value for number in part]
    return value


def judge(command: Command, starts: bool = False) -> Validated:
    """Settle and validate a command that was read.

    Args:
        command: The command.
        starts: Whether the run starts now, on this host. Otherwise a note states why it could not.

    Raises:
        FlagError: With all errors of the command.
    """
    try:
        return _judge(command, starts)
    except FlagError as error:
        messages = with_written_flags(error.messages, command.expanded.words)
        raise FlagError(*located(messages, command.expanded.origins)) from None


def _judge(command: Command, starts: bool) -> Validated:
    errors = Errors()
    for message in command.errors:
        errors.add(message)
    settings = _with_defaults(command)
    notes = [*command.notes, *command.later(settings, errors)]
    for normalize in (  # in this order: a step reads the result of the steps before it
        normalize_converter,
        partial(normalize_megatron, errors=errors),
        normalize_values,
        without_effect,
        normalize_server_flags,
    ):
        settings, new_notes = normalize(settings)
        notes += new_notes
    notes = [replace(note, written=with_written_flags([note.written], command.expanded.words)[0]) for note in notes]
    try:
        validated = validate(settings, command.set_fields)
        notes += validated.accepted
    except FlagError as error:
        for message in error.messages:
            errors.add_unless_refused(message)
    for note in notes:
        if command.is_strict and note.is_refused_if_strict:
            errors.add(note.refusal)
    for message in _errors_of_host(settings):
        errors.add_unless_refused(message)
    of_start, starts = Errors(), command.runs(starts)
    rules.check_load(settings, of_start)
    rules.check_sources(settings, of_start)
    if not errors.messages:
        rules.check_devices(validated.settings, of_start)
        rules.check_engine_is_there(validated.settings, of_start)
    joined = command.joined if command.joined is not None and command.joined.gpus is None else None
    if starts and joined is not None and "refused" in joined.fault:  # a run would wait for it, and never start
        rule = f"no Ray cluster answers there ({joined.fault})"
        errors.refuse("ray_address", joined.address, rule, "start one with ray start, or correct the address")
    for message in of_start.messages if starts else ():
        errors.add_unless_refused(message)
    errors.raise_if_any()
    settings = fit_to_host(validated.settings, command.set_fields)
    surprising = [*validated.surprises]
    if joined is not None:
        planned = "the run is planned for CPU; give --device cuda if the cluster has GPUs, else --device cpu"
        why = f"the GPUs of the cluster are not known ({joined.fault})"
        surprising.append(f"--ray-address {joined.address}: {why}, so {planned}")
    surprising += map(start_refused, of_start.messages)
    surprising += rules.notes_on_saved_samples(settings)
    surprising += surprises(settings, command.set_fields, is_on_cpu(settings), has_bf16())
    surprising += command.remarks(settings, command.set_fields)
    return replace(
        validated,
        settings=settings,
        surprises=tuple(surprising),
        accepted=tuple(notes),
        choice=command.choice,
        set_fields=command.set_fields,
        replaced=command.expanded.replaced,
        explains=command.explains,
    )


def _errors_of_host(settings: Settings) -> list[str]:
    errors = Errors()
    if is_on_cpu(settings):
        rules.check_deterministic_on_cpu(settings, errors)
        rules.check_replay_on_cpu(settings, errors)
    else:
        check_server_heads(settings, errors)
    rules.check_saved_samples(settings, errors)
    check_server_files(settings, errors)
    return errors.messages


def _with_defaults(command: Command) -> Settings:
    """Fill in the precision, and the defaults that depend on this host. ``parse`` sets the defaults of the sections."""
    settings = command.settings
    cluster = settings.cluster
    if cluster.ray_address is None:
        cluster = replace(cluster, ray_address=_address(cluster))
    if command.joined is not None and command.joined.gpus:
        cluster = replace(cluster, device="cuda")
    settings = replace(settings, cluster=cluster)
    emulates_bf16 = is_on_cpu(settings) and not (has_bf16() or settings.rehearsal.rehearse)
    settings = replace(settings, training=fill_precision(settings.training, emulates_bf16))
    if command.ranks is not None:
        settings = replace(settings, cluster=replace(settings.cluster, actor_num_gpus_per_node=command.ranks))
    return settings


def with_inputs(command: Command, validated: Validated, starts: bool) -> Validated:
    """Check the rows and functions of a command that explains, or that ``starts`` a run now; print its warnings.

    Raises:
        FlagError: With all that is wrong.
    """
    starts = command.runs(starts)
    if not (starts or command.explains):
        return validated
    try:
        inputs = check_inputs(validated.settings, starts)
    except FlagError as error:
        raise FlagError(*located(error.messages, command.expanded.origins)) from None
    if starts:
        for warning in inputs.warnings:
            print(f"WARNING: {warning}", file=sys.stderr)
    return replace(validated, inputs=inputs)


def judge_with_hub(
    read: Callable[[], Command], judged: Callable[[Command], Validated] = judge, starts: bool = False
) -> tuple[Command, Validated]:
    """Read and judge a command; again, if the config of a model is on the hub only and could be fetched.

    Wrong flags are reported without the hub, except the bridge's: whether it is needed depends on the model. A run that
    ``starts`` here is refused if a model is not on this machine and the hub cannot be reached.
    """
    command = read()
    validated = judge_without_hub(command, judged)
    fetched = fetch_configs(command.settings.model)
    if fetched.is_any:
        command = read()
        validated = judged(command)
    if isinstance(validated, FlagError):
        raise validated
    if command.runs(starts) and fetched.absent and not validated.settings.cluster.ray_address:
        raise FlagError(*(f"{fault}; check the network, or give a folder" for fault in fetched.absent))
    return command, replace(validated, surprises=(*validated.surprises, *fetched.notes))


def judge_without_hub(command: Command, judged: Callable[[Command], Validated] = judge) -> Validated | FlagError:
    """Judge a command without the config of its model; the bridge's errors, which depend on it, are returned."""
    try:
        return judged(command)
    except FlagError as error:
        if not all("--megatron-to-hf-mode" in message for message in error.messages):
            raise
        return error


# Read values that scripts of related launchers write in another form.


def normalize_values(settings: Settings) -> tuple[Settings, list[Note]]:
    """Read values that are written in another form: a set without a name, an environment of numbers."""
    notes = list[Note]()
    sets = settings.evaluation.eval_prompt_data
    if sets is not None and len(sets) == 1:
        named = (Path(sets[0]).stem or sets[0], sets[0])
        notes.append(note_on(READ_AS, "eval_prompt_data", sets, " ".join(("--eval-prompt-data", *named))))
        settings = replace(settings, evaluation=replace(settings.evaluation, eval_prompt_data=named))
    saved = settings.rollout.save_debug_rollout_data
    if saved is not None and not names_iteration(saved) and settings.rollout.num_rollout != 1:
        path = Path(saved)
        by_iteration = str(path.with_name(f"{path.stem}_{{iteration}}{path.suffix}"))
        notes.append(
            note_on(READ_AS, "save_debug_rollout_data", saved, f"{by_iteration}: each iteration has a separate file")
        )
        settings = replace(settings, rollout=replace(settings.rollout, save_debug_rollout_data=by_iteration))
    if settings.rollout.debug_rollout_only and settings.cluster.colocate:
        size = settings.cluster.world_size if settings.engine.has_servers else None
        devices = f"--rollout-num-gpus {size}" if size else "the engine's own device"
        notes.append(note_on(READ_AS, "colocate", True, f"{devices}: no trainer shares it"))
        settings = replace(settings, cluster=replace(settings.cluster, colocate=False, rollout_num_gpus=size))
    variables = settings.cluster.train_env_vars
    if variables is not None and (strings := environment_strings(variables)) is not None:
        why = "every value as a string, as environment variables are"
        notes.append(note_on(READ_AS, "train_env_vars", variables, why))
        settings = replace(settings, cluster=replace(settings.cluster, train_env_vars=strings))
    return settings, notes
