"""Read a model's configuration and weights as transformers does, without code from the model's folder."""

from __future__ import annotations

import ast
import logging
import re
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from pickle import UnpicklingError
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

from miles.base.text import InputError, one_line
from miles.base.tokenizer import end_of_turn, tokenizer_of_process
from miles.models.families import vision

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel


# Read from transformers' source which models it has, and the linear layers of each.
#
# Importing transformers' models takes seconds and needs torch. Its tables of models are literals, and each file of a
# family defines all of its layers, so both can be read as written.


READ_AS = {"kimi_k2": "deepseek_v3"}  # transformers does not know the first; the layers are the second's
_CONFIGS = "CONFIG_MAPPING_NAMES"
_CAUSAL = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"
_MASKED = "MODEL_FOR_MASKED_LM_MAPPING_NAMES"
_TEXT_TO_TEXT = "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES"
_SPEECH_TO_TEXT = "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES"
_MODULES = "SPECIAL_MODEL_TYPE_TO_MODULE_NAME"


def why_not_loaded(model_type: str, has_own_code: bool, is_decoder: bool) -> tuple[str, str] | None:
    """Return why transformers loads no causal language model of this type, and what to do; None if it does.

    Args:
        model_type: As the model's ``config.json`` names it.
        has_own_code: Whether that names code in the model's folder (``auto_map``), which is not run.
        is_decoder: Whether that states that a model of a family of encoders is a decoder.
    """
    model_type = READ_AS.get(model_type, model_type)
    causal = _table(_CAUSAL)
    if model_type in {**_table(_TEXT_TO_TEXT), **_table(_SPEECH_TO_TEXT)}:
        return f"a {model_type} has an encoder and a decoder", "choose a decoder-only model"
    if model_type in causal and not _table(_MASKED).get(model_type, "").endswith("ForMaskedLM"):
        return None
    configs = _table(_CONFIGS)
    if not configs or not causal:
        return None  # a release whose tables are elsewhere: transformers reports it when it loads the model
    installed = f"the installed transformers {version('transformers')}"
    if model_type not in configs:
        rule = f"{installed} has no model_type {model_type}"
        if has_own_code:
            return f"{rule}, and the code in its folder (auto_map) is not run", "choose a model that transformers has"
        return rule, "correct model_type in its config.json, install a release that has it, or choose another model"
    alike = [name for name, config in configs.items() if config == configs[model_type]]
    if not any(name in causal for name in alike):
        return f"{installed} has no causal language model of the type {model_type}", "choose a causal language model"
    if model_type in causal and not is_decoder:
        rule = f"a {model_type} is an encoder, whose tokens see those after them"
        return rule, "choose a causal language model"
    return None


def attends_by_itself(model_type: str) -> bool:
    """Return whether models of this type compute attention themselves, and not by a function that can be replaced."""
    text = _source(model_type)
    return re.search(r"^class \w*Attention", text, re.MULTILINE) is not None and "ALL_ATTENTION_FUNCTIONS" not in text


def may_have_state(model_type: str) -> bool:
    """Return whether models of this type may have layers whose state passes from token to token."""
    return re.search("conv_state|recurrent_state|rnn_state", _source(model_type)) is not None


@cache
def linear_layers(model_type: str) -> frozenset[str]:
    """Return the names that linear layers have in the models of this type, or may have; none if they are not known."""
    tree = ast.parse(_source(model_type))
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    makers = {node.name for node in classes if any(_ends_in_linear(base) for base in node.bases)}
    return frozenset(_assigned_linear(tree, makers))


