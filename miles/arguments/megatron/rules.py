"""What a run of the Megatron backend must satisfy: sizes that fit ranks and model, and nothing that it does not do."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeAlias

from miles.arguments.megatron.auxiliary import check_auxiliary, check_auxiliary_of_model
from miles.arguments.megatron.bridge import check_bridge
from miles.arguments.megatron.fields import MODEL_FLAGS, megatron_fields
from miles.arguments.megatron.overrides import check_overrides
from miles.arguments.megatron.settings import MegatronArguments
from miles.arguments.settings import Settings
from miles.flags import flag_name, refuse, refuse_ignored
from miles.model_families.registry import BRIDGED, check_bridged, megatron_shape, vocabulary_shape

ConfigAndShape: TypeAlias = tuple[dict[str, Any], dict[str, Any]]  # of Hugging Face, and in Megatron's words


def check_megatron(settings: Settings) -> None:
    """Against the ranks, the model where its config is in a local folder, and what this version computes rightly."""
    sizes = settings.megatron
    if settings.training.train_backend != "megatron":
        names = [field.name for field in fields(MegatronArguments)]
        refuse_ignored(sizes, names, "without --train-backend megatron", "add that flag")
        return
    check_bridge(sizes)
    _ = settings.dims  # raises where the sizes do not divide the ranks
    if sizes.sequence_parallel and sizes.tensor_model_parallel_size == 1:
        way_out = "add --tensor-model-parallel-size 2 or more, or drop it"
        refuse("sequence_parallel", True, "would be ignored without tensor parallel", way_out)
    check_auxiliary(sizes)
    _check_recomputation(settings)
    if settings.loss.has_critic and sizes.has_auxiliary_loss:
        rule = "needs a critic, whose experts would be balanced by no loss"
        way_out = "drop the router losses and --enable-mtp-training, or use --advantage-estimator grpo"
        refuse("advantage_estimator", settings.loss.advantage_estimator, rule, way_out)
    config = _local_config(settings.model.hf_checkpoint)
    if config is None:  # a name on a hub: the backend checks the rest when it has the config
        check_overrides(settings.megatron_overrides, None, _flags())
        return
    left_to_the_backend: Collection[Any] = ()
    if sizes.megatron_to_hf_mode == "bridge":
        check_bridged(config)
        left_to_the_backend = BRIDGED  # whose shapes Megatron-Bridge says
    if config.get("model_type") in left_to_the_backend:
        check_overrides(settings.megatron_overrides, None, _flags())
        return
    shape = megatron_shape(config)
    check_with_model(settings, config, shape)
    reference = _local_config(settings.model.ref_load)
    if reference is not None and reference.get("model_type") not in left_to_the_backend:
        check_reference(settings.model.ref_load, (reference, megatron_shape(reference)), (config, shape))


def _check_recomputation(settings: Settings) -> None:
    given = dict(settings.megatron_overrides)
    if settings.training.gradient_checkpointing or "recompute_granularity" in given:
        return
    for name in ("recompute_method", "recompute_num_layers"):
        if name in given:
            way_out = f"add --recompute-granularity full or --gradient-checkpointing, or drop {flag_name(name)}"
            refuse(name, given[name], "would be ignored without --recompute-granularity", way_out)


def check_with_model(settings: Settings, config: dict[str, Any], shape: dict[str, Any]) -> None:
    """The sizes fit the model of this Hugging Face config, whose shape in Megatron's words is ``shape``, and no flag
    contradicts it."""
    check_model(settings.megatron, config, shape)
    check_overrides(settings.megatron_overrides, {**shape, **vocabulary_shape(config)}, _flags())


def _flags() -> dict[str, str]:
    return {field.name: field.flag for field in (*MODEL_FLAGS, *megatron_fields().values())}


def check_reference(path: str | None, reference: ConfigAndShape, policy: ConfigAndShape) -> None:
    """The model at ``path`` is laid out as the policy is: what their configs determine is the same."""
    found, wanted = ({**shape, **vocabulary_shape(config)} for config, shape in (reference, policy))
    for name, value in wanted.items():
        if found.get(name) != value:
            rule = f"its config gives {name} {found.get(name)}, that of --hf-checkpoint {value}"
            refuse("ref_load", path, rule, "give a reference of the same shape, or use --train-backend fsdp")


def _local_config(path: str | None) -> dict[str, Any] | None:
    """The model's ``config.json``, where it can be read without a network."""
    file = Path(path) / "config.json" if path is not None else None
    return json.loads(file.read_text()) if file is not None and file.is_file() else None


def check_model(sizes: MegatronArguments, config: dict[str, Any], shape: dict[str, Any]) -> None:
    """The sizes cut the model of this Hugging Face config without a remainder."""
    tp, pp = sizes.tensor_model_parallel_size, sizes.pipeline_model_parallel_size
    if shape["num_attention_heads"] % tp or shape["ffn_hidden_size"] % tp:
        rule = f"must divide the model's {shape['num_attention_heads']} heads and {shape['ffn_hidden_size']} MLP rows"
        refuse("tensor_model_parallel_size", tp, rule, "give a common divisor")
    groups = shape["num_query_groups"]
    if groups % tp:
        rule = f"must divide the model's {groups} key and value heads"
        refuse("tensor_model_parallel_size", tp, rule, f"give a divisor of {groups}")
    if shape["num_layers"] % pp:
        rule = f"must divide the model's {shape['num_layers']} layers"
        refuse("pipeline_model_parallel_size", pp, rule, f"give a divisor of {shape['num_layers']}")
    check_auxiliary_of_model(sizes, config, has_experts="num_moe_experts" in shape)
    if "num_moe_experts" in shape:
        _check_experts(sizes, shape["num_moe_experts"])
    else:
        why = "by a model without experts"
        refuse_ignored(sizes, ["expert_model_parallel_size", "expert_tensor_parallel_size"], why, "drop it")


def _check_experts(sizes: MegatronArguments, experts: int) -> None:
    if experts % sizes.expert_model_parallel_size:
        rule = f"must divide the model's {experts} experts"
        refuse("expert_model_parallel_size", sizes.expert_model_parallel_size, rule, f"give a divisor of {experts}")
    if sizes.tensor_model_parallel_size == 1:
        return
    if not sizes.sequence_parallel:
        rule = "for a model with experts needs --sequence-parallel, or megatron-core refuses to train"
        refuse("tensor_model_parallel_size", sizes.tensor_model_parallel_size, rule, "add --sequence-parallel")
    if sizes.expert_model_parallel_size == 1 and sizes.expert_tensor_parallel_size == 1:
        rule = (
            "with --expert-model-parallel-size 1 and --sequence-parallel: megatron-core 0.16.1 computes wrong gradients"
        )
        refuse("expert_tensor_parallel_size", 1, rule, "drop it, or share the experts with the other flag")
