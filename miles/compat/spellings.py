"""Read what related launchers write otherwise: values, a distilled teacher, checkpoints by number, converted copies."""

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from miles.base.flags import LONGEST_VALUE, Errors, FlagError, flag_name
from miles.base.storage import is_url
from miles.base.text import one_line
from miles.compat.verdicts import FOREIGN_FLAGS, table
from miles.config.checkpoint import CheckpointArguments, checkpoint_name
from miles.config.functions import CUSTOM_CONFIG, HOOKS, has_source, read_custom_config
from miles.config.notes import NO_EFFECT, READ_AS, SPEED, Note, written
from miles.config.parser import FlagParser
from miles.config.settings import Settings
from miles.config.spelling import group_words, without_flags
from miles.objective.aggregation import MODE_FLAGS
from miles.objective.loss_types import LOSS_TYPES
from miles.objective.settings import LossArguments
from miles.tasks.environments.built_in.tool_calls import ToolCalls
from miles.tasks.rewards.settings import RewardArguments

# A command line that is being rewritten: its words, and what was read as what.


@dataclass
class Line:
    """Hold the words of a command between the readers of foreign spellings. Each reader may change them.

    Attributes:
        words: The words; each flag is a word, with its value after it or after ``=``.
        errors: Collects what cannot be obeyed.
        foreign: The flags of ``FOREIGN_FLAGS`` in it that are left to judge, with their values; True for a switch.
        notes: What was read in another spelling.
        names_for_functions: The names in ``--custom-config-path`` that are no flags.
    """

    words: list[str]
    errors: Errors
    foreign: dict[str, Any] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    names_for_functions: list[str] = field(default_factory=list)

    def __contains__(self, flag: str) -> bool:
        return any(flag == name for name, _ in group_words(self.words))

    def value(self, flag: str) -> str | None:
        """Return the value of a flag; None if it is not there, or has not exactly one. The last one counts."""
        values = dict(group_words(self.words)).get(flag, ())
        return values[0] if len(values) == 1 else None

    def drop(self, *flags: str) -> None:
        """Remove flags with their values."""
        self.words = without_flags(self.words, flags)

    def read_as(self, flag: str, why: str, *words: str) -> None:
        """Replace a flag by ``words``, and note its reading."""
        self.note(READ_AS, flag, why)
        self.drop(flag)
        self.words += words

    def note(self, heading: str, flag: str, why: str) -> None:
        """Add the note on a flag as written."""
        self.notes.append(Note(heading, written(flag, dict(group_words(self.words))[flag]), why))


# Replace functions that a command names inside the packages of related launchers; refuse those without counterpart.


ZERO_REWARD = "miles.tasks.rewards.built_in.zero:zero"

_FUNCTIONS = table("functions")["function"]
# (flag, function elsewhere without the name of its package) -> ours; None is the run's behaviour without the flag.
KNOWN: dict[tuple[str, str], str | None] = {
    (row["flag"], there): row.get("here")
    for row in _FUNCTIONS
    if not {"flags", "words"} & row.keys()
    for there in row["there"]
}
# The same, for functions that become flags -> those.
BECOME_FLAGS: dict[tuple[str, str], str] = {
    (row["flag"], there): row["words"] for row in _FUNCTIONS if "words" in row for there in row["there"]
}
# The same, for functions whose work is done by flags here -> what to do.
FLAGS_INSTEAD: dict[tuple[str, str], str] = {
    (row["flag"], there): row["flags"] for row in _FUNCTIONS if "flags" in row for there in row["there"]
}
# Functions elsewhere that a run on conversations (--loss-type sft_loss) does not need.
FOR_CONVERSATIONS = {("--rollout-function-path", "rollout.sft_rollout.generate_rollout")}
# Generate ahead of the trainer without end, as --fully-async does.
FULLY_ASYNC = ("fully_async_rollout.generate_rollout_fully_async", "fully_async_rollout.FullyAsyncRolloutFn")
# Dr.GRPO's reducer, which divides the sum of a trajectory by a constant in its file.
_CONSTANT_REDUCER = re.compile(r"examples\.(experimental\.)?DrGRPO\.custom_reducer([.:]\w+)?")
CONSTANT_OF_REDUCER = 1000.0
# miles' multi-turn function, and its flags.
_GENERATE, MULTI_TURN = "--custom-generate-function-path", "rollout.generate_hub.multi_turn.generate"
_TURNS, _PARSER, _SEVERAL = "--generate-max-turns", "--generate-tool-call-parser", "--generate-multi-samples"
_SPECS, _CALL = "--generate-tool-specs-path", "--generate-execute-tool-function-path"
_DEFAULT_TURNS = "16"  # there
_READ_FORMS = ("qwen", "qwen25", "hermes")  # parsers of <tool_call>{json}</tool_call>
_PACKAGES = ("miles", "slime", "miles_plugins", "slime_plugins", "examples")


