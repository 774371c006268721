"""Choose the model that is trained, and those it is compared with; read their files, here or from the hub."""

import filecmp
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from miles.base import strict_json
from miles.base.flags import Errors, collect_errors, flag, flag_name, is_hub_name, refuse
from miles.base.text import one_line
from miles.models.packing import reads_images


@dataclass(frozen=True)
class ModelArguments:
    """model: initial weights, the reference model and the teacher."""

    hf_checkpoint: Optional[str] = flag(
        None, "Hugging Face folder or name: tokenizer, configuration and initial weights (required)", file="model"
    )
    ref_load: Optional[str] = flag(
        None,
        "reference model of the KL: a Hugging Face folder, or a checkpoint of the same backend (--save); "
        "default: --hf-checkpoint",
        file="model",
        needs="a reference",
    )
    ref_update_interval: Optional[int] = flag(
        None,
        "update the reference from the policy after every N iterations; default: it is frozen",
        needs="a reference, no --lora-rank",
        at_least=1,
        metavar="N",
    )
    ref_mixup_alpha: float = flag(
        1.0,
        "weight A of the policy when --ref-update-interval sets the reference to A policy + (1 - A) reference; 1 "
        "copies the policy (TRL's ref_model_mixup_alpha)",
        needs="--ref-update-interval",
        within="(0, 1]",
    )
    opd_teacher_load: Optional[str] = flag(
        None,
        "teacher of --use-opd in the trainer: a Hugging Face folder, or a checkpoint of the same backend",
        file="model",
        needs="a loaded teacher",
    )


def check_model(model: ModelArguments, errors: Errors) -> None:
    """Check that a model is named, and that local folders exist."""
    errors.require("hf_checkpoint", model.hf_checkpoint, "tokenizer, configuration and initial weights")
    for name in ("ref_load", "opd_teacher_load"):
        path = getattr(model, name)
        if path is not None and errors.none_about(name) and os.path.isdir(path):
            try:
                if not os.listdir(path):  # it holds neither a model nor a checkpoint
                    errors.refuse(name, path, "the folder is empty", "give the folder of a model, or of a checkpoint")
            except OSError as error:
                errors.refuse(name, path, f"cannot be read ({error.strerror})", "check its permissions")
    if model.hf_checkpoint is not None and errors.none_about("hf_checkpoint") and os.path.isdir(model.hf_checkpoint):
        with errors.catching():
            if local_config(model, "hf_checkpoint") is None:
                what_to_do = f"give the folder of a model, or {_COPY_AGAIN}"
                errors.refuse("hf_checkpoint", model.hf_checkpoint, "the folder has no config.json", what_to_do)


def explain_reference(model: ModelArguments) -> list[str]:
    """Return the line about a reference that follows the policy, if it does."""
    interval, alpha = model.ref_update_interval, model.ref_mixup_alpha
    if interval is None:
        return []
    becomes = "the policy" if alpha == 1 else f"{alpha:g} policy + {1 - alpha:g} reference"
    when = "every iteration" if interval == 1 else f"every {interval} iterations"
    return [f"reference  becomes {becomes} after {when}"]


def local_config(model: ModelArguments, field: str) -> dict[str, Any] | None:
    """Return the ``config.json`` of the model that ``field`` names, if it can be read without a network.

    For a name on the hub, it is the file of the last download, if there was one.

    Raises:
        FlagError: It cannot be read, or is not the configuration of a model.
    """
    path = getattr(model, field)
    file = None if path is None else _config_file(path)
    if file is None or not os.path.isfile(file):  # unlike Path.is_file, false for a name that is too long
        return None
    try:
        config: dict[str, Any] = strict_json.loads(file.read_text(encoding="utf-8"))
        fault = _config_fault(config)
    except strict_json.StrictJsonError as error:
        fault = str(error)
    except OSError as error:
        fault = f"cannot be read ({error.strerror})"
    except UnicodeDecodeError:
        fault = "not UTF-8"
    refuse_config(field, path, fault)
    return config


