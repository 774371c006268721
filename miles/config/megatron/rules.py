"""Check a run of the Megatron backend: sizes that fit ranks and model, and only correctly computed settings."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeAlias

from miles.base.flags import Errors, changed, count, flag_name, refuse
from miles.config.components import TRAIN_BACKENDS, names_with
from miles.config.lora import LoraArguments, check_adapted_layers, check_adapter_flags, check_adapter_with_model
from miles.config.megatron.fields import MODEL_FLAGS, TABLE, MegatronField, megatron_fields
from miles.config.megatron.settings import MegatronArguments
from miles.config.model import ModelArguments, local_config, readable_config, reading_config
from miles.config.notes import MEMORY, NO_EFFECT, OTHER_PART, READ_AS, SAME, Note, note_on, written
from miles.config.settings import Settings
from miles.models.base import EXPERT_FIELDS, HEADS_IN_CONFIG, LAYER_FIELDS
from miles.models.registry import (
    BRIDGED,
    CONVERTED,
    FAMILIES,
    check_bridged,
    common_shape,
    megatron_shape,
    vocabulary_shape,
)

# Check the flags that set fields of Megatron's own dataclasses.
#
# The Hugging Face config determines the shape of the model, and this backend sets some fields itself: a flag may repeat
# their values, as launch scripts do, and is an error if it states something else. The fields in ``TRIED`` are passed
# on. All others are refused: megatron-core has them, but training with them has not been shown to be correct here.


FP32_EPSILON = 2.0**-23

Overrides: TypeAlias = tuple[tuple[str, Any], ...]  # name and value of each field that a flag sets

FIXED: dict[str, tuple[Any, str]] = {name: (value, why) for name, (value, why) in TABLE["fixed"].items()}
TRIED: tuple[str, ...] = tuple(TABLE["tried"])
# Values that ask for nothing, and that scripts give for models which do not have the setting.
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {name: tuple(values) for name, values in TABLE["neutral"].items()}
# Fields of layers that no family of this backend has. --train-backend fsdp reads them from the config.
OF_OTHER_MODELS: set[str] = {*TABLE["of_other_models"]}
# The fields that a model's config determines: they can be checked only after it has been read.
SHAPE_FIELDS = {*OF_OTHER_MODELS, *LAYER_FIELDS, *EXPERT_FIELDS, *TABLE["of_model"]}
# Fields whose every value gives the same results: heading of the note, and reason.
FREE_FIELDS = {name: (row["heading"], row["why"]) for row in TABLE["free"] for name in row["fields"]}


def check_overrides(overrides: Overrides, shape: dict[str, Any] | None, flags: dict[str, str], errors: Errors) -> None:
    """Check the fields of Megatron's dataclasses that flags set.

    Args:
        overrides: The fields, by name.
        shape: The model's shape in Megatron's terms; None if its config is not known yet.
        flags: The flag of each field.
        errors: Collects what contradicts the model or the backend.
    """
    for name, value in overrides:
        flag = flags[name]
        text = written(flag, value)
        if shape is not None and name in shape:
            stated = _by_layer(value, shape[name]) if name == "moe_layer_freq" else value
            if not repeats(stated, shape[name]):
                errors.add(contradiction(name, value, flag, shape))
        elif name in FIXED:
            fixed, why = FIXED[name]
            if not repeats(value, fixed):
                errors.add(f"{text}: contradicts --train-backend megatron: {why}; drop it")
        elif name in TRIED or asks_for_nothing(name, value) or (shape is None and name in SHAPE_FIELDS):
            continue
        elif shape is not None and name in SHAPE_FIELDS:
            errors.add(contradiction(name, value, flag, shape))
        else:
            errors.add(f"{text}: {refusal_of(name)}; drop it")


def contradiction(name: str, value: Any, flag: str, shape: dict[str, Any]) -> str:
    """Return the error of a field that states something else than the model's config.

    Args:
        name: The field.
        value: Its value; a switch has True or False.
        flag: Its flag.
        shape: The model's shape in Megatron's terms.
    """
    neutral = NEUTRAL_VALUES.get(name, (None,))[0]
    if isinstance(value, bool):
        claim = f"states the opposite of {flag}" if name in shape else f"describes a model without {flag}"
    elif shape.get(name, neutral) is None:
        claim = f"describes a model without {flag}"
    else:
        claim = f"gives {written(flag, shape.get(name, neutral))}"
    return f"{written(flag, value)}: contradicts --hf-checkpoint, whose config.json {claim}; drop it"


_UNTESTED = "megatron-core has this setting, but training with it has not been tested here, so it is not accepted"
_LOW_PRECISION = "training in 8 or 4 bits is not part of this version, which has bf16 and fp32"


def asks_for_nothing(name: str, value: Any) -> bool:
    """Return whether a value asks for no more than a model without this setting computes."""
    return value in NEUTRAL_VALUES.get(name, ())


def refusal_of(name: str) -> str:
    """Say why a field that would change the result is refused."""
    return _LOW_PRECISION if name.startswith(("fp8", "fp4")) else _UNTESTED


def repeats(value: Any, wanted: Any) -> bool:
    """Return whether a flag states the value that holds anyway; lists of equal entries may be written as one entry.

    A float that a config has rounded to fp32, such as 9.999999747378752e-06, is the number that was rounded.
    """
    entry = value[0] if isinstance(value, list) and not isinstance(wanted, list) and len(value) == 1 else value
    if isinstance(wanted, list) and len(set(map(str, wanted))) == 1 and entry in (wanted[0], [wanted[0]]):
        return True
    if isinstance(entry, float) and isinstance(wanted, float):
        return math.isclose(entry, wanted, rel_tol=FP32_EPSILON)
    return bool(entry == wanted)


def _by_layer(value: Any, wanted: Any) -> Any:
    """Write ``--moe-layer-freq N``, experts in every Nth layer, as one entry per layer."""
    step = value[0] if isinstance(value, list) and len(value) == 1 else value
    if isinstance(step, int) and step > 0 and isinstance(wanted, list):
        return [int(layer % step == 0) for layer in range(len(wanted))]
    return value


ConfigAndShape: TypeAlias = tuple[dict[str, Any], dict[str, Any]]  # of Hugging Face, and in Megatron's terms

SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)
LOSSES = ("moe_aux_loss_coeff", "moe_z_loss_coeff", "enable_mtp_training")  # of the model's layers
BALANCED = ("aux_loss", "seq_aux_loss", "none")
NOT_BALANCED = {
    "global_aux_loss": "its counts accumulate over micro-batches, so the loss depends on their order",
    "sinkhorn": "it routes differently in training than in the engine",
}
# Releases that megatron/bridge.py was tested with. Megatron-Bridge imports the last, whose kernels are not used.
BRIDGE_RELEASES = {
    "megatron-bridge": "0.6.",
    "megatron-core": "0.19.",
    "transformer-engine-torch": "2.",
}


def check_megatron(settings: Settings, errors: Errors) -> None:
    """Check the flags of Megatron against each other, and against the model if its config is on this machine.

    How the sizes divide the trainer's ranks is checked by ``ParallelDims``.
    """
    sizes, overrides = settings.megatron, settings.megatron_overrides
    if not settings.backend.reads_megatron_flags:
        for name in changed(sizes, LOSSES):
            rule = "asks for a loss of the model's layers, which this backend does not compute"
            what_to_do = f"use --train-backend {names_with(TRAIN_BACKENDS, 'reads_megatron_flags')}, or drop it"
            errors.refuse(name, getattr(sizes, name), rule, what_to_do)
        return
    config = readable_config(settings.model)
    if config is None or config.get("model_type") in FAMILIES:  # another model is refused, with no word on the bridge
        with errors.catching():
            check_bridge(sizes)
    _check_offload(settings, sizes, errors)
    _check_auxiliary_losses(sizes, errors)
    _check_recomputation(settings.training.gradient_checkpointing, dict(overrides), errors)
    if settings.loss.has_critic and sizes.has_auxiliary_loss:
        rule = "needs a critic, whose experts would be balanced by no loss"
        what_to_do = "drop the router losses and --enable-mtp-training, or use --advantage-estimator grpo"
        errors.refuse("advantage_estimator", settings.loss.advantage_estimator, rule, what_to_do)
    check_adapter_flags(settings.lora, sizes, errors)
    with errors.catching():  # megatron_shape() raises at the first setting that is not computed
        _check_local_models(settings.model, sizes, overrides, settings.lora, errors)
        return
    check_overrides(overrides, None, _flags(), errors)  # what does not depend on the model


def _check_offload(settings: Settings, sizes: MegatronArguments, errors: Errors) -> None:
    """Check the flags of an optimizer in host memory. Megatron updates no fp32 weight that is left on the GPU."""
    fraction = sizes.optimizer_offload_fraction
    if fraction == 1 or not errors.none_about("optimizer_offload_fraction"):
        return
    reasons = {
        "--fp32": not settings.training.bf16,
        "--lora-rank": settings.lora.trains_adapter,
        "a critic": settings.loss.has_critic,
    }
    with_fp32 = next((reason for reason, applies in reasons.items() if applies), None)
    if with_fp32 is not None:
        rule = f"with {with_fp32}: megatron-core does not update fp32 weights that stay on the GPU"
        errors.refuse("optimizer_offload_fraction", fraction, rule, "drop it, so that all state is in host memory")


def _check_auxiliary_losses(sizes: MegatronArguments, errors: Errors) -> None:
    """Check the losses of the routers and of multi-token prediction, as far as they do not depend on the model."""
    kind = sizes.moe_router_load_balancing_type
    if kind not in BALANCED:
        rule = NOT_BALANCED.get(kind, "there is no such loss")
        errors.refuse("moe_router_load_balancing_type", kind, rule, f"give one of {', '.join(BALANCED)}")
    elif kind == "none" and sizes.moe_aux_loss_coeff:
        rule = "contradicts --moe-router-load-balancing-type none"
        errors.refuse("moe_aux_loss_coeff", sizes.moe_aux_loss_coeff, rule, "give aux_loss, or drop it")
    if sizes.enable_mtp_training:
        errors.require("mtp_num_layers", sizes.mtp_num_layers, "--enable-mtp-training trains that many heads")


def _check_recomputation(gradient_checkpointing: bool, overrides: dict[str, Any], errors: Errors) -> None:
    if gradient_checkpointing or "recompute_granularity" in overrides:
        return
    for name in ("recompute_method", "recompute_num_layers"):
        if name in overrides:
            what_to_do = f"add --recompute-granularity full or --gradient-checkpointing, or drop {flag_name(name)}"
            errors.refuse(name, overrides[name], "would be ignored without --recompute-granularity", what_to_do)


def _check_local_models(
    model: ModelArguments, sizes: MegatronArguments, overrides: Overrides, lora: LoraArguments, errors: Errors
) -> None:
    """Check the fields that the configs on this machine determine; the backend checks the others at run time."""
    config = local_config(model, "hf_checkpoint")
    left_to_the_backend: Collection[Any] = ()
    if config is not None and sizes.uses_bridge:
        with reading_config("hf_checkpoint", model.hf_checkpoint):
            check_bridged(config)
        left_to_the_backend = BRIDGED  # Megatron-Bridge determines their shapes
    if config is None or config.get("model_type") in left_to_the_backend:
        check_overrides(overrides, None, _flags(), errors)
        return
    with reading_config("hf_checkpoint", model.hf_checkpoint):
        shape = megatron_shape(config)
        check_with_model(sizes, overrides, config, shape, errors)
        check_adapter_with_model(lora, config["model_type"], shape, errors)
        check_adapted_layers(lora, config, shape, errors)
    for field in ("ref_load", "opd_teacher_load"):
        path, other = getattr(model, field), local_config(model, field)
        if other is not None and other.get("model_type") not in left_to_the_backend:
            with reading_config(field, path):
                check_same_shape(field, path, (other, megatron_shape(other)), (config, shape), errors)


def check_with_model(
    sizes: MegatronArguments, overrides: Overrides, config: dict[str, Any], shape: dict[str, Any], errors: Errors
) -> None:
    """Check that the sizes fit the model, and that no flag contradicts it.

    Args:
        sizes: How ranks share the model.
        overrides: The fields of Megatron's dataclasses that flags set.
        config: The model's Hugging Face config.
        shape: The same in Megatron's terms.
        errors: Collects what does not fit.
    """
    numbers = [size for name in SIZES if (size := getattr(sizes, name)) is not None]
    if min(numbers) >= 1:  # a smaller one is refused for itself
        _check_sizes(sizes, shape, errors)
    _check_heads(sizes, config, errors)
    if shape.get("moe_router_score_function") == "sigmoid":
        _check_sigmoid_model(sizes, config, errors)
    if "num_moe_experts" not in shape:
        for name in changed(sizes, ("moe_aux_loss_coeff", "moe_z_loss_coeff")):
            rule = "asks for a loss of a model without experts"
            errors.refuse(name, getattr(sizes, name), rule, "train a model that has them, or drop it")
    check_overrides(overrides, {**shape, **vocabulary_shape(config)}, _flags(), errors)


def check_same_shape(
    field: str, path: str | None, other: ConfigAndShape, policy: ConfigAndShape, errors: Errors
) -> None:
    """Check that a reference model or a teacher has the shape of the policy.

    Args:
        field: The flag that names it.
        path: The value of the flag.
        other: Config and shape of the model.
        policy: Config and shape of the policy.
        errors: Collects the differences.
    """
    actual, wanted = ({**shape, **vocabulary_shape(config)} for config, shape in (other, policy))
    for name, value in wanted.items():
        if actual.get(name) != value:
            rule = f"its config gives {name} {actual.get(name)}, --hf-checkpoint gives {value}"
            what_to_do = "give a model of the same shape, or use --train-backend fsdp"
            errors.refuse(field, path, rule, what_to_do)


def _flags() -> dict[str, str]:
    return {field.name: field.flag for field in (*MODEL_FLAGS, *megatron_fields().values())}


def _check_sizes(sizes: MegatronArguments, shape: dict[str, Any], errors: Errors) -> None:
    """Check that the sizes divide the model without a remainder."""
    tp = sizes.tensor_model_parallel_size
    heads, groups, layers = shape["num_attention_heads"], shape["num_query_groups"], shape["num_layers"]
    if heads % tp or shape["ffn_hidden_size"] % tp:
        rule = f"must divide the model's {heads} heads and {shape['ffn_hidden_size']} MLP rows"
        errors.refuse("tensor_model_parallel_size", tp, rule, "give a common divisor")
    if groups % tp:
        rule = f"must divide the model's {groups} key and value heads"
        errors.refuse("tensor_model_parallel_size", tp, rule, f"give a divisor of {groups}")
    shared = shape.get("moe_shared_expert_intermediate_size", 0)
    if shared % tp and errors.none_about("tensor_model_parallel_size"):
        rule = f"must divide the {shared} rows of the model's shared experts"
        errors.refuse("tensor_model_parallel_size", tp, rule, "give a common divisor")
    _check_stages(sizes, layers, errors)
    _check_interleaving(sizes, layers, errors)
    if "num_moe_experts" in shape:
        _check_experts(sizes, shape["num_moe_experts"], errors)


STAGES = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
INTERLEAVED = "num_layers_per_virtual_pipeline_stage"


def _check_stages(sizes: MegatronArguments, layers: int, errors: Errors) -> None:
    """Check that every pipeline stage has a layer, and that stages without a number of their own share the rest."""
    pp = sizes.pipeline_model_parallel_size
    counts = {name: value for name in STAGES if (value := getattr(sizes, name)) is not None and errors.none_about(name)}
    if not counts or pp == 1:
        if layers % pp:
            rule = f"must divide the model's {layers} layers"
            what_to_do = f"give a divisor of {layers}, or name the layers of the last stage with {flag_name(STAGES[1])}"
            errors.refuse("pipeline_model_parallel_size", pp, rule, what_to_do)
        return
    rest, stages = layers - sum(counts.values()), pp - len(counts)
    if (rest > 0) == (stages > 0) and rest >= 0 and rest % max(stages, 1) == 0:
        return
    name = next(iter(counts))
    left = f"{count(max(rest, 0), 'layer')} of {layers} for {count(stages, 'other stage')}"
    what_to_do = "give a number that leaves each of the others as many, and at least one"
    errors.refuse(name, counts[name], f"leaves {left} of --pipeline-model-parallel-size {pp}", what_to_do)


def _check_interleaving(sizes: MegatronArguments, layers: int, errors: Errors) -> None:
    """Check that the layers divide into equal parts, and that stages do not send each other two messages at once."""
    each, pp = sizes.num_layers_per_virtual_pipeline_stage, sizes.pipeline_model_parallel_size
    if each is None or pp == 1 or not errors.none_about(INTERLEAVED, "pipeline_model_parallel_size"):
        return
    if any(getattr(sizes, name) is not None for name in STAGES):
        rule = "divides the layers equally, and other flags name the layers of the first or the last stage"
        errors.refuse(INTERLEAVED, each, rule, f"drop it, or {' and '.join(map(flag_name, STAGES))}")
    elif layers % (pp * each):
        rule = f"{layers} layers in {pp} stages are no multiple of it per stage"
        errors.refuse(INTERLEAVED, each, rule, f"give a divisor of {layers // pp}")
    elif pp == 2 and sizes.chunks(layers) > 1:
        rule = "needs 3 pipeline stages: two would exchange several messages at once, which arrive in any order"
        errors.refuse(INTERLEAVED, each, rule, "give --pipeline-model-parallel-size 3 or more, or drop it")
    elif sizes.chunks(layers) > 1:
        untested = {
            "--mtp-num-layers": sizes.mtp_heads,
            "--megatron-to-hf-mode bridge": sizes.uses_bridge,
        }
        for name, is_set in untested.items():
            if is_set:
                errors.refuse(INTERLEAVED, each, f"was not tested with {name}", "drop one of the two")


def _check_experts(sizes: MegatronArguments, experts: int, errors: Errors) -> None:
    if experts % sizes.expert_model_parallel_size:
        rule, what_to_do = f"must divide the model's {experts} experts", f"give a divisor of {experts}"
        errors.refuse("expert_model_parallel_size", sizes.expert_model_parallel_size, rule, what_to_do)
    if sizes.tensor_model_parallel_size == 1:
        return
    if not sizes.sequence_parallel:
        rule = "for a model with experts needs --sequence-parallel, or megatron-core refuses to train"
        errors.refuse("tensor_model_parallel_size", sizes.tensor_model_parallel_size, rule, "add --sequence-parallel")
    elif sizes.expert_model_parallel_size == 1 and sizes.expert_tensor_parallel_size == 1:
        rule = (
            "with --expert-model-parallel-size 1 and --sequence-parallel: megatron-core 0.16.1 computes wrong gradients"
        )
        what_to_do = "drop it, or divide the experts with --expert-model-parallel-size"
        errors.refuse("expert_tensor_parallel_size", 1, rule, what_to_do)


def _check_sigmoid_model(sizes: MegatronArguments, config: dict[str, Any], errors: Errors) -> None:
    """Refuse the losses inside the model that were not compared for routing by sigmoid scores."""
    kind = config.get("model_type")
    if sizes.mtp_heads and errors.none_about("mtp_num_layers"):
        rule = f"the heads of a {kind} have another layout in checkpoints than those that are converted"
        errors.refuse("mtp_num_layers", sizes.mtp_heads, rule, "drop it, and --enable-mtp-training")
    for name in ("moe_aux_loss_coeff", "moe_z_loss_coeff"):
        if getattr(sizes, name):
            rule = f"this loss was not tested for a {kind}, whose biases balance its experts"
            errors.refuse(name, getattr(sizes, name), rule, "drop it")


def _check_heads(sizes: MegatronArguments, config: dict[str, Any], errors: Errors) -> None:
    """Check that the model can be trained with ``--mtp-num-layers`` heads."""
    heads = config.get(HEADS_IN_CONFIG) or 0
    if sizes.mtp_heads and heads not in (0, sizes.mtp_heads):
        rule = f"contradicts --hf-checkpoint, whose config.json gives {HEADS_IN_CONFIG} {heads}"
        errors.refuse("mtp_num_layers", sizes.mtp_heads, rule, f"give {heads}")
    if sizes.mtp_heads and config.get("tie_word_embeddings") and sizes.pipeline_model_parallel_size > 1:
        rule = (
            f"with --pipeline-model-parallel-size {sizes.pipeline_model_parallel_size}: megatron-core has three copies "
            "of a tied embedding then, and updates only two of them"
        )
        errors.refuse("mtp_num_layers", sizes.mtp_heads, rule, "give --pipeline-model-parallel-size 1")


def fault_of_bridge() -> str | None:
    """Return why Megatron-Bridge cannot be used: it is missing, or no tested release. None if it can."""
    for package, release in BRIDGE_RELEASES.items():
        try:
            installed = version(package)
        except PackageNotFoundError:
            return f"needs {package}, which is not installed"
        if not installed.startswith(release):
            return f"{package} {installed} is installed, and only {release}* was tested"
    return None


def check_bridge(sizes: MegatronArguments) -> None:
    """Raise ``ValueError`` naming the flag if Megatron-Bridge is chosen and cannot be used."""
    if not sizes.uses_bridge:
        return
    if (fault := fault_of_bridge()) is not None:
        families = ", ".join(CONVERTED)
        what_to_do = f"install what docs/parallelism.md names, use raw with a {families}, or give --train-backend fsdp"
        refuse("megatron_to_hf_mode", "bridge", fault, what_to_do)
    if sizes.mtp_heads:
        rule = "with --megatron-to-hf-mode bridge: the names of the heads in a checkpoint were not tested"
        refuse("mtp_num_layers", sizes.mtp_heads, rule, "drop it")


# Read the flags of Megatron's own configuration as launch scripts mean them, before they are checked.

# Fields that Megatron's latent attention does not read, and why.
NOT_LATENT = {
    "kv_channels": "latent attention has its own widths",
    "add_qkv_bias": "latent attention has no bias on queries, keys and values",
}
_MSCALES = ("mscale", "mscale_all_dim")
# Fields of Megatron's MLATransformerConfig, which it does not build for other attention.
OF_LATENT_ROPE = (*_MSCALES, "rotary_scaling_factor", "original_max_position_embeddings", "beta_fast", "beta_slow")
_RECOMPUTE = ("recompute_granularity", "recompute_method", "recompute_num_layers")


@dataclass(frozen=True)
class FieldVerdict:
    """Say what becomes of a field that a flag sets.

    Attributes:
        value: The value that is passed on; None if the flag is dropped.
        note: Why it was dropped or replaced; None if it is passed on unchanged.
    """

    value: Any = None
    note: Note | None = None


def normalize_megatron(settings: Settings, errors: Errors) -> tuple[Settings, list[Note]]:
    """Drop the fields that change nothing; drop all of them if the backend does not read them."""
    if not settings.megatron_overrides:
        return settings, []
    fields = {field.name: field for field in (*MODEL_FLAGS, *megatron_fields().values())}
    overrides = dict(settings.megatron_overrides)
    shape = _shape(settings) or {}
    pairs, notes = list[tuple[str, Any]](), list[Note]()
    if not settings.backend.reads_megatron_flags and "recompute_granularity" in overrides:
        text = written(fields["recompute_granularity"].flag, overrides.pop("recompute_granularity"))
        notes.append(Note(READ_AS, text, "--gradient-checkpointing: every layer is recomputed"))
        settings = replace(settings, training=replace(settings.training, gradient_checkpointing=True))
    for name, value in overrides.items():
        if settings.backend.reads_megatron_flags:
            verdict = judge(fields[name], value, shape, overrides)
        else:
            verdict = _judge_without_megatron(fields[name], value, shape, overrides, errors)
        if verdict.note is not None:
            notes.append(verdict.note)
        if verdict.value is not None:
            pairs.append((name, verdict.value))
    return replace(settings, megatron_overrides=tuple(pairs)), notes


def judge(field: MegatronField, value: Any, shape: dict[str, Any], overrides: dict[str, Any]) -> FieldVerdict:
    """Judge a field under ``--train-backend megatron``.

    Args:
        field: The field.
        value: Its value.
        shape: The known part of the model's shape, in Megatron's terms.
        overrides: All fields that flags set.
    """
    name, text = field.name, written(field.flag, value)
    if name in FIXED and repeats(value, FIXED[name][0]) and name not in _RECOMPUTE:
        return FieldVerdict(value)
    if (why := _why_without_effect(name, shape, overrides)) is not None:
        return FieldVerdict(note=Note(NO_EFFECT, text, why))
    if name in shape:
        return FieldVerdict(value)
    if name in _RECOMPUTE:
        return _judge_recomputation(name, value, text, overrides)
    if name in FREE_FIELDS:
        heading, why = FREE_FIELDS[name]
        return FieldVerdict(note=Note(heading, text, why))
    waits_for_shape = name in SHAPE_FIELDS and not shape
    if name not in TRIED and name not in FIXED and not waits_for_shape and _asks_for_nothing(field, value):
        return FieldVerdict(note=Note(SAME, text, "the value that asks for nothing"))
    return FieldVerdict(value)


def _why_without_effect(name: str, shape: dict[str, Any], overrides: Mapping[str, Any]) -> str | None:
    """Return why Megatron's own layers do not read a field of this model; None if they do, or may."""
    if not shape:
        return None
    if not shape.get("multi_latent_attention"):
        if overrides.get("multi_latent_attention"):  # of a model whose attention only FSDP computes
            return None
        return "only latent attention reads it" if name in OF_LATENT_ROPE else None
    if name in NOT_LATENT:
        return NOT_LATENT[name]
    scales = shape.get("rope_type") != "rope" or overrides.get("rotary_scaling_factor", 1) != 1
    return "the rotary embedding is not scaled" if name in _MSCALES and not scales else None