def read_functions(line: Line) -> None:
    """Replace functions of related launchers by ours, or by flags; refuse those that have no counterpart."""
    for hook in HOOKS:
        flag = flag_name(hook)
        path = line.value(flag)
        if path is None or has_source(path):
            continue
        is_known, ours = our_function(flag, path, _reads_conversations(line))
        if flag == "--rollout-function-path" and _ends_with(path, *FULLY_ASYNC):
            steps = line.value("--async-steps") or "1"
            line.drop("--async-steps")
            ahead = ("--fully-async", "--async-steps", steps)
            line.read_as(flag, " ".join(ahead), *ahead)
        elif flag == "--custom-pg-loss-reducer-function-path" and _CONSTANT_REDUCER.fullmatch(path):
            _read_constant_reducer(line, flag, path)
        elif (words := BECOME_FLAGS.get((flag, _tail(path)))) is not None:
            line.read_as(flag, words, *words.split())
        elif is_known:
            replacement = (flag, ours) if ours else ()
            line.read_as(flag, ours or "what the run does without it", *replacement)
        elif flag == "--dynamic-sampling-filter-path" and "--rollout-function-path" in line:
            continue  # no filter is called alongside that function: the validator reports it
        elif (message := missing_function(flag, path)) is not None:
            line.errors.add(message)


def _read_constant_reducer(line: Line, flag: str, path: str) -> None:
    for name in map(flag_name, MODE_FLAGS):
        if name in line:
            line.note(NO_EFFECT, name, f"{flag} {path} takes precedence")
            line.drop(name)
    constant = f"--loss-aggregation constant --loss-aggregation-divisor {CONSTANT_OF_REDUCER:g}"
    line.read_as(flag, constant, *constant.split())


def _reads_conversations(line: Line) -> bool:
    """Return whether the run trains on conversations, which other launchers collect by a function."""
    kind = LOSS_TYPES.get(line.value("--loss-type") or LossArguments.loss_type)
    return kind is not None and not kind.uses_advantages and "--load-debug-rollout-data" not in line


def read_multi_turn(line: Line) -> None:
    """Replace the function by ``--environment tool_calls``, if the command names it."""
    path = line.value(_GENERATE)
    if path is None or not names_function_of_others(path, MULTI_TURN):
        return
    options = {flag: line.foreign.pop(flag, None) for flag in (_TURNS, _SPECS, _PARSER, _CALL, _SEVERAL)}
    turns = options[_TURNS] or _DEFAULT_TURNS
    specs, call = options[_SPECS], options[_CALL]
    _check_turns(turns, options[_PARSER], options[_SEVERAL], line)
    if call is None:
        rule = "no function is named that runs the calls of the model"
        line.errors.add(f"{_GENERATE} {path}: {rule}; add {_CALL} module.function")
        return
    for flag, value, signature in (
        (_CALL, call, "async def call(name: str, arguments: dict) -> str"),
        (_SPECS, specs, "a list of tools, in the form of OpenAI's API"),
    ):
        if value is not None and is_missing(value):
            line.errors.add(f"{flag} {value}: this is part of another launcher, and is not here; write {signature}")
    environment = f"{ToolCalls.name}:call={call}" + (f",specs={specs}" if specs else "")
    line.drop("--environment", "--max-turns")
    words = ["--environment", environment]
    if turns.isdecimal():
        words += ["--max-turns", turns]
    why = f"--environment {environment} --max-turns {turns} --apply-chat-template"
    line.read_as(_GENERATE, why, *words, "--apply-chat-template")