def readable_config(model: ModelArguments) -> dict[str, Any] | None:
    """Return the ``config.json`` of ``--hf-checkpoint`` as ``local_config`` does; None for a broken one too.

    For decisions before the validator, which reports a broken one.
    """
    try:
        return local_config(model, "hf_checkpoint")
    except ValueError:
        return None


def has_vision_tower(model: ModelArguments, if_absent: bool) -> bool:
    """Return whether the model reads images; ``if_absent`` if its config is not here."""
    config = readable_config(model)
    return if_absent if config is None else reads_images(config)


def _config_file(path: str) -> Path | None:
    """Return the file of the config that ``path`` names: in that folder, or in the cache for a name on the hub.

    The cache keeps the files of each revision in a folder, and in ``refs/main`` the name of the newest one
    (huggingface_hub, "Understand caching").
    """
    if not is_on_hub(path):
        return Path(path) / "config.json"
    from huggingface_hub import constants  # takes milliseconds, and most runs name a folder

    cached = Path(constants.HF_HUB_CACHE, "models--" + path.replace("/", "--"))
    newest = cached / "refs" / "main"
    if not os.path.isfile(newest):
        return None
    try:
        return cached / "snapshots" / newest.read_text(encoding="utf-8").strip() / "config.json"
    except (OSError, UnicodeDecodeError):
        return None  # the hub's own code reports it, when the model is loaded


def is_on_hub(path: str) -> bool:
    """Return whether ``path`` is a name on the hub and not a folder here."""
    return not os.path.isdir(path) and is_hub_name(path)


def local_vocab_size(model: ModelArguments, field: str = "hf_checkpoint") -> int | None:
    """Return the number of token ids of the model, if its ``config.json`` can be read without a network and has it.

    Raises:
        FlagError: The file is broken.
    """
    config = local_config(model, field) or {}
    size: int | None = (config.get("text_config") or config).get("vocab_size")
    return size


def refuse_config(field: str, path: str, fault: str | None) -> None:
    """Raise ``FlagError`` if the ``config.json`` of the model has a fault."""
    if fault is not None:
        refuse(field, path, f"its config.json is broken: {fault}", _COPY_AGAIN)


@contextmanager
def reading_config(field: str, path: str | None) -> Iterator[None]:
    """Refuse the model's ``config.json`` if the block, which reads it further, lacks a value or finds a wrong type.

    Raises:
        FlagError: It has such a fault.
    """
    try:
        yield
    except KeyError as error:
        refuse_config(field, str(path), f"it has no {error.args[0]}")
    except (TypeError, AttributeError, ArithmeticError) as error:
        refuse_config(field, str(path), f"a value has a wrong type ({error})")


# Numbers that the layout of the ranks and the schedule are computed with, at the top or in text_config.
_COUNTS = (
    "head_dim",
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "vocab_size",
)


