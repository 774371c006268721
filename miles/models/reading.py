"""Read a model's configuration and weights as transformers does, without code from the model's folder."""

from __future__ import annotations

from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

from miles.base.one_line import one_line
from miles.models.installed_transformers import READ_AS

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel

_READER = "PytorchStreamReader"  # begins what torch says about a broken pytorch_model.bin
_SHOWN = 3  # names of tensors in a message


def read_config(path: str) -> PretrainedConfig:
    """Return the configuration of a folder, or of a name on the hub.

    A type that transformers does not know, and whose layers are those of one that it knows (``READ_AS``), is read as
    the latter. Pass the result to ``from_pretrained`` as ``config``.
    """
    from transformers import AutoConfig, PretrainedConfig  # slow to import

    found, _ = PretrainedConfig.get_config_dict(path)
    kind = READ_AS.get(str(found.get("model_type")))
    if kind is None:
        config: PretrainedConfig = AutoConfig.from_pretrained(path)
        return config
    # auto_map names code in the folder, which is not run.
    known = {name: value for name, value in found.items() if name not in ("auto_map", "model_type")}
    return AutoConfig.for_model(kind, **known)


def read_model(path: str, config: PretrainedConfig, dtype: torch.dtype, attn_implementation: str) -> PreTrainedModel:
    """Return the causal language model of a folder, or of a name on the hub, with every weight from its files.

    transformers fills tensors that the files lack with random values. ``config`` is that of ``read_config``.

    Raises:
        ValueError: The files lack tensors that the configuration asks for, hold some of another shape, or cannot be
            read. The message names the first ones.
    """
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM  # slow to import

    again = "copy or download the folder again"
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(  # a pair, which its annotation does not say
            path,
            config=config,
            dtype=dtype,
            attn_implementation=attn_implementation,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # refused below, by name
        )
    except KeyError as error:
        if error.args != (attn_implementation,):
            raise
        rule = f"a {config.model_type} cannot be computed with the attention of miles"
        raise ValueError(f"the model {path}: {rule}; choose another model") from error
    except (OSError, EOFError, UnpicklingError, SafetensorError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and _READER not in str(error):  # not about a file
            raise
        why = one_line(str(error), 300) or "a file is empty"
        raise ValueError(f"the model {path}: its weights cannot be read ({why}); {again}") from error
    model: PreTrainedModel = loaded[0]
    found: dict[str, Any] = loaded[1]
    if missing := sorted(found["missing_keys"]):
        raise ValueError(
            f"the model {path}: its files lack {_listed(missing)}, which its config.json asks for; {again}"
        )
    if mismatched := sorted(found["mismatched_keys"]):
        shapes = [f"{name} ({list(there)}, not {list(asked)})" for name, there, asked in mismatched]
        raise ValueError(
            f"the model {path}: its config.json asks for other shapes than its files have, of {_listed(shapes)}; "
            f"{again}"
        )
    choose_experts(model)
    return model


def choose_experts(model: PreTrainedModel) -> None:
    """Compute experts one by one if torch's grouped product refuses their weights, whose rows are 16 bytes there.

    In bfloat16, in which training may compute, that is 8 numbers. A loop over the experts takes any width.
    """
    shapes = [weight.shape[1:] for name, weight in model.named_parameters() if ".experts." in name and weight.ndim == 3]
    if any(size % 8 for shape in shapes for size in shape):
        model.set_experts_implementation("eager")


def _listed(names: list[str]) -> str:
    """Name tensors: all, or the first of many with their number."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"the tensor{'s' * (len(names) > 1)} {', '.join(names[:_SHOWN])}{more}"