def _check_turns(turns: str, parser: str | None, several: bool | None, line: Line) -> None:
    if not turns.isdecimal() or int(turns) < 1:
        line.errors.add(f"{_TURNS} {turns}: must be a whole number of at least 1; correct the value")
    if parser is not None and parser not in _READ_FORMS:
        rule = "calls are read as <tool_call>{json}</tool_call>, the form of Hermes and Qwen"
        what_to_do = f"give {', '.join(_READ_FORMS)}, or read the calls in --environment module:class"
        line.errors.add(f"{_PARSER} {parser}: {rule}; use a model that writes it, and {what_to_do}")
    if several:
        rule = "the turns of a trajectory are one sample, as long as the chat template can continue it"
        line.errors.add(f"{_SEVERAL}: {rule}; drop it")


def our_function(flag: str, path: str, reads_conversations: bool = False) -> tuple[bool, str | None]:
    """Return whether ``path`` names a function whose counterpart is here, and that one; None is the default."""
    name = (flag, _tail(path))
    if has_source(path) or not (name in KNOWN or (reads_conversations and name in FOR_CONVERSATIONS)):
        return False, None
    return True, KNOWN.get(name)


def names_function_of_others(path: str, tail: str) -> bool:
    """Return whether ``path`` names the function ``tail`` of a package of other launchers, and no file here has it."""
    return _tail(path) == tail and path.replace(":", ".") != tail and not has_source(path)


def is_missing(path: str) -> bool:
    """Return whether ``path`` is in a package of a related launcher, and not here."""
    return path.replace(":", ".").partition(".")[0] in _PACKAGES and not has_source(path)


def missing_function(flag: str, path: str) -> str | None:
    """Return the error of a path into a package of a related launcher whose function is not here."""
    of_flag = {tail: what_to_do for (name, tail), what_to_do in FLAGS_INSTEAD.items() if name == flag}
    instead = next((what_to_do for tail, what_to_do in of_flag.items() if _ends_with(path, tail)), None)
    if (instead is None and not is_missing(path)) or has_source(path):
        return None
    signature = next(hook.signature for field, hook in HOOKS.items() if flag_name(field) == flag)
    what_to_do = instead or f"write {signature}, and name it as module:function"
    return f"{flag} {path}: this function is part of another launcher, and is not here; {what_to_do}"


def _tail(path: str) -> str:
    """Return a path without the name of its package, with dots only: ``slime.rollout.x:f`` is ``rollout.x.f``."""
    dotted = path.replace(":", ".")
    package, _, rest = dotted.partition(".")
    return rest if package in _PACKAGES else dotted


def _ends_with(path: str, *names: str) -> bool:
    """Return whether a path names one of these functions, in any package."""
    dotted = path.replace(":", ".")
    return any(dotted == name or dotted.endswith("." + name) for name in names)


ESTIMATOR = ("--advantage-estimator", "on_policy_distillation")
CISPO = "cispo"  # an estimator there, whose advantages are those of grpo
_EPS_CLIP = 0.2  # there
_OF_ADAPTER = {"--lora-rank": "64", "--lora-alpha": "128"}  # defaults of slime's --use-lora
CKPT_STEP = "--ckpt-step"
OF_EVAL_SERVERS = "--eval-sglang-"
# Defaults of related launchers for FSDP; here both backends have the same.
ON_FSDP = {"weight_decay": "0", "adam_beta2": "0.95", "lr_decay_style": "constant"}
CONVERTED = "_torch_dist"  # the ending that converters of related launchers give to a folder

_TABLE = table("values")
# (flag, value elsewhere) -> (value here, why it means the same)
OTHER_VALUES = {(row["flag"], row["value"]): (row["here"], row["why"]) for row in _TABLE["read_as"]}
INSTEAD_OF_VALUES: dict[str, str] = _TABLE["instead"]
COUNTERPARTS = {f"--{word}": here for here, words in _TABLE["counterparts"].items() for word in words.split()}


