"""The checks of SGLang on GPUs (tests/gpu), with the torch engine on CPU."""

import pytest
import torch
from tolerance import SERVER_LOG_PROB_ERROR
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from miles.engine.embedded.torch_engine import TorchEngine
from miles.models.reading import READ_AS
from miles.types.weights import WeightChunk
from tests.gpu.engine_checks import assert_follows, assert_stops, follow_an_update, stop_at_a_text, write_two
from tests.gpu.tiny_families import (
    DENSE,
    FAMILIES,
    family_config,
    served_architectures,
    write_readable,
)

SHORT = (9,)


class WithoutExperts(TorchEngine):
    """Leaves the experts unchanged in an update, as SGLang does if it does not know their names."""

    async def update_weights(self, chunks, version):
        kept = [{n: t for n, t in chunk.tensors.items() if ".experts." not in n} for chunk in chunks]
        own = [{n: p for n, p in self._runner.model.named_parameters() if ".experts." in n}]
        await super().update_weights([WeightChunk(tensors) for tensors in kept + own], version)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return write_two("qwen3_moe", tmp_path_factory.mktemp("two"))


async def test_an_engine_that_computes_what_transformers_computes_passes(two):
    found = await follow_an_update(TorchEngine(str(two[0]), torch.float32, "cpu", 16), *two, SHORT)
    assert_follows(found)
    assert max(found["before"], found["after"]) < SERVER_LOG_PROB_ERROR


async def test_an_update_that_leaves_out_the_experts_is_found(two):
    found = await follow_an_update(WithoutExperts(str(two[0]), torch.float32, "cpu", 16), *two, SHORT)
    with pytest.raises(AssertionError, match="after the update"):
        assert_follows(found)


async def test_a_text_ends_a_response(tmp_path):
    decode = write_readable(tmp_path)
    found = await stop_at_a_text(TorchEngine(str(tmp_path), torch.float32, "cpu", 4, decode), decode)
    assert_stops(found, decode)
    ended = found["ended"]
    for wrong in ({"tokens": found["free"]["tokens"]}, {"reason": "length"}, {"log_probs": []}):
        with pytest.raises(AssertionError):
            assert_stops(found | {"ended": ended | wrong}, decode)


@pytest.mark.parametrize("kind", [DENSE, *FAMILIES])
def test_transformers_builds_each_family_and_sglang_has_it(kind):
    given = family_config(kind)
    config = AutoConfig.for_model(**(given | {"model_type": READ_AS.get(kind, kind)}))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert sum(p.numel() for p in model.parameters()) < 50e6
    served = served_architectures()
    if not served:
        pytest.skip("SGLang is not installed")
    assert MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__ in served
