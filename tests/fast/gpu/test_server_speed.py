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


def test_all_weights_are_sent(tmp_path):
    model = write_model(tmp_path, small=True)
    chunks = server_speed.chunks_of(model)
    names = {name for chunk in chunks for name in chunk.tensors}
    assert "model.layers.1.mlp.down_proj.weight" in names
    assert all(tensor.dtype == torch.bfloat16 for chunk in chunks for tensor in chunk.tensors.values())


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


def test_what_was_measured_before_a_failure_is_kept(tmp_path, monkeypatch):
    async def measure(model, output, device, new_tokens, report):
        report["updates"].append({"mode": "ipc"})
        raise RuntimeError("the server ended")

    monkeypatch.setattr(server_speed, "measure", measure)
    with pytest.raises(RuntimeError, match="the server ended"):
        server_speed.main(tmp_path, tmp_path / "server-speed.json", "cpu")
    assert json.loads((tmp_path / "server-speed.json").read_text())["updates"] == [{"mode": "ipc"}]