def read_values(line: Line) -> None:
    """Replace values that have another name here, and refuse those that have no counterpart of the same flag."""
    read = list(line.words)
    for index, word in enumerate(line.words):
        flag, equals, value = word.partition("=")
        if not equals and index + 1 < len(read):
            value = read[index + 1]
        if (flag, value) in OTHER_VALUES:
            here, why = OTHER_VALUES[flag, value]
            if equals:
                read[index] = f"{flag}={here}"
            else:
                read[index + 1] = here
            line.notes.append(Note(READ_AS, written(flag, value), f"{flag} {here}: {why}"))
    line.words = read
    for flag, values in group_words(line.words):
        name = flag.replace("_", "-")
        of_section = "--" + name.rpartition(".")[2]  # data.train_batch_size of verl, train.batch_size of OpenRLHF
        if (instead := INSTEAD_OF_VALUES.get(" ".join((flag, *values)))) is not None:
            line.errors.add(f"{flag} {values[0]}: no such choice; {instead}")
        elif (here := COUNTERPARTS.get(name) or COUNTERPARTS.get(of_section)) is not None:
            translated = "miles translate FILE translates a whole script of TRL, verl or OpenRLHF"
            line.errors.add(f"{one_line(flag, LONGEST_VALUE)}: no such flag; give {here}; {translated}")
        else:
            continue
        line.drop(flag)


def read_eval_servers(line: Line) -> None:
    """Leave out the settings of servers that only evaluate."""
    for flag, values in group_words(line.words):
        if flag.startswith(OF_EVAL_SERVERS):
            line.notes.append(Note(SPEED, written(flag, values), "engines of the run evaluate"))
            line.drop(flag)


def read_estimator(line: Line) -> None:
    """Read their estimator of a distilled teacher as ``--use-opd``, if the command's rewards are 0.

    Its advantage is log p_teacher - log p_old of each token (slime's ``backends/megatron_utils/loss.py``,
    ``on_policy_distillation``), whatever the rewards are. With other rewards it stays, and is refused: here their
    advantages would be trained on too.
    """
    flag, name = ESTIMATOR
    if "--rm-type" in line:
        has_zero_rewards = line.value("--rm-type") == "zero"
    else:
        path = line.value("--custom-rm-path")
        has_zero_rewards = path is not None and _is_their_reward(path)
    weighs_one = "--opd-kl-coef" not in line or line.value("--opd-kl-coef") in ("1", "1.0")
    if line.value(flag) == name and has_zero_rewards and weighs_one:
        why = "--use-opd: advantages come from the teacher alone, since the rewards are 0"
        line.read_as(flag, why, "--use-opd")


def read_cispo(line: Line) -> None:
    """Read their estimator cispo as GRPO's advantages with that policy loss, whose bounds are absolute here."""
    flag = ESTIMATOR[0]
    ends = ("--eps-clip", "--eps-clip-high")
    if line.value(flag) != CISPO or "--policy-loss" in line:
        return
    low, high = (line.value(end) for end in ends)
    with suppress(ValueError):  # the parser reports it
        below = float(_EPS_CLIP if low is None else low)
        above = below if high is None else float(high)
        bounds = ("--ratio-min", f"{max(1 - below, 0):.12g}", "--ratio-max", f"{1 + above:.12g}")
        words = (flag, "grpo", "--policy-loss", CISPO, *bounds)
        line.drop(*ends)
        line.read_as(flag, " ".join(words), *words)


def read_adapter(line: Line) -> None:
    """Give slime's adapter its defaults there, and the run the adapter's optimizer: nothing else is trained."""
    if "--use-lora" not in line:
        return
    words = list[str]()
    for flag, value in _OF_ADAPTER.items():
        if flag not in line:
            words += [flag, value]
    rate, decay = line.value("--lora-learning-rate"), line.value("--lora-weight-decay")
    line.drop("--lora-learning-rate", "--lora-weight-decay", "--weight-decay")
    words += ["--weight-decay", decay or "0"]
    if rate:
        line.drop("--lr")
        words += ["--lr", rate]
    line.words += words


def _is_their_reward(path: str) -> bool:
    """Return whether ``path`` names their function that asks the teacher, and rewards nothing."""
    return our_function("--custom-rm-path", path) == (True, ZERO_REWARD)


def read_teacher(line: Line) -> None:
    """Read ``--rm-url`` as the address of the teacher if one is distilled from a server and no reward asks a server."""
    url, path = line.value("--rm-url"), line.value("--custom-rm-path")
    if url is None or "--opd-teacher-urls" in line:
        return
    if RewardArguments(rm_type=line.value("--rm-type")).names("remote_rm"):
        return
    if "--use-opd" not in line:
        if path is not None and _is_their_reward(path):
            rule = f"--custom-rm-path {path} asks a teacher there, and the command distils none"
            line.errors.refuse("rm_url", url, rule, "add --use-opd, or drop both and give --rm-type")
            line.drop("--rm-url")
    elif (line.value("--opd-type") or LossArguments.opd_type) != "trainer" and "--opd-teacher-load" not in line:
        why = f"--opd-teacher-urls {url}: with --use-opd it is the teacher's"
        line.read_as("--rm-url", why, "--opd-teacher-urls", url)


