"""Check everything that a run reads before it starts: the rows of all sets, the reward, and other functions.

``miles explain`` and every start call ``check_inputs``. It reports all faults together. A plan may be for another
machine: files that are not on this one are listed (``Inputs.unchecked``), and only a start refuses them.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles.base.disk_faults import existing
from miles.base.flags import FlagError, count, flag_name
from miles.base.host import GIB, memory_limit
from miles.base.processes import pool_of
from miles.base.storage import is_url
from miles.base.text import InputError, one_line
from miles.base.tokenizer import TokenizerFault
from miles.base.user_code import UserCodeError, UserCodeTimeout, fault_of_signature, load_object
from miles.config.evaluation import eval_entries
from miles.config.functions import user_functions
from miles.config.model import has_vision_tower, readable_config
from miles.config.notes import start_refused
from miles.config.rollout import RolloutArguments
from miles.config.rules import sequence_limit
from miles.config.settings import Settings
from miles.models.packing import reads_images
from miles.tasks.data.checked_rows import RowsVerdict, may_fork, tokenizer_files
from miles.tasks.data.settings import DataArguments
from miles.tasks.data.sources import SourceAbsent, is_of_datasets
from miles.tasks.rewards.settings import RewardArguments
from miles.types.sample import Prompt, Sample, SampleStatus

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from miles.tasks.data.checked_rows import PromptSet
    from miles.tasks.rewards.reward_process import RewardProcess

    Tokenizer = PreTrainedTokenizerBase | str | None

LOUD = 0.1  # the smallest share of omitted rows that is a warning
COMPARED = 10_000  # the largest sets whose prompts are compared with each other
OF_SAMPLES = ("custom_generate_function_path", "rollout_function_path")  # may add what a stand-in answer lacks
CALL_SECONDS = 30.0  # for the one call of the reward function
SILENT_SECONDS = 3.0  # of these, before a line is printed
OF_REWARDS = "it gets a list of samples (sample.response, sample.label) and returns a number for each"


@dataclass
class Inputs:
    """Hold the findings of the check.

    Attributes:
        verdicts: The verdict on the rows of each set, by name and source.
        training: How many prompts a pass over the training sets has.
        first: A prompt of the first set, without tokens.
        faults: The errors.
        warnings: Inputs that are allowed, and most likely a mistake.
        unchecked: Inputs that are not on this machine, and so were not checked.
    """

    verdicts: dict[str, RowsVerdict] = field(default_factory=dict)
    training: int = 0
    first: Prompt | None = None
    faults: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)


def load_training_prompts(name: str, source: str, settings: Settings, tokenizer: Tokenizer) -> PromptSet[Any]:
    """Load a training set: prompts, which carry the ``name`` of a set in a mixture, or conversations."""
    from miles.tasks.data.conversations import load_conversations
    from miles.tasks.data.prompts import load_prompts

    longest, context = settings.rollout.rollout_max_response_len, settings.rollout.rollout_max_context_len
    if settings.reads_conversations:
        assert tokenizer is not None, "without one, conversations are not read"
        return load_conversations(source, settings.data, tokenizer, max_response_len=longest, max_context_len=context)
    return load_prompts(
        source, settings.data, tokenizer, reward=settings.reward, max_context_len=context, prompt_set=name
    )


def load_held_out_prompts(
    entry: Mapping[str, Any],
    data: DataArguments,
    rollout: RolloutArguments,
    reward: RewardArguments | None,
    tokenizer: Tokenizer,
) -> PromptSet[Prompt]:
    """Load the prompts of an entry of ``eval_entries``."""
    from miles.tasks.data.prompts import load_prompts

    return load_prompts(
        entry["source"],
        data,
        tokenizer,
        input_key=entry["input_key"],
        label_key=entry["label_key"],
        reward=reward,
        max_context_len=rollout.rollout_max_context_len,
    )


def check_inputs(settings: Settings, starts: bool) -> Inputs:
    """Check the rows of all sets, the reward function, which is called once, and the user's other functions.

    Rows are read in a process of their own, without torch, whose memory is free afterwards.

    Raises:
        FlagError: With all that is wrong.
    """
    try:
        before = partial(_prepare, _needs_torch(settings), starts)
        inputs: Inputs = _in_process("reads the rows", _check_sets, settings, starts, before=before)
    except TokenizerFault:
        inputs = _check_sets(settings, starts)
    checked = [(name, path, hook.arguments) for name, hook, path in user_functions(settings) if hook.arguments]
    if checked:
        inputs.faults += _in_process("imports your functions", _faults_of_functions, checked)
    _check_reward(settings, starts, inputs)
    faults = [*_faults_of_weights(settings), *_faults_of_room(settings)]
    if starts:
        inputs.faults += faults
    else:
        inputs.warnings += map(start_refused, faults)
    if inputs.faults:
        raise FlagError(*dict.fromkeys(inputs.faults))
    return inputs


def _in_process(task: str, function: Callable[..., Any], *args: Any, before: Callable[[], None] | None = None) -> Any:
    """Return ``function(*args)`` from a fork of this process, or from this one if it has threads already.

    Raises ``FlagError`` with its ``task`` if the fork was killed.
    """
    if not may_fork():
        return function(*args)
    with pool_of(1, "fork", before) as pool:
        try:
            return pool.submit(function, *args).result()
        except BrokenProcessPool:
            rule = "was killed or crashed; free memory, or correct the code that ends it"
            raise FlagError(f"the process that {task} {rule}") from None


def _needs_torch(settings: Settings) -> bool:
    """Return whether reading the rows takes torch: for images, and in ``datasets``, which a module None confuses.

    Raises ``FlagError`` for a malformed ``--eval-config``, so it runs in the command's own process.
    """
    reads_images = settings.data.multimodal_keys is not None or has_vision_tower(settings.model, if_absent=False)
    return reads_images or any(is_of_datasets(source) for _, source, _ in _sets(settings))


def _prepare(needs_torch: bool, starts: bool) -> None:
    """Make transformers do without torch, whose import takes longer than all else."""
    if not needs_torch:
        sys.modules["torch"] = None  # type: ignore[assignment]
        os.environ["TRANSFORMERS_VERBOSITY"] = "error"  # it would note that
    if not starts:
        os.environ["HF_HUB_OFFLINE"] = "1"  # a plan downloads nothing


def _check_sets(settings: Settings, starts: bool) -> Inputs:
    inputs = Inputs()
    tokenizer = str(settings.model.hf_checkpoint)
    has_files = any(re.match(r"tokenizer|vocab|.*\.(model|tiktoken)$", f.name) for f in tokenizer_files(tokenizer))
    is_there = has_files or (starts and not os.path.isdir(tokenizer))  # a start fetches it from the hub
    if not is_there:
        if starts:
            what_to_do = "copy tokenizer.json and tokenizer_config.json from the source of the model"
            inputs.faults.append(f"--hf-checkpoint {tokenizer}: the folder has no tokenizer; {what_to_do}")
        else:
            inputs.unchecked.append(f"the tokenizer of {tokenizer}, so chat template and lengths of prompts")
        if settings.reads_conversations:
            return inputs
    trained = set[str]()
    room, limit = sequence_limit(settings)
    has_no_limit = settings.generates and (
        settings.data.rollout_max_prompt_len is None and settings.rollout.rollout_max_context_len is None
    )
    for kind, source, load in _sets(settings):
        name = f"{kind} {source}"
        is_held_out = kind.startswith("held-out ")
        of_training = "--prompt-data" if settings.data.prompt_mix is None else "--prompt-mix"
        flag = "--eval-prompt-data" if is_held_out else of_training
        try:
            loaded = load(tokenizer if is_there else None)
        except SourceAbsent as error:
            (inputs.faults if starts else inputs.unchecked).append(_of_flag(flag, str(error)))
        except TokenizerFault:
            raise
        except InputError as error:
            messages = error.messages if isinstance(error, FlagError) else (str(error),)
            inputs.faults += [_of_flag(flag, message) for message in messages]
        else:
            verdict = inputs.verdicts[name] = loaded.verdict
            if verdict.dropped >= LOUD * verdict.rows:
                inputs.warnings.append(
                    f"{name}: {verdict.dropped / verdict.rows:.0%} of {verdict.rows:,} rows are longer than a limit "
                    f"({loaded.limit}), and are left out"
                )
            if has_no_limit and verdict.longest >= room:
                shorter = max(1, room - (settings.rollout.rollout_max_response_len or 1))
                inputs.faults.append(
                    f"{flag} {source}: it has a prompt of {verdict.longest:,} tokens, and {limit} is {room}; leave "
                    f"such prompts out with --rollout-max-prompt-len {shorter}"
                )
            are_texts = settings.data.multimodal_keys is None
            is_compared = settings.evaluation.has_sets and are_texts and len(loaded) <= COMPARED
            prompts = {repr(prompt.input) for prompt in loaded.unrendered(1)} if is_compared else set()
            if not is_held_out:
                inputs.training += len(loaded)
                trained |= prompts
            elif shared := len(prompts & trained):
                inputs.warnings.append(
                    f"{name}: {shared} of its {count(len(prompts), 'prompt')} are training prompts too, so what a run "
                    "learns by heart counts as learned; hold other rows out"
                )
            inputs.first = inputs.first or next(loaded.unrendered(len(loaded)))
    return inputs


def _of_flag(flag: str, message: str) -> str:
    """Begin a message about rows with the flag that names them; held-out rows have flags of their own."""
    if flag == "--eval-prompt-data":
        message = re.sub(r"--(input|label)-key", r"--eval-\1-key", message)
    return message if message.startswith("--") else f"{flag} {message.removeprefix('prompt source ')}"


def _sets(settings: Settings) -> Iterator[tuple[str, str, Callable[[Tokenizer], PromptSet[Any]]]]:
    """Yield each set that is read: its kind, its source, and what loads it."""
    data = settings.data
    if not settings.rollout.loads_samples and data.data_source_path is None:
        is_mixed = data.prompt_mix is not None or data.curriculum_path is not None
        for name, source in data.mixed_sources.items():
            yield name, source, partial(load_training_prompts, name if is_mixed else "", source, settings)
    if settings.evaluation.eval_function_path is None:
        for entry in eval_entries(settings.evaluation):
            load = partial(load_held_out_prompts, entry, data, settings.rollout, settings.reward)
            yield f"held-out {entry['name']}", entry["source"], load


def _faults_of_functions(checked: list[tuple[str, str, int]]) -> list[str]:
    """Import functions, each called with a number of arguments, and return their faults."""
    faults = list[str]()
    for name, path, arguments in checked:
        try:
            if fault := fault_of_signature(load_object(path, flag_name(name), "function"), arguments):
                faults.append(f"{flag_name(name)} {path}: {fault}")
        except InputError as error:
            faults.append(str(error))
    return faults


def _check_reward(settings: Settings, starts: bool, inputs: Inputs) -> None:
    """Import the reward function, and call it once with stand-in answers to the first prompt, in its process."""
    reward = settings.reward
    if not settings.generates or not reward.weights:
        return
    from miles.tasks.rewards.base import NotAReward
    from miles.tasks.rewards.registry import get_reward_function
    from miles.tasks.rewards.reward_process import RewardProcess, RewardProcessDied

    try:
        function = get_reward_function(reward, memory_limit(reward.reward_memory))
    except InputError as error:
        is_here = reward.has_custom and not settings.cluster.ray_address
        (inputs.faults if starts or is_here else inputs.unchecked).append(str(error))
        return
    if reward.is_sum and reward.has_custom:
        function = get_reward_function(replace(reward, rm_type=None), memory_limit(reward.reward_memory))
    if not isinstance(function, RewardProcess) or inputs.first is None:
        return
    answer = str(inputs.first.label or "a stand-in answer")
    pair = [Sample(inputs.first, 0, number, [0], answer, [1], [0.0], SampleStatus.COMPLETED) for number in range(2)]
    try:
        for result in asyncio.run(_called(function, pair, f"--custom-rm-path {reward.custom_rm_path}")):
            if isinstance(result, NotAReward):
                raise UserCodeError(result)
    except (UserCodeError, UserCodeTimeout, RewardProcessDied, TimeoutError) as error:
        frames = re.findall(r'File "([^"]+)", line (\d+)', "".join(getattr(error, "__notes__", ())))
        places = [f"{file}:{line}: " for file, line in frames if os.sep + "miles" + os.sep not in file]
        fault = f"did not return within {CALL_SECONDS:g} s" if isinstance(error, TimeoutError) else str(error)
        message = (
            f"--custom-rm-path {reward.custom_rm_path}: {places[-1] if places else ''}called with the answer "
            f"{answer!r} to {inputs.first.source}, it {fault}"
        )
        adds_data = any(name in OF_SAMPLES for name, _, _ in user_functions(settings)) or settings.rollout.environment
        is_wrong = starts and reward.on_error == "stop" and not adds_data
        what_to_do = "" if "; " in fault else f"; {OF_REWARDS}"
        (inputs.faults if is_wrong else inputs.warnings).append(one_line(f"{message}{what_to_do}", 1000))


async def _called(function: RewardProcess, samples: list[Sample], name: str) -> list[float]:
    call = asyncio.ensure_future(function(samples))
    if not (await asyncio.wait([call], timeout=SILENT_SECONDS))[0]:
        print(f"waiting for {name}, called with a stand-in answer, for up to {CALL_SECONDS:g} s …", file=sys.stderr)
    return await asyncio.wait_for(call, CALL_SECONDS - SILENT_SECONDS)


def _absent_weights(folder: Path, has_others: bool) -> list[str]:
    """Return the files of weights that a model's folder lacks; one without any needs some, unless it ``has_others``."""
    with suppress(OSError, ValueError, AttributeError):  # no index, or a broken one
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        if absent := {*index["weight_map"].values()} - {*os.listdir(folder)}:
            return sorted(absent)
    if has_others or not folder.is_dir() or any(folder.glob("*.safetensors")) or any(folder.glob("*.bin")):
        return []
    return ["model.safetensors"]


