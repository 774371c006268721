"""GLM-4.5 to 4.7: Llama's layers, half of each head rotated, with sigmoid routing after the first ones."""

from miles.models.base import Binding, Config, Shape, check_sigmoid_router, sigmoid_experts, sigmoid_shape
from miles.models.families.llama import Llama


class Glm4Moe(Llama):
    """Llama's layout, with a router, experts and shared experts; biases and norms as the config states."""

    can_be_bridged = False

    def check(self, config: Config) -> None:
        """Raise ``ValueError`` for a setting of ``config`` that the layers do not compute."""
        super().check(config)
        check_sigmoid_router(config)

    def shape(self, config: Config) -> Shape:
        """Return the fields of Megatron's ``TransformerConfig`` that ``config`` determines."""
        layers, dense = config["num_hidden_layers"], config["first_k_dense_replace"]
        stated = {
            "add_qkv_bias": bool(config.get("attention_bias")),
            "qk_layernorm": bool(config.get("use_qk_norm")),
            "layernorm_epsilon": config.get("rms_norm_eps", 1e-5),
        }
        has_experts = [int(layer >= dense) for layer in range(layers)]
        return super().shape(config) | stated | sigmoid_shape(config, has_experts)

    def layer(self, shape: Shape) -> dict[str, Binding]:
        """Return the parameters of a decoder layer, dense or with experts, both names relative to it."""
        return super().layer(shape) | sigmoid_experts()


CONVERTED = (Glm4Moe("glm4_moe", has_qkv_bias=True, rotates_part=True),)