def read_step(line: Line) -> None:
    """Read ``--load FOLDER --ckpt-step N`` as the folder of that checkpoint, which must be there.

    A folder without checkpoints begins a run, so a wrong number would begin one without a word.
    """
    step = str(line.foreign.get(CKPT_STEP, ""))
    folder = line.value("--load")
    if not step.isdecimal():
        return  # the table of flags refuses it
    del line.foreign[CKPT_STEP]
    if folder is None:
        line.notes.append(Note(NO_EFFECT, written(CKPT_STEP, step), "without --load"))
        return
    path = CheckpointArguments().inside(folder, checkpoint_name(int(step)))
    if not is_url(path) and not Path(path).is_dir():
        rule = f"there is no folder {path}"
        line.errors.add(f"{CKPT_STEP} {step}: {rule}; drop it to load the newest checkpoint of --load {folder}")
        return
    line.drop("--load")
    line.words += ["--load", path]
    line.notes.append(Note(READ_AS, written(CKPT_STEP, step), f"--load {path}"))


def read_async_steps(line: Line) -> None:
    """Give ``--fully-async`` the least age of samples, if the command names none."""
    if "--fully-async" in line and "--async-steps" not in line:
        line.note(READ_AS, "--fully-async", "--fully-async --async-steps 1, the least age of samples")
        line.words += ["--async-steps", "1"]


def read_reference(line: Line) -> None:
    """Read a converted copy of ``--hf-checkpoint`` as that model itself; no copy is needed here.

    Such scripts name ``MODEL`` and ``MODEL_torch_dist``. Another folder is another reference, and stays.
    """
    reference, model = line.value("--ref-load"), line.value("--hf-checkpoint")
    if reference is None or model is None or Path(reference).name != Path(model).name + CONVERTED:
        return
    loss = LossArguments(use_kl_loss="--use-kl-loss" in line)
    with suppress(ValueError):  # the parser reports it
        loss = LossArguments(use_kl_loss=loss.use_kl_loss, kl_coef=float(line.value("--kl-coef") or 0))
    if loss.needs_reference:
        line.read_as("--ref-load", f"--hf-checkpoint {model}, whose converted copy it is by its name")


def check_reference(settings: Settings, errors: Errors) -> None:
    """Refuse a converted copy of another model than ``--hf-checkpoint``: their checkpoints are not read here."""
    path = settings.model.ref_load
    if path is None or not Path(path).name.endswith(CONVERTED) or _is_ours(Path(path)):
        return
    if settings.rollout.debug_rollout_only or not settings.loss.needs_reference:
        return
    rule = "by its name a copy that a related launcher has converted, which is not read here"
    model = settings.model.hf_checkpoint
    what_to_do = f"give the Hugging Face folder that it was made from, or drop it to compare with {model}"
    errors.refuse("ref_load", path, rule, what_to_do)


def _is_ours(folder: Path) -> bool:
    return any(folder.glob("manifest.json")) or any(folder.glob("*/manifest.json")) or (folder / "config.json").exists()


def remarks(settings: Settings, set_fields: Collection[str]) -> Iterator[str]:
    """Yield notes on what has another default or meaning in related launchers.

    Args:
        settings: The settings of a valid run.
        set_fields: The fields that the command sets.
    """
    yield from _on_initial_weights(settings, set_fields)
    relied_on = [name for name in ON_FSDP if name not in set_fields]
    if "train_backend" in set_fields and not settings.backend.reads_megatron_flags and relied_on:
        here = ", ".join(f"{flag_name(name)} {getattr(settings.optimizer, name)}" for name in relied_on)
        there = ", ".join(ON_FSDP[name] for name in relied_on)
        yield f"{here}: the defaults with every backend; related launchers have {there} with FSDP"


