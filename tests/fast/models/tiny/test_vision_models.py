"""A tiny model of a family that reads images: its tower is small too, and its processor fits."""

import json
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText
from vision_models import KINDS, write_vision_model

from miles.config.inputs import _shapes, _trained
from miles.config.lora import LoraArguments
from miles.config.model import ModelArguments
from miles.config.training import TrainingArguments
from miles.models.images import load_processor
from miles.models.tiny import write_like

LARGER = dict(depth=6, num_hidden_layers=6, hidden_size=512, num_heads=8, num_attention_heads=8)
LARGER |= dict(intermediate_size=1024, fullatt_block_indexes=[2, 5], deepstack_visual_indexes=[1, 3])


@pytest.mark.parametrize("kind", [KINDS[0], *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS[1:])])
def test_it_reads_an_image_and_says_what_is_trained(kind: str, tmp_path) -> None:
    source = tmp_path / "source"
    write_vision_model(source, kind)
    config = json.loads((source / "config.json").read_text())
    tower = config["vision_config"]
    tower |= {name: value for name, value in LARGER.items() if name in tower}
    (source / "config.json").write_text(json.dumps(config))
    write_like(str(source), tmp_path / "tiny")

    model, processor = (
        AutoModelForImageTextToText.from_pretrained(tmp_path / "tiny"),
        load_processor(f"{tmp_path}/tiny"),
    )
    inputs = processor(text=f"{processor.image_token}?", images=Image.new("RGB", (16, 24)), return_tensors="pt")
    with torch.no_grad():
        assert model(**inputs).logits.isfinite().all()
    total, named = model.num_parameters(), dict(model.model.named_parameters())
    tower = total - sum(
        w.numel() for name, w in [*named.items(), ("language_model", model.lm_head.weight)] if "language_model" in name
    )
    assert 0 < tower < 400_000

    def trained(**fields) -> str:
        arguments = ModelArguments(hf_checkpoint=f"{tmp_path}/tiny")
        settings = SimpleNamespace(model=arguments, lora=LoraArguments(), training=TrainingArguments(**fields))
        return _trained(settings, _shapes(settings))

    assert trained() == f"{total:,} parameters, {tower:,} of them of the vision tower"
    frozen = f"{total - tower:,} parameters of the language part; {tower:,} of the vision tower stay unchanged"
    assert trained(freeze_vision_tower=True) == frozen
