"""Read the command line into ``Settings``. Imports neither torch nor Ray, so that a wrong flag is reported at once."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, NoReturn

# A private name of a pinned version (argparse-dataclass 2.0): the public entry points take one dataclass, not many.
from argparse_dataclass import _add_dataclass_options

import miles
from miles.base.flags import LARGEST, LONGEST_VALUE, Errors, FlagError, flag_name
from miles.base.host import busy_cores, has_bf16, has_gpu
from miles.base.text import one_line
from miles.compat import custom_config
from miles.compat.launch.distillation import read_estimator
from miles.compat.launch.mismatch_config import read_mismatch_config
from miles.compat.launch.normalize import FOREIGN_FLAGS, normalize_flags
from miles.compat.launch.paths import names_functions
from miles.compat.launch.server import read_eval_servers
from miles.config import files
from miles.config.choice import (
    choose_backend,
    choose_device,
    choose_engine,
    choose_ranks,
    in_words,
    trained_without_megatron,
)
from miles.config.cluster import ClusterArguments, is_cluster_address
from miles.config.components import TRAIN_BACKENDS
from miles.config.explain import explain
from miles.config.files import expand_configs, fetch_configs, located
from miles.config.flags_file import with_words_of_files
from miles.config.host_share import fit_to_host, is_on_cpu
from miles.config.joined_cluster import JoinedCluster, joined_cluster
from miles.config.megatron.fields import DESTINATION, MODEL_FLAGS, add_megatron_flags, megatron_fields
from miles.config.megatron.settings import MegatronArguments
from miles.config.notes import OTHERS, Note, report, strict_errors, surprises
from miles.config.rules.model import check_columns
from miles.config.rules.modes import (
    check_deterministic_on_cpu,
    check_replay_on_cpu,
    check_saved_samples,
    notes_on_saved_samples,
)
from miles.config.rules.start import check_devices, check_load
from miles.config.settings import SECTIONS, Settings
from miles.config.sglang.flags import ROUTER, SERVER, ServerFlags, split_server_flags
from miles.config.sglang.rules import check_server_heads
from miles.config.sglang.server_values import check_server_files
from miles.config.spelling import (
    INSTEAD_OF_VALUES,
    cut_lists,
    cut_spaced_words,
    flags_in,
    given_twice,
    group_words,
    read_other_values,
    rephrased,
    stray_words,
    with_written_flags,
    without_flags,
)
from miles.config.suggest import near_choice, suggestion
from miles.config.training import fill_precision
from miles.config.validate import Validated, validate

FOREIGN = "foreign:"  # prefix of the flags of other launchers in argparse's namespace

RAY_ADDRESS = "RAY_ADDRESS"  # the variable that Ray's own commands read


class FlagParser(argparse.ArgumentParser):
    """Parse as argparse does, but collect errors, raise ``FlagError`` instead of exiting, and suggest near flags."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.errors = Errors()

    def for_command(self, errors: Errors) -> FlagParser:
        """Return a parser of the same flags that adds to ``errors``. To build one takes longer than to read with it."""
        found = copy.copy(self)  # reading changes nothing else
        found.errors = errors
        return found

    def error(self, message: str) -> NoReturn:
        """Raise ``FlagError`` with the errors so far, and with this one, after which the words cannot be read on."""
        self.errors.add(rephrased(message))
        raise FlagError(*self.errors.messages)

    def read(self, words: Sequence[str], known: Iterable[str] = ()) -> argparse.Namespace:
        """Read the words of a command line; wrong values, and flags that do not exist, are added to ``errors``.

        Args:
            words: The words.
            known: Further flags that exist, for suggestions.

        Raises:
            FlagError: The words after an error cannot be read.
        """
        namespace, unknown = self.parse_known_args(words)
        flags = [word.split("=")[0] for word in unknown if word.startswith("-")]
        # A long one is cut: the search for a near one takes the square of its length.
        for flag in (one_line(flag, LONGEST_VALUE) for flag in flags):
            way_out = _with_its_own_way_out(suggestion(flag, [*self._option_string_actions, *known]))
            self.errors.add(f"{flag}: no such flag; {way_out}")
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
                shown = one_line(" ".join(arg_strings), LONGEST_VALUE)
                rule = f"a number beyond {LARGEST}, which no tensor holds"
                self.errors.add(f"{action.option_strings[-1]} {shown}: {rule}; give a smaller one")
                return action.default
        return values

    def _refuse_value(self, action: argparse.Action, words: list[str], message: str) -> Any:
        """Add the error of a value; return what the other flags are checked with: what was meant, or the default."""
        value, flag = words[0] if len(words) == 1 else "", action.option_strings[-1]
        choices = [choice for choice in action.choices or () if isinstance(choice, str)]
        meant = near_choice(value, choices) if action.nargs is None else None
        if (instead := INSTEAD_OF_VALUES.get(f"{flag} {value}")) is not None:
            message = f"{flag} {value}: no such choice; {instead}"
        elif meant is not None:
            message = message.replace("no such choice; ", f"no such choice; did you mean {meant}? Else ", 1)
        self.errors.add(message)
        return action.default if meant is None else meant


