"""GLM-4.7-Flash: DeepSeek-V3's layers; the config lists which of them have experts."""

from miles.models.base import Config, Shape
from miles.models.families.deepseek_v3 import DeepseekV3


class Glm4MoeLite(DeepseekV3):
    """Latent attention and sigmoid routing."""

    def shape(self, config: Config) -> Shape:
        """Return the fields of Megatron's ``MLATransformerConfig`` that ``config`` determines."""
        return super().shape(config) | {"layernorm_epsilon": config.get("rms_norm_eps", 1e-5)}

    def has_experts(self, config: Config) -> list[int]:
        """Return a 1 for each layer with experts, and a 0 for each dense one; without a list, the first is dense."""
        layers = config["num_hidden_layers"]
        kinds = config.get("mlp_layer_types") or ["dense", *["sparse"] * (layers - 1)]
        return [int(kind == "sparse") for kind in kinds]


CONVERTED = (Glm4MoeLite("glm4_moe_lite"),)
