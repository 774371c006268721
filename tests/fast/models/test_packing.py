"""Which models transformers can read is known without importing it."""

from __future__ import annotations

from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from miles.models.packing import WITH_TEXT_MODEL, why_not_generated, why_not_trained
from miles.models.reading import WITH_IMAGES


def test_a_model_for_images_is_refused_unless_transformers_has_its_text_model() -> None:
    assert set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) >= set(WITH_TEXT_MODEL)
    kinds = set(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES) - set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    assert set(WITH_IMAGES) < kinds
    for kind in kinds - set(WITH_IMAGES):
        config = {"model_type": kind, "vision_config": {}, "text_config": {"model_type": "qwen3"}}
        for fault in (why_not_trained(config), why_not_generated(config)):
            assert fault is not None and fault[0].startswith(f"a {kind} is a vision-language model")