def _with_its_own_way_out(text: str) -> str:
    """Add what to do about a flag of related launchers that is suggested and refused here."""
    row = FOREIGN_FLAGS.get(text.removeprefix("did you mean ").removesuffix("?"))
    return text if row is None or row.verdict != "refused" else f"{text} It is refused here: {row.what_to_do}"


class DefaultsFormatter(argparse.HelpFormatter):
    """Format help texts so that they end with the default of the flag, which only the dataclasses know."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=44, width=120)

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        default = defaults().get(action.dest)
        shown = default is not None and default is not False
        return f"{text} (default: {default})".replace("%", "%%") if shown else text


def defaults() -> dict[str, Any]:
    """Return the default of every flag, by field name. Names are unique over all sections."""
    return {field.name: field.default for section in SECTIONS.values() for field in dataclasses.fields(section)}


def section_title(section: type) -> tuple[str, str]:
    """Return title and description of a section: its docstring before and after the colon."""
    title, _, description = (section.__doc__ or "").partition(":")
    return title.strip(), description.strip()


def build_parser() -> FlagParser:
    """Build the parser of ``train.py``: one group per section of ``Settings``, and ``--explain`` and ``--version``."""
    parser = FlagParser(
        prog="train.py",
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
        given: The fields of our sections that it sets, and those of Megatron's, under ``DESTINATION`` + name.
        foreign: The flags of other launchers in it, with their values.
        choice: Which backend and engine were chosen, and why, in one line.
        ranks: The default of --actor-num-gpus-per-node on this host; None if it is given.
        joined: The GPUs of the Ray cluster that the run joins, or why they are not known; None if it was not asked.
        notes: What was read in another spelling.
        errors: Wrong values, and flags that do not exist.
        origins: The line, ``FILE:LINE``, of each flag that a configuration file sets.
        explains: Whether to explain the command instead of running it.
        is_strict: Whether flags without effect are errors.
        names_for_functions: The names in ``--custom-config-path`` that are no flags.
        words: Its words, in which no ``@file``, no ``--config`` and no keyword is left.
    """

    settings: Settings
    given: frozenset[str]
    foreign: dict[str, Any]
    choice: str
    ranks: int | None
    joined: JoinedCluster | None
    notes: tuple[Note, ...]
    errors: tuple[str, ...]
    origins: Mapping[str, str]
    explains: bool = False
    is_strict: bool = False
    names_for_functions: tuple[str, ...] = ()
    words: tuple[str, ...] = ()


def parse(argv: Sequence[str]) -> Settings:
    """Read the flags; nothing is validated yet.

    Raises:
        FlagError: The words are no flags, or values have the wrong type.
    """
    command = read_command(argv)
    if command.errors:
        raise FlagError(*located(command.errors, command.origins))
    return command.settings


