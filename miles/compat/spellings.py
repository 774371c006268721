"""Read what related launchers write otherwise: values, a distilled teacher, checkpoints by number, converted copies."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

from miles.base.flags import LONGEST_VALUE, Errors
from miles.base.storage import is_url
from miles.base.text import one_line
from miles.compat.functions import ZERO_REWARD, our_function
from miles.compat.line import Line
from miles.compat.verdicts import table
from miles.config.checkpoint import CheckpointArguments, checkpoint_name
from miles.config.choice import reads_megatron_flags
from miles.config.notes import NO_EFFECT, READ_AS, SPEED, Note, written
from miles.config.settings import Settings
from miles.config.spelling import group_words
from miles.objective.settings import LossArguments
from miles.tasks.rewards.settings import RewardArguments

ESTIMATOR = ("--advantage-estimator", "on_policy_distillation")
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
            read[index + (not equals)] = f"{flag}={here}" if equals else here
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
    rm_type, path = line.value("--rm-type"), line.value("--custom-rm-path")
    has_zero_rewards = rm_type == "zero" if "--rm-type" in line else path is not None and _is_their_reward(path)
    weighs_one = "--opd-kl-coef" not in line or line.value("--opd-kl-coef") in ("1", "1.0")
    if line.value(flag) == name and has_zero_rewards and weighs_one:
        why = "--use-opd: advantages come from the teacher alone, since the rewards are 0"
        line.read_as(flag, why, "--use-opd")


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
    step, folder = str(line.foreign.get(CKPT_STEP, "")), line.value("--load")
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
    given = settings.model.hf_checkpoint
    what_to_do = f"give the Hugging Face folder that it was made from, or drop it to compare with {given}"
    errors.refuse("ref_load", path, rule, what_to_do)


def _is_ours(folder: Path) -> bool:
    return any(folder.glob("manifest.json")) or any(folder.glob("*/manifest.json")) or (folder / "config.json").exists()


def remarks(settings: Settings, given: Collection[str]) -> Iterator[str]:
    """Yield notes on what has another default or meaning in related launchers.

    Args:
        settings: The settings of a valid run.
        given: The fields that the command sets.
    """
    yield from _on_initial_weights(settings, given)
    relied_on = [name for name in ON_FSDP if name not in given]
    if "train_backend" in given and not reads_megatron_flags(settings) and relied_on:
        here = ", ".join(f"--{name.replace('_', '-')} {getattr(settings.optimizer, name)}" for name in relied_on)
        there = ", ".join(ON_FSDP[name] for name in relied_on)
        yield f"{here}: the defaults with every backend; related launchers have {there} with FSDP"


def _on_initial_weights(settings: Settings, given: Collection[str]) -> Iterator[str]:
    """Yield a note on a reference that is another model than the policy's first weights, which it would be elsewhere.

    Related launchers do so with Megatron, their default. With FSDP theirs starts as here.
    """
    reference, model, load = settings.model.ref_load, settings.model.hf_checkpoint, settings.checkpoint.load
    if reference is None or model is None or not settings.loss.needs_reference or Path(reference) == Path(model):
        return
    names_fsdp = "train_backend" in given and not reads_megatron_flags(settings)
    resumes = load is not None and any(Path(load).glob("*/manifest.json"))
    if not names_fsdp and not resumes:
        yield (
            f"--ref-load {reference}: the reference of the KL only; the policy starts from --hf-checkpoint {model}. "
            "Related launchers start it from --ref-load too if --load has no checkpoint; for that give --hf-checkpoint "
            f"{reference}"
        )