def _faults_of_weights(settings: Settings) -> Iterator[str]:
    """Yield a message for each file of weights that is absent or not whole: a copy that broke off, or a pointer."""
    folder = str(settings.model.hf_checkpoint)
    has_others = settings.checkpoint.load is not None or settings.model.ref_load is not None
    if absent := _absent_weights(Path(folder), has_others):
        more = f" (and {len(absent) - 1} more)" if len(absent) > 1 else ""
        yield f"--hf-checkpoint {folder}: it lacks {absent[0]}{more}, its weights; fetch the model again"
    for file in sorted(Path(folder).glob("*.safetensors")):
        size = file.stat().st_size
        try:
            tensors, start = _header(file)
            whole = start + max((tensor["data_offsets"][1] for tensor in tensors.values()), default=0)
        except (OSError, ValueError, AttributeError, KeyError, TypeError):
            fault = "is no file of safetensors (a pointer of git-lfs, perhaps)"
        else:
            if size >= whole:
                continue
            fault = f"broke off: it has {size:,} of {whole:,} bytes"
        yield f"--hf-checkpoint {folder}: {file.name} {fault}; fetch it again"


def _faults_of_room(settings: Settings) -> Iterator[str]:
    """Yield a message if the disk of ``--save`` has no room even for the weights as the model's files hold them."""
    save = settings.checkpoint.save
    if save is None or is_url(save) or settings.lora.trains_adapter:
        return
    with suppress(OSError):
        weights = sum(file.stat().st_size for file in Path(str(settings.model.hf_checkpoint)).glob("*.safetensors"))
        free = shutil.disk_usage(existing(Path(save))).free
        if free < weights:
            sizes = f"has {free / GIB:.3f} GiB free, and the weights alone take {weights / GIB:.3f} GiB"
            yield f"--save {save}: its disk {sizes}; make room, or give a folder on another disk"


