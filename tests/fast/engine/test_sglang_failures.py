"""The real server, killed and stopped in the middle of its requests (``test_engine_failures`` has the fast cases)."""

import asyncio
import signal

import pytest
import torch
from transformers import AutoModelForCausalLM

from miles.engine.base import GenerationRequest, SamplingParams
from miles.weight_sync.chunks import in_chunks
from tests.fast.engine.sglang_servers import LocalServer, engine_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_failed_server_comes_back_with_the_current_weights(tiny_model, tmp_path, how):
    """Every request is answered once, by weights that the server was sent before it failed or after it came back."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).requires_grad_(False)
    for parameter in model.parameters():  # not those on disk, with which the server starts
        parameter.mul_(1.1)
    server = LocalServer(0, tiny_model, tmp_path)
    sampling = SamplingParams(max_new_tokens=60, temperature=0.0, stop_token_ids=())
    prompts = [(n, n + 1) for n in range(4, 20)]

    async def scenario():
        flags = {"use_fault_tolerance": True, "rollout_health_check_interval": 2.0}
        engine = engine_of([server], model.config.vocab_size, tmp_path, **flags)
        try:
            await engine.start()
            await engine.update_weights(list(in_chunks(model.named_parameters())), 7)
            asked = [asyncio.ensure_future(engine.generate(GenerationRequest(p, (0,), sampling))) for p in prompts]
            await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)  # some are answered, the others in flight
            server.signal(how)
            return await asyncio.gather(*asked)
        finally:
            await engine.close()

    answers = [generations[0] for generations in asyncio.run(scenario())]
    assert server.starts == 2
    assert {answer.weight_version for answer in answers} == {7}
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = torch.tensor([[*prompt, *answer.token_ids]])
        scores = torch.log_softmax(model(ids).logits[0, len(prompt) - 1 : -1].double(), -1)
        expected = scores.gather(1, ids[0, len(prompt) :, None])[:, 0]
        assert torch.tensor(answer.log_probs).double() == pytest.approx(expected, abs=1e-4)
