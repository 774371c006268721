"""What tests/gpu measures of a server: with the torch engine, and (slow) with SGLang on CPU."""

import json

import pytest
import torch

from miles.engine.embedded.torch_engine import TorchEngine
from tests.gpu import server_speed
from tests.gpu.engine_checks import prompts
from tests.gpu.make_model import write_model


async def test_the_rate_of_an_engine(tiny_model):
    engine = TorchEngine(str(tiny_model), torch.float32, "cpu", 64)
    rates = await server_speed.rates(engine, vocab_size=100, new_tokens=2)
    await engine.close()
    assert list(rates) == ["1", "8", "64"] and all(rate > 0 for rate in rates.values())
    assert len(set(prompts(100, [5] * 8))) == 8, "no prompt is another one's prefix"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_server_is_measured(tmp_path):
    server_speed.main(write_model(tmp_path / "models", small=True), tmp_path / "server-speed.json", "cpu")
    report = json.loads((tmp_path / "server-speed.json").read_text())
    assert [(one["mode"], one["over"]) for one in report["updates"]] == [
        ("ipc", "the host"),
        ("disk", "the host"),
        ("broadcast", "gloo"),
    ]
    assert {one["bytes"] for one in report["updates"]} == {423680} and all(
        one["seconds"] > 0 for one in report["updates"]
    )
    assert report["tokens_per_second"].keys() == report["without_graphs"].keys() == {"1", "8", "64"}
    assert report["memory"] == {"not measured": "there is no GPU"}