def read_command(argv: Sequence[str], keywords: Mapping[str, Any] | None = None) -> Command:
    """Read the flags of our own sections, of Megatron, of SGLang, and of related launchers.

    Args:
        argv: The words of the command.
        keywords: Further settings by name, as plain values; they replace the same flags among the words.

    Raises:
        FlagError: The words after an error cannot be read.
    """
    parser = _own_flags().for_command(Errors())
    try:
        words = cut_spaced_words(with_words_of_files(argv), {files.FLAG})
    except ValueError as error:
        parser.error(str(error))
    own = {*parser._option_string_actions}
    expanded = expand_configs(words, parser._option_string_actions, _further_flags, parser.errors, keywords or {})
    words, names_for_functions, custom_notes = _with_custom_config(parser, expanded.words, own)
    megatron = {*_megatron_flags(words, own)}
    words = cut_spaced_words(words, own | megatron | {*FOREIGN_FLAGS})
    words, notes = read_other_values(words)
    words, distillation_notes = read_estimator(words)
    notes += [*distillation_notes, *custom_notes]
    words, eval_notes = read_eval_servers(words)
    notes += eval_notes
    ours, passed_on = split_server_flags(words, own)
    given = [flag for flag in flags_in(ours) if flag in megatron]
    parser = _all_flags(bool(given) or _names_megatron(ours)).for_command(parser.errors)
    notes += given_twice(words)
    try:
        namespace = parser.read(cut_lists(ours, parser._option_string_actions), known=megatron)
    except FlagError as error:
        raise FlagError(*located(error.messages, expanded.origins)) from None
    command = _command(namespace, passed_on, given, flags_in(words), tuple(notes), parser.errors)
    names = tuple(names_for_functions)
    return replace(command, origins=expanded.origins, names_for_functions=names, words=tuple(expanded.words))


def _with_custom_config(
    parser: FlagParser, words: Sequence[str], own: Collection[str]
) -> tuple[list[str], list[str], list[Note]]:
    """Return the words, then those of ``--custom-config-path`` if it is given; and its names that are no flags.

    The notes say which settings were read as others.
    """
    paths = [values for flag, values in group_words(words) if flag == custom_config.FLAG]
    values: dict[str, Any] = {}
    if paths and len(paths[-1]) == 1:
        try:
            values = custom_config.read_custom_config(paths[-1][0])
        except ValueError as error:
            parser.errors.add(str(error))
            return list(words), [], []
    words, values, notes = read_mismatch_config(words, values, parser.errors)
    written = [flag_name(name) for name in values]
    flags = {*own, *FOREIGN_FLAGS, *_megatron_flags(written, own)}
    flags |= {flag for flag in written if flag.startswith((SERVER, ROUTER))}
    kept = without_flags(words, custom_config.left_out(values))
    return [*kept, *custom_config.words_of(values, flags)], custom_config.names_without_flag(values, flags), notes


def _further_flags() -> set[str]:
    """Return the flags that exist beside our own, without those that are passed on to SGLang."""
    flags = {*FOREIGN_FLAGS, *(field.flag for field in MODEL_FLAGS)}
    with suppress(ValueError):  # Megatron is not installed
        flags |= {field.flag for field in megatron_fields().values()}
    return flags


def _megatron_flags(words: Sequence[str], own: Collection[str]) -> list[str]:
    """Return the flags of Megatron. The fields of its dataclasses are read only if a word may be one of them.

    If it is not installed, these are the flags that are known without it.
    """
    layout = [flag_name(field.name) for field in dataclasses.fields(MegatronArguments)]
    scripts = [row.flag for row in FOREIGN_FLAGS.values() if row.is_megatron]
    flags = [*layout, *scripts, *(field.flag for field in MODEL_FLAGS)]
    known = {*own, *FOREIGN_FLAGS, *flags}
    if any(flag.split()[0] not in known and not flag.startswith((SERVER, ROUTER)) for flag in flags_in(words)):
        with suppress(ValueError):  # it is not installed: an error if it is chosen
            flags += [field.flag for field in megatron_fields().values()]
    return [flag for flag in flags if flag not in own or flag in layout]


@cache
def _own_flags() -> FlagParser:
    return build_parser()


@cache
def _all_flags(with_megatron: bool) -> FlagParser:
    """Return a parser of our flags, those of related launchers and, if asked for, of Megatron's own dataclasses."""
    parser = build_parser()
    for row in FOREIGN_FLAGS.values():
        where: dict[str, Any] = {"dest": FOREIGN + row.flag, "help": argparse.SUPPRESS, "default": None}
        if row.kind == "switch":
            parser.add_argument(row.flag, action="store_const", const=True, **where)
        elif row.kind == "optional":
            parser.add_argument(row.flag, nargs="?", const=True, **where)
        else:
            parser.add_argument(row.flag, nargs="+" if row.kind == "list" else None, **where)
    if with_megatron:
        group = parser.add_argument_group("megatron-core", "fields of its own configuration, by their names there")
        add_megatron_flags(group, taken={*defaults(), *parser._option_string_actions})
    return parser