def _on_initial_weights(settings: Settings, set_fields: Collection[str]) -> Iterator[str]:
    """Yield a note on a reference that is another model than the policy's first weights, which it would be elsewhere.

    Related launchers do so with Megatron, their default. With FSDP theirs starts as here.
    """
    reference, model, load = settings.model.ref_load, settings.model.hf_checkpoint, settings.checkpoint.load
    if reference is None or model is None or not settings.loss.needs_reference or Path(reference) == Path(model):
        return
    names_fsdp = "train_backend" in set_fields and not settings.backend.reads_megatron_flags
    resumes = load is not None and any(Path(load).glob("*/manifest.json"))
    if not names_fsdp and not resumes:
        yield (
            f"--ref-load {reference}: the reference of the KL only; the policy starts from --hf-checkpoint {model}. "
            "Related launchers start it from --ref-load too if --load has no checkpoint; for that give --hf-checkpoint "
            f"{reference}"
        )


# Read ``--custom-config-path``: a YAML file of settings that takes precedence over the command.
#
# Among them can be the settings of slime's and miles' function of importance weights (``mis.yaml``), which scripts name
# as ``--custom-tis-function-path examples.….mis.compute_mis_weights_with_cp``. They become the flags that do its work;
# the formulas are in docs/off-policy.md.


MISMATCH_FLAG = "--custom-tis-function-path"
MISMATCH_FUNCTIONS = ("compute_mis_weights", "compute_mis_weights_with_cp", "compute_mis_weights_fsdp")
_OF_WEIGHTS = ("tis_level", "tis_mode", "tis_lower_bound", "tis_upper_bound", "tis_batch_normalize")
_OF_REJECTION = ("rs_level", "rs_lower_bound", "rs_upper_bound", "rs_veto_threshold")
_MODES = {"truncate": "truncate", "clip": "truncate", "mask": "icepop"}  # theirs -> ours


def read_settings_of_file(line: Line, known: Callable[[Sequence[str]], Collection[str]]) -> None:
    """Add the settings of the file to the command, if it names one.

    Args:
        line: The command.
        known: Returns the flags that exist, if some of these words are flags of Megatron also its own.
    """
    path = line.value(CUSTOM_CONFIG)
    try:
        values = read_mismatch_config(line, {} if path is None else read_custom_config(path))
    except ValueError as error:
        line.errors.add(str(error))
        return
    if not values:
        return
    flags = known([flag_name(name) for name in values])
    line.drop(*(flag_name(name) for name, value in values.items() if _leaves_out(value)))
    line.words += words_of(values, flags)
    line.names_for_functions += [name for name in values if flag_name(name) not in flags]


def words_of(values: Mapping[str, Any], flags: Collection[str]) -> list[str]:
    """Return the values whose names are ``flags`` as words of a command; false and null give none."""
    words = []
    for name, value in values.items():
        flag = flag_name(name)
        if flag not in flags or _leaves_out(value):
            continue
        words.append(flag)
        if value is True:
            continue
        many = value if isinstance(value, list) else [value]
        words += [json.dumps(part) if isinstance(part, dict | list) else str(part) for part in many]
    return words


def _leaves_out(value: Any) -> bool:
    return value is None or value is False


def read_mismatch_config(line: Line, values: Mapping[str, Any]) -> dict[str, Any]:
    """Drop their function if the command names it, and it or the file has the settings.

    Args:
        line: The command.
        values: The settings of ``--custom-config-path``.

    Returns:
        The settings with our names, for the settings of the file.
    """
    path = line.value(MISMATCH_FLAG)
    if path is None or path.replace(":", ".").rpartition(".")[2] not in MISMATCH_FUNCTIONS:
        return dict(values)
    in_words = _in_words(line.words)
    if missing_function(MISMATCH_FLAG, path) is None or not (in_words.keys() | values.keys()) & {*_OF_WEIGHTS}:
        return dict(values)
    values = in_words | dict(values)  # the file takes precedence there
    line.drop(*map(flag_name, in_words))

    def is_on(name: str) -> bool:
        return bool(values.get(name, flag_name(name) in line))

    others = {name: value for name, value in values.items() if name not in (*_OF_WEIGHTS, *_OF_REJECTION)}
    if not is_on("use_tis"):
        line.note(NO_EFFECT, MISMATCH_FLAG, "its settings have use_tis: false, so it weighs and rejects nothing")
        line.drop(MISMATCH_FLAG)
        return others | {"use_rs": False}
    flags = _flags_of(values, is_on("use_rs"), line.errors)
    text = " ".join(written(flag_name(name), value) for name, value in flags.items() if value is not False)
    if flags["tis_batch_normalize"]:
        text += ", where the mean is over the whole step instead of a rank's micro-batch"
    line.read_as(MISMATCH_FLAG, f"{text}: the same weights")
    return others | flags


