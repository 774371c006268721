"""Check a run of the Megatron backend: sizes that fit ranks and model, and only correctly computed settings."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeAlias

from miles.base.flags import Errors, changed, collect_errors, count, flag_name, refuse
from miles.config.components import TRAIN_BACKENDS, names_with, train_backend_spec
from miles.config.lora import LoraArguments, check_adapted_layers, check_adapter_flags, check_adapter_with_model
from miles.config.megatron.fields import MODEL_FLAGS, megatron_fields
from miles.config.megatron.overrides import Overrides, check_overrides
from miles.config.megatron.settings import MegatronArguments
from miles.config.model import ModelArguments, local_config, readable_config, reading_config
from miles.config.settings import Settings
from miles.models.base import HEADS_IN_CONFIG
from miles.models.registry import BRIDGED, CONVERTED, FAMILIES, check_bridged, megatron_shape, vocabulary_shape

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
# Releases that weights/bridge.py was tested with. Megatron-Bridge imports the last, whose kernels are not used.
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
    if not train_backend_spec(settings.training.train_backend).reads_megatron_flags:
        for name in changed(sizes, LOSSES):
            rule = "asks for a loss of the model's layers, which this backend does not compute"
            what_to_do = f"use --train-backend {names_with(TRAIN_BACKENDS, 'reads_megatron_flags')}, or drop it"
            errors.refuse(name, getattr(sizes, name), rule, what_to_do)
        return
    if _may_be_bridged(settings.model):
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
    if config is not None and sizes.megatron_to_hf_mode == "bridge":
        with reading_config("hf_checkpoint", model.hf_checkpoint):
            check_bridged(config)
        left_to_the_backend = BRIDGED  # Megatron-Bridge determines their shapes
    if config is None or config.get("model_type") in left_to_the_backend:
        check_overrides(overrides, None, _flags(), errors)
        return
    with reading_config("hf_checkpoint", model.hf_checkpoint):
        shape = megatron_shape(config)
        _check_with_model(sizes, overrides, config, shape, errors)
        check_adapter_with_model(lora, config["model_type"], shape, errors)
        check_adapted_layers(lora, config, shape, errors)
    for field in ("ref_load", "opd_teacher_load"):
        path, other = getattr(model, field), local_config(model, field)
        if other is not None and other.get("model_type") not in left_to_the_backend:
            with reading_config(field, path):
                _check_same_shape(field, path, (other, megatron_shape(other)), (config, shape), errors)


def check_with_model(
    sizes: MegatronArguments, overrides: Overrides, config: dict[str, Any], shape: dict[str, Any]
) -> None:
    """Check at run time that the sizes fit the model, and that no flag contradicts it.

    Args:
        sizes: How ranks share the model.
        overrides: The fields of Megatron's dataclasses that flags set.
        config: The model's Hugging Face config.
        shape: The same in Megatron's terms.

    Raises:
        FlagError: They do not fit.
    """
    with collect_errors() as errors:
        _check_with_model(sizes, overrides, config, shape, errors)


def check_same_shape(flag: str, path: str | None, other: ConfigAndShape, policy: ConfigAndShape) -> None:
    """Check at run time that a reference model or a teacher has the shape of the policy.

    Args:
        flag: The flag that names it.
        path: The value of the flag.
        other: Config and shape of the model.
        policy: Config and shape of the policy.

    Raises:
        FlagError: It has another shape.
    """
    with collect_errors() as errors:
        _check_same_shape(flag[2:].replace("-", "_"), path, other, policy, errors)


def _check_with_model(
    sizes: MegatronArguments, overrides: Overrides, config: dict[str, Any], shape: dict[str, Any], errors: Errors
) -> None:
    given = [size for name in SIZES if (size := getattr(sizes, name)) is not None]
    if min(given) >= 1:  # a smaller one is refused for itself
        _check_sizes(sizes, shape, errors)
    _check_heads(sizes, config, errors)
    if shape.get("moe_router_score_function") == "sigmoid":
        _check_sigmoid_model(sizes, config, errors)
    if "num_moe_experts" not in shape:
        for name in changed(sizes, ("moe_aux_loss_coeff", "moe_z_loss_coeff")):
            rule = "asks for a loss of a model without experts"
            errors.refuse(name, getattr(sizes, name), rule, "train a model that has them, or drop it")
    check_overrides(overrides, {**shape, **vocabulary_shape(config)}, _flags(), errors)


def _check_same_shape(
    field: str, path: str | None, other: ConfigAndShape, policy: ConfigAndShape, errors: Errors
) -> None:
    found, wanted = ({**shape, **vocabulary_shape(config)} for config, shape in (other, policy))
    for name, value in wanted.items():
        if found.get(name) != value:
            rule = f"its config gives {name} {found.get(name)}, --hf-checkpoint gives {value}"
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
    given = {name: value for name in STAGES if (value := getattr(sizes, name)) is not None and errors.none_about(name)}
    if not given or pp == 1:
        if layers % pp:
            rule = f"must divide the model's {layers} layers"
            what_to_do = f"give a divisor of {layers}, or name the layers of the last stage with {flag_name(STAGES[1])}"
            errors.refuse("pipeline_model_parallel_size", pp, rule, what_to_do)
        return
    rest, stages = layers - sum(given.values()), pp - len(given)
    if (rest > 0) == (stages > 0) and rest >= 0 and rest % max(stages, 1) == 0:
        return
    name = next(iter(given))
    left = f"{count(max(rest, 0), 'layer')} of {layers} for {count(stages, 'other stage')}"
    what_to_do = "give a number that leaves each of the others as many, and at least one"
    errors.refuse(name, given[name], f"leaves {left} of --pipeline-model-parallel-size {pp}", what_to_do)


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
            "--megatron-to-hf-mode bridge": sizes.megatron_to_hf_mode == "bridge",
        }
        for name, is_given in untested.items():
            if is_given:
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


def _may_be_bridged(model: ModelArguments) -> bool:
    """Return whether Megatron-Bridge may train this model. Another model is refused, with no word on the bridge."""
    config = readable_config(model)
    return config is None or config.get("model_type") in FAMILIES


def lacks_bridge() -> bool:
    """Return whether Megatron-Bridge is missing, or a release of it or of its dependencies was not tested."""
    with suppress(PackageNotFoundError):
        return not all(version(package).startswith(release) for package, release in BRIDGE_RELEASES.items())
    return True


def check_bridge(sizes: MegatronArguments) -> None:
    """Raise ``ValueError`` naming the flag if Megatron-Bridge is chosen and cannot be used."""
    if sizes.megatron_to_hf_mode != "bridge":
        return
    families = ", ".join(CONVERTED)
    what_to_do = f"install what docs/parallelism.md names, use raw with a {families}, or give --train-backend fsdp"
    for package, release in BRIDGE_RELEASES.items():
        try:
            installed = version(package)
        except PackageNotFoundError:
            refuse("megatron_to_hf_mode", "bridge", f"needs {package}, which is not installed", what_to_do)
        if not installed.startswith(release):
            rule = f"{package} {installed} is installed, and only {release}* was tested"
            refuse("megatron_to_hf_mode", "bridge", rule, what_to_do)
    if sizes.mtp_heads:
        rule = "with --megatron-to-hf-mode bridge: the names of the heads in a checkpoint were not tested"
        refuse("mtp_num_layers", sizes.mtp_heads, rule, "drop it")