def _asks_for_nothing(field: MegatronField, value: Any) -> bool:
    return value == field.default or asks_for_nothing(field.name, value)


def _judge_recomputation(name: str, value: Any, text: str, overrides: dict[str, Any]) -> FieldVerdict:
    """Recomputation changes no result: any kind of it recomputes whole layers, one by one."""
    wanted = FIXED[name][0]
    if "recompute_granularity" not in overrides and name != "recompute_granularity":
        return FieldVerdict(note=Note(NO_EFFECT, text, "without --recompute-granularity"))
    note = None if value == wanted else Note(MEMORY, text, "recomputation covers whole layers, one by one")
    return FieldVerdict(wanted, note)


def _judge_without_megatron(
    field: MegatronField, value: Any, shape: dict[str, Any], overrides: dict[str, Any], errors: Errors
) -> FieldVerdict:
    """Drop a field, or refuse it if it states something else than the model's config or changes the result."""
    text = written(field.flag, value)
    if (why := _why_without_effect(field.name, shape, overrides)) is not None:
        return FieldVerdict(note=Note(NO_EFFECT, text, why))
    if field.name in shape:
        contradicts = not repeats(value, shape[field.name])
    else:
        is_whole = "num_layers" in shape and "vocab_size" in shape  # of a family that Megatron trains too
        contradicts = is_whole and field.name in SHAPE_FIELDS and not _asks_for_nothing(field, value)
    if contradicts:
        errors.add(contradiction(field.name, value, field.flag, shape))
        return FieldVerdict()
    harmless = field.name in FREE_FIELDS or field.name in SHAPE_FIELDS or field.name in FIXED or field.name in TRIED
    if not harmless and not _asks_for_nothing(field, value):
        errors.add(f"{text}: {refusal_of(field.name)}; drop it")
        return FieldVerdict()
    return FieldVerdict(note=Note(OTHER_PART, text, "Megatron's, and --train-backend fsdp trains"))


def _shape(settings: Settings) -> dict[str, Any] | None:
    """Return the model's shape if its config is on this machine and its family is known."""
    try:
        config = local_config(settings.model, "hf_checkpoint")
        if config is None:
            return None
        if config.get("model_type") not in CONVERTED:
            return None if settings.backend.reads_megatron_flags else common_shape(config)
        return {**megatron_shape(config), **vocabulary_shape(config)}
    except (ValueError, KeyError, TypeError):
        return None  # the validator reports it


def normalize_converter(settings: Settings) -> tuple[Settings, list[Note]]:
    """Convert weights without Megatron-Bridge if it is not there, or an adapter is trained, and the family is known."""
    if not (settings.megatron.uses_bridge and settings.backend.reads_megatron_flags):
        return settings, []
    is_converted = (readable_config(settings.model) or {}).get("model_type") in CONVERTED
    if not is_converted or not (settings.lora.trains_adapter or fault_of_bridge()):
        return settings, []
    note = note_on(
        READ_AS, "megatron_to_hf_mode", "bridge", "raw: miles converts this family itself, to the same weights"
    )
    return replace(settings, megatron=replace(settings.megatron, megatron_to_hf_mode="raw")), [note]
