"""Weight decay applies to matrices, not to norms and biases."""

from tiny_kinds import config_of
from transformers import AutoModelForCausalLM

from miles.config.optimizer import OptimizerArguments
from miles.training.fsdp.runner import ShardedOptimizer


def test_biases_of_experts_are_not_decayed():
    """gpt_oss has the biases of a layer in one tensor of two dimensions."""
    model = AutoModelForCausalLM.from_config(config_of("gpt_oss"))
    groups = ShardedOptimizer(model, OptimizerArguments(weight_decay=0.1), total_steps=1).adam.param_groups
    rates = {id(parameter): group["weight_decay"] for group in groups for parameter in group["params"]}
    by_name = {name: rates[id(parameter)] for name, parameter in model.named_parameters()}
    assert by_name["model.layers.0.mlp.experts.gate_up_proj"] == 0.1
    assert by_name["model.layers.0.mlp.experts.gate_up_proj_bias"] == 0.0
    plain = ("bias", "norm.weight", "layernorm.weight", "sinks")
    assert {name for name, rate in by_name.items() if rate == 0.0} == {name for name in by_name if name.endswith(plain)}