def _in_words(words: Sequence[str]) -> dict[str, Any]:
    """Return the settings of their function among the words; newer releases have them as flags."""
    names = {flag_name(name): name for name in (*_OF_WEIGHTS, *_OF_REJECTION)}
    groups = [(names[flag], values) for flag, values in group_words(words) if flag in names]
    return {name: values[-1] if values else True for name, values in groups}


def _flags_of(values: Mapping[str, Any], rejects: bool, errors: Errors) -> dict[str, Any]:
    """Return the flags by name. A bound that is not given follows from the others, as there."""
    mode = values.get("tis_mode", "truncate")
    upper = _number(values, "tis_upper_bound", 2.0, errors)
    lower = _number(values, "tis_lower_bound", 1.0 / upper, errors)
    if mode not in _MODES:
        errors.add(f"--tis-mode {mode}: no such mode of this function; give one of {', '.join(_MODES)}")
    if mode == "mask" and values.get("tis_batch_normalize"):
        errors.add(
            "--tis-batch-normalize: with --tis-mode mask of this function the mean counts the ratios that are "
            "dropped, and here it does not; drop it, or give --tis-mode clip"
        )
    flags: dict[str, Any] = {
        "use_tis": True,
        "tis_mode": _MODES.get(mode, "truncate"),
        "tis_level": values.get("tis_level", "token"),
        "tis_clip": upper,
        "tis_clip_low": 0.0 if mode == "truncate" else lower,
        "tis_batch_normalize": bool(values.get("tis_batch_normalize")),
        "use_rs": rejects,
    }
    if rejects:
        flags |= {
            "rs_level": values.get("rs_level", "token"),
            "rs_lower_bound": _number(values, "rs_lower_bound", lower, errors),
            "rs_upper_bound": _number(values, "rs_upper_bound", upper, errors),
        }
        if values.get("rs_veto_threshold") is not None:
            flags["rs_veto_threshold"] = _number(values, "rs_veto_threshold", 1e-4, errors)
    return flags


def _number(values: Mapping[str, Any], name: str, default: float, errors: Errors) -> float:
    """Return the number of that name, or the default if there is none. YAML reads ``1e-4`` as a text."""
    value = values.get(name)
    if value is None:
        return default
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = 0.0
    if not 0 < number < float("inf"):
        errors.add(f"{flag_name(name)} {value}: must be a finite number above 0; correct it")
        return default
    return number


# Take the flags of other launchers that are no setting here out of a command, to judge them with its settings.


_TAKES: dict[str, dict[str, Any]] = {
    "switch": {"action": "store_const", "const": True},
    "value": {},
    "list": {"nargs": "+"},
    "optional": {"nargs": "?", "const": True},
}


@cache
def _foreign_parser() -> FlagParser:
    flags = FlagParser(add_help=False, allow_abbrev=False)
    for flag, row in FOREIGN_FLAGS.items():
        flags.add_argument(flag, dest=flag, default=None, **_TAKES[row.kind])
    return flags


def take_foreign(line: Line) -> None:
    """Move the flags of ``FOREIGN_FLAGS`` out of the words."""
    foreign, remaining = list[str](), list[str]()
    is_foreign = False
    for word in line.words:
        if word.startswith("--") and len(word) > 2:
            is_foreign = word.partition("=")[0] in FOREIGN_FLAGS
        (foreign if is_foreign else remaining).append(word)
    line.words = remaining
    with suppress(FlagError):  # whose messages are among the errors
        values = vars(_foreign_parser().for_command(line.errors).read(foreign))
        line.foreign |= {flag: value for flag, value in values.items() if value is not None}


# In this order: a reader sees the words that the readers before it have left.
READERS = (
    read_estimator,
    read_cispo,
    read_adapter,
    read_values,
    read_eval_servers,
    take_foreign,
    read_teacher,
    read_multi_turn,
    read_step,
    read_functions,
    read_async_steps,
    read_reference,
)