def _config_fault(config: Any) -> str | None:
    """Return the fault of the values that are read before transformers reads the whole."""
    if not isinstance(config, dict):
        return "it is not a JSON object"
    text = config.get("text_config")
    if text is not None and not isinstance(text, dict):
        return "text_config is not an object"
    for part in (config, text or {}):
        if not isinstance(part.get("model_type", ""), str):
            return "model_type is not text"
        for name in _COUNTS:
            value = part.get(name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                return f"{name} is not a whole number of at least 1"
        for name in ("layer_types", "layers_block_type", "architectures"):
            value = part.get(name)
            if value is not None and not (isinstance(value, list) and all(isinstance(item, str) for item in value)):
                return f"{name} is not a list of names"
    if "model_type" not in config and "model_type" not in (text or {}):
        return "it names no model_type"
    return None


_COPY_AGAIN = "copy the file again from the source of the model"


# Fetch the ``config.json`` of a model on the Hugging Face hub, to check a command before anything starts.


_SECONDS = 5.0  # for the hub to answer
_LONGEST_REASON = 120
_FIELDS = ("hf_checkpoint", "ref_load", "opd_teacher_load")


@dataclass(frozen=True)
class Fetched:
    """Say what was fetched.

    Attributes:
        is_any: Whether a config is on this machine now that was not before.
        absent: Which models could not be fetched, and why.
    """

    is_any: bool
    absent: tuple[str, ...]

    @property
    def notes(self) -> tuple[str, ...]:
        """The notes on models that could not be fetched, for a run that starts elsewhere or later."""
        later = "so flags that contradict the model are refused when it is loaded"
        return tuple(f"{fault}, {later}" for fault in self.absent)


def fetch_configs(model: ModelArguments) -> Fetched:
    """Fetch the configs of the models that are names on the hub, unless the hub's cache has them.

    Raises:
        FlagError: The hub answers that a model cannot be had.
    """
    named = {field: getattr(model, field) for field in _FIELDS}
    missing = {field: name for field, name in named.items() if name is not None and is_on_hub(name)}
    faults = dict[str, str | None]()  # of those that are not in the cache
    with collect_errors() as errors:
        for field, name in missing.items():
            with errors.catching():
                if local_config(model, field) is None:
                    faults[f"{flag_name(field)} {name}"] = _fetch(field, name)
    return Fetched(None in faults.values(), tuple(f"{flag}: {why}" for flag, why in faults.items() if why is not None))


def _fetch(field: str, name: str) -> str | None:
    """Fetch the config into the hub's cache; return why that is not possible now, or None."""
    from huggingface_hub import constants

    if constants.is_offline_mode():
        return "its config.json is not in the cache, and HF_HUB_OFFLINE forbids to fetch it"
    import httpx  # takes a second, as do the next ones
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RemoteEntryNotFoundError, RepositoryNotFoundError

    try:
        HfApi().model_info(name, timeout=_SECONDS)  # a download would try six times, for half a minute
        hf_hub_download(name, "config.json", etag_timeout=_SECONDS)
    except GatedRepoError:
        rule = "the Hugging Face hub gives it only to users who were granted access"
        refuse(field, name, rule, "ask for it on the page of the model, and set HF_TOKEN")
    except RepositoryNotFoundError:
        rule = "the Hugging Face hub has no such model, or does not show it to you"
        refuse(field, name, rule, "correct the name, give a folder, or set HF_TOKEN if the model is private")
    except RemoteEntryNotFoundError:
        rule = "on the Hugging Face hub it has no config.json"
        refuse(field, name, rule, "give a model in the format of transformers")
    except (httpx.HTTPError, HfHubHTTPError, OSError) as error:
        return f"the Hugging Face hub cannot be reached ({one_line(str(error), _LONGEST_REASON)})"
    return None


# Compare the tokenizers of two models by their files, without transformers.


TOKENIZER = "tokenizer.json"


def ordinary_tokens(folder: str) -> dict[str, int] | None:
    """Return the id of each token in the ``tokenizer.json`` of ``folder``; None without one that can be read.

    Tokens that were added to the vocabulary, as special tokens are, are left out: models of one family have others.
    """
    try:
        content = json.loads((Path(folder) / TOKENIZER).read_text(encoding="utf-8"))
        vocabulary: Any = content["model"]["vocab"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    if isinstance(vocabulary, dict):
        return {token: number for token, number in vocabulary.items() if type(number) is int}
    if isinstance(vocabulary, list):  # pairs of a token and its score; the id is the position
        pairs = [(pair[0], number) for number, pair in enumerate(vocabulary) if isinstance(pair, list) and pair]
        return {token: number for token, number in pairs if isinstance(token, str)}
    return None


def fault_of_tokens(folder: str, own: str) -> str | None:
    """Return how the tokenizer of the model in ``folder`` contradicts the one of ``own``, as part of a sentence.

    None if they agree on all tokens that both have, or if one of the folders has no file to compare.
    """
    with suppress(OSError, ValueError):  # models of one family have the same bytes; to read JSON takes a second
        if filecmp.cmp(Path(folder) / TOKENIZER, Path(own) / TOKENIZER, shallow=False):
            return None
    there, here = ordinary_tokens(folder), ordinary_tokens(own)
    if there is None or here is None:
        return None
    others = [token for token, number in here.items() if there.get(token, number) != number]
    if not others:
        return None
    example = others[0]
    return (
        f"its {TOKENIZER} has other ids for {len(others)} of {len(here)} tokens ({example!r:.40} is {there[example]}, "
        f"and {here[example]} in {own})"
    )