def _header(file: Path) -> tuple[dict[str, dict[str, Any]], int]:
    """Return type, shape and place of each tensor in a file of safetensors, and where the tensors begin."""
    with file.open("rb") as weights:
        length = int.from_bytes(weights.read(8), "little")
        header = json.loads(weights.read(min(length, file.stat().st_size)))
    return {name: tensor for name, tensor in header.items() if name != "__metadata__"}, 8 + length


def explain_inputs(settings: Settings, inputs: Inputs) -> list[str]:
    """Return the lines about the inputs that were checked, and about those that are not on this machine."""
    lines = list[str]()
    for name, verdict in inputs.verdicts.items():
        measured = " in the first 256 and in long ones" if verdict.rows > 256 else ""
        lengths = "" if verdict.shortest >= verdict.longest else f"{verdict.shortest} to "
        lengths = f", of {lengths}{count(verdict.longest, 'token')}{measured}" if verdict.longest else ""
        lines.append(f"{name}: {verdict.rows:,} rows{lengths}")
        lines += [f"  {line}" for line in verdict.notes.lines(verdict.rows)]
    lines += [f"WARNING: {text}" for text in inputs.warnings]
    if inputs.training and settings.rollout.rollout_batch_size and settings.trains:
        iterations = math.ceil(inputs.training / settings.rollout.rollout_batch_size)
        steps = iterations * settings.steps_per_iteration
        work = f"{count(iterations, 'iteration')}, {count(steps, 'optimizer step')}"
        lines.append(f"epoch: {inputs.training:,} prompts, {work}")
    shapes = _shapes(settings)
    if (trained := _trained(settings, shapes)) and settings.trains:
        size = _STATE_BYTES * sum(map(math.prod, shapes.values())) / 1e9
        saves = settings.checkpoint.save is not None and not settings.lora.trains_adapter
        on_disk = f"; a checkpoint takes about {size:.2g} GB" if saves else ""
        lines.append(f"trained: {trained}{on_disk}")
    if inputs.unchecked:
        lines.append(f"not checked, because it is not on this machine: {'; '.join(inputs.unchecked)}")
    return lines