def _names_megatron(words: Sequence[str]) -> bool:
    readers = [name for name, backend in TRAIN_BACKENDS.items() if backend.reads_megatron_flags]
    named = [values[-1:] for flag, values in group_words(words) if flag == "--train-backend"]
    return any(value and value[0] in readers for value in named)


def _command(
    namespace: argparse.Namespace,
    passed_on: ServerFlags,
    megatron: Sequence[str],
    flags: Sequence[str],
    notes: tuple[Note, ...],
    errors: Errors,
) -> Command:
    settings = _settings(namespace, passed_on)
    given = {name: value for name, value in vars(namespace).items() if value is not dataclasses.MISSING}
    backend = choose_backend(given.get("train_backend"), megatron, trained_without_megatron(settings))
    servers = [flag for flag in flags if flag.startswith((SERVER, ROUTER))]
    joined = _ask_cluster(settings.cluster)
    device = choose_device(settings.cluster.device, has_gpu(), joined)
    engine = choose_engine(given.get("rollout_engine"), servers, device)
    ranks = None
    if "actor_num_gpus_per_node" not in given:
        ranks = choose_ranks(device, busy_cores())
    settings = replace(
        settings,
        training=replace(settings.training, train_backend=backend.value),
        rollout=replace(settings.rollout, rollout_engine=engine.value),
    )
    foreign = {name.removeprefix(FOREIGN): value for name, value in given.items() if name.startswith(FOREIGN)}
    return Command(
        settings,
        frozenset(name for name, value in given.items() if value is not None),
        {flag: value for flag, value in foreign.items() if value is not None},
        in_words(backend, engine, ranks, None if joined is None else device),
        None if ranks is None else ranks.value,
        joined,
        notes,
        tuple(errors.messages),
        {},
        namespace.explain,
        namespace.strict_flags,
    )


def _address(cluster: ClusterArguments) -> str | None:
    """Return the address of the Ray that the run joins; None if it starts its own."""
    return cluster.ray_address or os.environ.get(RAY_ADDRESS) or None  # the variable is set by ``ray job submit``


def _ask_cluster(cluster: ClusterArguments) -> JoinedCluster | None:
    """Ask the Ray cluster that the run joins for its GPUs, if nothing else says whether there is CUDA."""
    address = _address(cluster)
    if cluster.device != "auto" or has_gpu() or address is None or not is_cluster_address(address):
        return None
    return joined_cluster(address)


