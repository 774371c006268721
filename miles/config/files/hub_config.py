"""Fetch the ``config.json`` of a model on the Hugging Face hub, by which a command is judged before anything starts."""

from __future__ import annotations

from dataclasses import dataclass

from miles.base.flags import collect_errors, refuse
from miles.base.one_line import one_line
from miles.config.model import ModelArguments, is_on_hub, local_config

_SECONDS = 5.0  # in which the hub must answer
_LONGEST_REASON = 120
_FIELDS = ("hf_checkpoint", "ref_load", "opd_teacher_load")


@dataclass(frozen=True)
class Fetched:
    """Say what was fetched.

    Attributes:
        is_any: Whether a config is on this machine now that was not before.
        notes: Which models could not be fetched, and why.
    """

    is_any: bool
    notes: tuple[str, ...]


def fetch_configs(model: ModelArguments) -> Fetched:
    """Fetch the configs of the models that are names on the hub, unless the hub's cache has them.

    Raises:
        FlagError: The hub answers that a model cannot be had.
    """
    named = {field: getattr(model, field) for field in _FIELDS}
    missing = {field: name for field, name in named.items() if name is not None and is_on_hub(name)}
    is_any, notes = False, list[str]()
    with collect_errors() as errors:
        for field, name in missing.items():
            with errors.catching():
                if local_config(model, field) is not None:
                    continue
                why = _fetch(field, name)
                is_any |= why is None
                if why is not None:
                    later = "so flags that contradict the model are refused when it is loaded"
                    notes.append(f"--{field.replace('_', '-')} {name}: {why}, {later}")
    return Fetched(is_any, tuple(notes))


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