_STATE_BYTES = 12  # of a parameter in a checkpoint: an fp32 weight and the two moments of Adam
_LAYERS = ("model.layers.", "model.language_model.layers.", "language_model.model.layers.")  # of the language part


def _with_tower(settings: Settings, total: int, shapes: dict[str, list[int]]) -> str:
    """Return the number of trained parameters in words, with the part that encodes images."""
    config = readable_config(settings.model)
    if config is None or not reads_images(config):
        return f"{total:,} parameters"
    from miles.models.images import vision_family  # a text model reads none of it

    family = vision_family(config["model_type"])
    tower = sum(math.prod(shape) for name, shape in shapes.items() if {*name.split(".")[:2]} & {*family.encoders})
    if settings.training.freeze_vision_tower:
        return f"{total - tower:,} parameters of the language part; {tower:,} of the vision tower stay unchanged"
    return f"{total:,} parameters, {tower:,} of them of the vision tower"


def _shapes(settings: Settings) -> dict[str, list[int]]:
    """Return the shape of each weight by the headers of its files; none if the model is not on this machine."""
    shapes = dict[str, list[int]]()
    with suppress(OSError, ValueError, AttributeError, KeyError, TypeError):  # they may be broken
        for file in Path(str(settings.model.hf_checkpoint)).glob("*.safetensors"):
            shapes |= {name: tensor["shape"] for name, tensor in _header(file)[0].items()}
    return shapes


def _trained(settings: Settings, shapes: dict[str, list[int]]) -> str:
    """Return the number of trained parameters in words; without shapes, an empty text."""
    lora = settings.lora
    total = sum(map(math.prod, shapes.values()))
    if not total:
        return ""
    if not lora.trains_adapter:
        return _with_tower(settings, total, shapes)
    matrices = {name: shape for name, shape in shapes.items() if len(shape) == 2 and name.startswith(_LAYERS)}
    adapted = [sum(shape) for name, shape in matrices.items() if lora.adapts(name.split(".")[-2])]
    return f"{lora.lora_rank * sum(adapted):,} parameters of an adapter, alongside {total:,} that stay unchanged"