def _assigned_linear(tree: ast.Module, makers: set[str]) -> Iterator[str]:
    """Yield NAME of each ``self.NAME = …`` whose value calls ``Linear``, or a class derived from it."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign):
            continue
        calls = [call.func for call in ast.walk(node.value) if isinstance(call, ast.Call)]
        if any(_ends_in_linear(call) or (isinstance(call, ast.Name) and call.id in makers) for call in calls):
            yield from (target.attr for target in node.targets if isinstance(target, ast.Attribute))


def _ends_in_linear(node: ast.expr) -> bool:
    return ast.unparse(node).endswith("Linear")


@cache
def _source(model_type: str) -> str:
    """Return the file that defines the causal language model of this type; empty if it is not there."""
    model_type = READ_AS.get(model_type, model_type)
    folder = _models()
    name = _table(_CAUSAL).get(model_type)
    if folder is None or name is None:
        return ""
    module = _table(_MODULES).get(model_type, model_type.replace("-", "_"))
    file = folder / module / f"modeling_{module}.py"
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    return text if f"\nclass {name}(" in text else ""


@cache
def _table(name: str) -> dict[str, str]:
    """Return a table of ``models/auto``, with the entries added after its definition; empty if it is not there."""
    table = dict[str, str]()
    for text in _sources():
        for match in re.finditer(rf"^{name}(?: = OrderedDict|\.update)\(\n(.*?)\n\)", text, re.MULTILINE | re.DOTALL):
            table |= dict(ast.literal_eval(match[1].strip()))
    return table


@cache
def _sources() -> tuple[str, ...]:
    folder = _models()
    names = ("auto_mappings", "configuration_auto", "modeling_auto")
    files = [] if folder is None else [folder / "auto" / f"{name}.py" for name in names]
    return tuple(file.read_text(encoding="utf-8") for file in files if file.is_file())


def _models() -> Path | None:
    spec = find_spec("transformers")  # finds, and does not import
    return None if spec is None or spec.origin is None else Path(spec.origin).parent / "models"


# Types for text and images that are loaded whole, with the vision tower: the files of families/vision.
WITH_IMAGES = tuple(file.name for file in iter_modules(vision.__path__))
_READER = "PytorchStreamReader"  # begins torch's message about a broken pytorch_model.bin
_LISTED = 3  # names of tensors in a message


def read_config(path: str) -> PretrainedConfig:
    """Return the configuration of a folder, or of a name on the hub.

    A type that transformers does not know, but that has the layers of a type that it knows (``READ_AS``), is read as
    the latter. Pass the result to ``from_pretrained`` as ``config``.
    """
    from transformers import AutoConfig, PretrainedConfig  # slow to import

    values, _ = PretrainedConfig.get_config_dict(path)
    kind = READ_AS.get(str(values.get("model_type")))
    if kind is None:
        config: PretrainedConfig = AutoConfig.from_pretrained(path)
        return config
    # auto_map names code in the folder, which is not run.
    settings = {name: value for name, value in values.items() if name not in ("auto_map", "model_type")}
    return AutoConfig.for_model(kind, **settings)


def read_model(path: str, config: PretrainedConfig, dtype: torch.dtype, attn_implementation: str) -> PreTrainedModel:
    """Return the causal language model of a folder, or of a name on the hub, with every weight from its files.

    transformers fills tensors that the files lack with random values. ``config`` is the result of ``read_config``.

    Raises:
        ValueError: The files lack tensors that the configuration asks for, hold some of another shape, or cannot be
            read. The message names the first ones.
    """
    from safetensors import SafetensorError

    again = "copy or download the folder again"
    try:
        loaded: Any = class_of(config).from_pretrained(  # a pair, which its annotation does not say
            path,
            config=config,
            dtype=dtype,
            attn_implementation=attention_of(config, attn_implementation),
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
    report: dict[str, Any] = loaded[1]
    if missing := sorted(report["missing_keys"]):
        raise ValueError(
            f"the model {path}: its files lack {_listed(missing)}, which its config.json asks for; {again}"
        )
    if mismatched := sorted(report["mismatched_keys"]):
        shapes = [f"{name} ({list(there)}, not {list(asked)})" for name, there, asked in mismatched]
        raise ValueError(
            f"the model {path}: its config.json asks for other shapes than its files have, of {_listed(shapes)}; "
            f"{again}"
        )
    choose_experts(model)
    return model


def class_of(config: PretrainedConfig) -> Any:
    """Return the class of transformers that loads this model for training and generation."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText  # slow to import

    return AutoModelForImageTextToText if config.model_type in WITH_IMAGES else AutoModelForCausalLM


def attention_of(config: PretrainedConfig, text: str) -> str | dict[str, str]:
    """Return the attention of each part of a model: ``text`` for its language part, torch's own for a vision tower."""
    return {"text_config": text, "vision_config": "sdpa"} if config.model_type in WITH_IMAGES else text


def choose_experts(model: PreTrainedModel) -> None:
    """Compute experts one by one if torch's grouped product refuses their weights, whose rows are 16 bytes there.

    In bfloat16, where training may compute, that is 8 numbers. A loop over the experts takes any width.
    """
    shapes = [weight.shape[1:] for name, weight in model.named_parameters() if ".experts." in name and weight.ndim == 3]
    if any(size % 8 for shape in shapes for size in shape):
        model.set_experts_implementation("eager")


def _listed(names: list[str]) -> str:
    """Name tensors: all, or the first of many with their number."""
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return f"the tensor{'s' * (len(names) > 1)} {', '.join(names[:_LISTED])}{more}"


# The tokens that end an answer, whatever part of a model's folder names them.


_logger = logging.getLogger(__name__)


def end_token_ids(model: str) -> frozenset[int]:
    """Return the tokens that end an answer of the model in a folder, or of a name on the hub.

    A base model may name one in its configuration that its tokenizer does not end turns with, so they are all that any
    of ``config.json``, ``generation_config.json``, the tokenizer and its chat template name. It is logged if these are
    more than the configuration for generation has.
    """
    from transformers import GenerationConfig  # slow to import

    config = read_config(model)
    origins = {"config.json": _ids(config.get_text_config().eos_token_id) | _ids(getattr(config, "eos_token_id", None))}
    try:
        origins["generation_config.json"] = _ids(GenerationConfig.from_pretrained(model).eos_token_id)
    except OSError:
        origins["generation_config.json"] = set()
    for_generation = origins["generation_config.json"] or origins["config.json"]
    try:
        tokenizer = tokenizer_of_process(model)
    except InputError:  # an engine reads token ids
        tokenizer = None
    if tokenizer is not None:
        origins["the tokenizer"] = _ids(tokenizer.eos_token_id)
        name = end_of_turn(tokenizer).strip()
        origins["the chat template"] = _ids(tokenizer.convert_tokens_to_ids([name]) if name else None)
    all_ids = frozenset().union(*origins.values())
    if tokenizer is not None and all_ids != for_generation:
        texts = []
        for token in sorted(all_ids):
            sources = [source for source, ids in origins.items() if token in ids]
            texts.append(f"{token} {tokenizer.convert_ids_to_tokens(token)!r} of {' and '.join(sources)}")
        _logger.warning("note: --hf-checkpoint %s: answers end at any of the tokens %s", model, ", ".join(texts))
    return all_ids


def _ids(configured: int | Iterable[int] | None) -> set[int]:
    """Return the ids in a configuration's ``eos_token_id``, which holds one id, several, or none."""
    if configured is None:
        return set()
    return {configured} if isinstance(configured, int) else set(configured)