def _settings(namespace: argparse.Namespace, passed_on: ServerFlags) -> Settings:
    given = {name: value for name, value in vars(namespace).items() if value is not dataclasses.MISSING}

    def section(cls: type) -> Any:
        values = {field.name: given[field.name] for field in dataclasses.fields(cls) if field.name in given}
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})

    own = {name.removeprefix(DESTINATION): value for name, value in given.items() if name.startswith(DESTINATION)}
    megatron_overrides = tuple((name, _flat(value)) for name, value in own.items() if value is not None)
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
        starts: Whether the run starts now, on this host. Otherwise a note says why it could not.

    Raises:
        FlagError: With all errors of the command.
    """
    try:
        return _judge(command, starts)
    except FlagError as error:
        messages = with_written_flags(error.messages, command.words)
        raise FlagError(*located(messages, command.origins)) from None


def _judge(command: Command, starts: bool) -> Validated:
    errors = Errors()
    for message in command.errors:
        errors.add(message)
    settings, notes = normalize_flags(_with_defaults(command), command.foreign, errors, command.given)
    notes = [
        replace(note, written=with_written_flags([note.written], command.words)[0]) for note in (*command.notes, *notes)
    ]
    if command.names_for_functions and not names_functions(settings):
        shown = one_line(", ".join(command.names_for_functions), LONGEST_VALUE)
        errors.add(
            f"{custom_config.FLAG} {settings.rollout.custom_config_path}: no flags are named {shown}, and no function "
            "of yours reads them; correct the names, or drop them"
        )
    try:
        validated = validate(settings, command.given)
        notes += validated.accepted
    except FlagError as error:
        for message in error.messages:
            errors.add_unless_refused(message)
    if command.is_strict:
        for message in strict_errors(notes):
            errors.add(message)
    on_cpu, of_host = is_on_cpu(settings), Errors()
    if on_cpu:
        check_deterministic_on_cpu(settings, of_host)
        check_replay_on_cpu(settings, of_host)
    else:
        check_server_heads(settings, of_host)
    check_saved_samples(settings, of_host)
    check_server_files(settings, of_host)
    for message in of_host.messages:
        errors.add_unless_refused(message)
    check_columns(settings, errors)
    of_start, starts = Errors(), starts and not (command.explains or settings.rehearsal.rehearse)
    check_load(settings, of_start)
    if not errors.messages:
        check_devices(validated.settings, of_start)
    for message in of_start.messages if starts else ():
        errors.add_unless_refused(message)
    errors.raise_if_any()
    settings = fit_to_host(validated.settings, command.given)
    not_now = (f"a start on this host would be refused: {message}" for message in of_start.messages)
    further = (*not_now, *notes_on_saved_samples(settings), *surprises(settings, command.given, on_cpu, has_bf16()))
    if command.joined is not None and command.joined.gpus is None:
        further = (command.joined.doubt, *further)
    surprising = (*validated.surprises, *further)
    return Validated(settings, validated.readings, surprising, tuple(notes), command.choice)


def _with_defaults(command: Command) -> Settings:
    """Fill in the precision, and the defaults that depend on this host. ``parse`` leaves those of the sections."""
    settings = command.settings
    cluster = settings.cluster
    if cluster.ray_address is None:
        cluster = replace(cluster, ray_address=_address(cluster))
    if command.joined is not None and command.joined.gpus:
        cluster = replace(cluster, device="cuda")
    settings = replace(settings, cluster=cluster)
    settings = replace(settings, training=fill_precision(settings.training))
    if command.ranks is not None:
        settings = replace(settings, cluster=replace(settings.cluster, actor_num_gpus_per_node=command.ranks))
    return settings


def main_parse(argv: Sequence[str], starts: bool = True) -> Validated:
    """Parse and validate for a program.

    Args:
        argv: The words of the command.
        starts: Whether the run starts now, as it is, unless the command explains or rehearses it.

    Wrong flags are printed to stderr, all of them, and the program exits with 2. ``--explain``, ``--help`` and
    ``--version`` print to stdout and exit with 0.
    """
    with _exiting_on_wrong_flags():
        command, validated = judge_with_hub(lambda: read_command(argv), partial(judge, starts=starts))
    if command.explains:
        print(explain(validated))
        raise SystemExit(0)
    return validated


def refuse_wrong_flags(argv: Sequence[str]) -> None:
    """Print wrong flags and exit with 2, as ``main_parse`` does, without asking the hub for the model's config."""
    with _exiting_on_wrong_flags():
        _judge_without_hub(read_command(argv), judge)


@contextmanager
def _exiting_on_wrong_flags() -> Iterator[None]:
    """Print the errors that this block raises, and exit with 2."""
    try:
        yield
    except ValueError as error:
        messages = error.messages if isinstance(error, FlagError) else [str(error)]
        print(_report(messages), file=sys.stderr)
        raise SystemExit(2) from None


def judge_with_hub(
    read: Callable[[], Command], judged: Callable[[Command], Validated] = judge
) -> tuple[Command, Validated]:
    """Read and judge a command; again, if the config of a model is on the hub only and could be fetched.

    Wrong flags are reported without the hub, except the bridge's: whether it is needed depends on the model.
    """
    command = read()
    validated = _judge_without_hub(command, judged)
    fetched = fetch_configs(command.settings.model)
    if fetched.is_any:
        command = read()
        validated = judged(command)
    if isinstance(validated, FlagError):
        raise validated
    return command, replace(validated, surprises=(*validated.surprises, *fetched.notes))


def _judge_without_hub(command: Command, judged: Callable[[Command], Validated]) -> Validated | FlagError:
    try:
        return judged(command)
    except FlagError as error:
        if not all("--megatron-to-hf-mode" in message for message in error.messages):
            raise
        return error


def _report(messages: Sequence[str]) -> str:
    """Return the text that reports errors, by the sections of ``--help``."""
    own = {flag_name(field.name): name for name, cls in SECTIONS.items() for field in dataclasses.fields(cls)}
    return report(messages, {files.FLAG: "configuration files"} | own | dict.fromkeys(FOREIGN_FLAGS, OTHERS))
