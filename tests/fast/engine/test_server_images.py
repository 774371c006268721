"""Prompts with images on real servers: SGLang, and vLLM where the environment of scripts/vllm.sh is."""

import asyncio
from dataclasses import replace
from itertools import product

import pytest
import torch
from tolerance import SERVER_LOG_PROB_ERROR
from transformers import AutoModelForImageTextToText
from vision_models import play, png, prompt_with, write_vision_model

from examples.small_task import write_small_vision_model
from miles.batch.collate import collate
from miles.batch.convert import convert
from miles.config.servers.flags import SglangArguments
from miles.config.vllm.environment import missing_vllm, vllm_python
from miles.engine.base import EngineWrapper, GenerationRequest, SamplingParams
from miles.engine.servers.launch import ServerOnHost
from miles.engine.servers.processes import LogFile
from miles.engine.sglang.launch import SglangProgram
from miles.engine.vllm.engine import VllmEngine
from miles.engine.vllm.launch import VllmProgram
from miles.engine.weight_sync.sender import WeightSender
from miles.models.images import load_processor, tensors_of
from miles.objective.settings import LossArguments
from miles.training.fsdp.models import Policy, load_model
from miles.types.sample import PromptGroup
from tests.fast.engine.conftest import Running, chunks_of
from tests.fast.engine.sglang_servers import HOST, KEYS, SMALL, engine_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SAMPLED_IMAGE = 102  # the id of <|image_pad|>
SAMPLING = SamplingParams(8, temperature=0.7)


def of_vllm(servers, vocab_size, folder, **flags):
    sglang = SglangArguments(**flags)
    return VllmEngine(servers, sglang, vocab_size, WeightSender(sglang, folder), None, keys=KEYS)


@pytest.fixture(scope="module", params=product(["qwen2_5_vl", "qwen3_vl"], ["sglang", "vllm"]), ids="-".join)
def running(request, tmp_path_factory):
    kind, engine = request.param
    folder = tmp_path_factory.mktemp("images")
    model = str(folder / "model")
    if kind == "qwen2_5_vl":
        write_small_vision_model(folder / "model", 1, patch=14)  # SGLang takes others as embedded pixels
    else:
        write_vision_model(folder / "model", kind)
    if engine == "sglang":
        program, make = (
            SglangProgram(model, "float32", "cpu", 1, 0, flags=SMALL, keys=KEYS, reads_images=True),
            engine_of,
        )
    else:
        if (missing := missing_vllm(vllm_python())) is not None:
            pytest.skip(missing)
        program, make = (
            VllmProgram(model, "float32", "cpu", 1, 0, KEYS, reads_images=True, python=vllm_python()),
            of_vllm,
        )
    server = ServerOnHost(program, LogFile(folder / "server.log"), HOST)
    try:
        url = server.start()
        yield Running(url.removeprefix("http://"), model, folder, AutoModelForImageTextToText, make)
    finally:
        server.stop()


def request_of(prompt, seeds=(0, 1, 2)):
    return GenerationRequest(prompt.token_ids, seeds, SAMPLING, prompt.images)


def assert_the_models(model, request, generations, version):
    """Compare the log-probs of the tokens of ``version`` with one forward of transformers for each response."""
    inputs, image = {}, torch.zeros(len(request.prompt_ids), dtype=torch.int)
    if request.images is not None:
        inputs = {name: torch.from_numpy(value) for name, value in tensors_of(request.images).tensors.items()}
        image = (torch.tensor(request.prompt_ids) == request.images.placeholder_id).int()
    for generation in generations:
        answer = generation.token_ids
        if SAMPLED_IMAGE in answer:  # transformers asks for an image for it
            answer = answer[: answer.index(SAMPLED_IMAGE)]
        ids = torch.tensor([[*request.prompt_ids, *answer]])
        types = torch.cat([image, torch.zeros(len(answer), dtype=torch.int)])[None]
        extra = inputs and {"mm_token_type_ids": types}
        with torch.no_grad():
            logits = model(input_ids=ids, **inputs, **extra).logits[0, len(request.prompt_ids) - 1 : -1].double() / 0.7
        expected = logits.log_softmax(-1).gather(1, ids[0, len(request.prompt_ids) :, None])[:, 0]
        error = (torch.tensor(generation.log_probs[: len(answer)]).double() - expected).abs()
        is_of_version = torch.tensor(generation.token_versions[: len(answer)]) == version
        assert (error[is_of_version] <= SERVER_LOG_PROB_ERROR).all()


@pytest.mark.parametrize("mode", ["disk", "broadcast"])
def test_log_probs_are_the_models_after_every_update(running, mode):
    sizes = [[], [(56, 28)], [(84, 56), (28, 28), (56, 84)]]
    prompts = [prompt_with(str(running.folder / "model"), each, 10 * i) for i, each in enumerate(sizes)]
    with running.engine(update_weight_transfer_mode=mode, check_weight_update_equal=True) as engine:
        for model in (running.other, running.model):
            version = running.update(engine, model)
            for prompt in prompts:
                generations = running.run(engine.generate(request_of(prompt)))
                assert_the_models(model, request_of(prompt), generations, version)
                assert {v for g in generations for v in g.token_versions} == {version}


def test_a_prompt_in_flight_is_read_again_by_the_new_weights(running):
    prompt = prompt_with(str(running.folder / "model"), [(56, 28)], 1)
    request = replace(request_of(prompt, range(8)), sampling=SamplingParams(300, temperature=0.7))
    versions = {}

    async def with_updates(engine):
        generating = asyncio.ensure_future(engine.generate(request))
        while not generating.done():
            version = next(running.versions)
            versions[version] = running.model if len(versions) % 2 else running.other
            await engine.update_weights(chunks_of(versions[version]), version)
        return generating.result()

    with running.engine(update_weight_transfer_mode="broadcast") as engine:
        generations = running.run(with_updates(engine))
    for version, model in versions.items():
        assert_the_models(model, request, generations, version)
    assert max(len({*generation.token_versions} & versions.keys()) for generation in generations) > 1


def test_another_image_and_another_order_are_noticed(running):
    prompt = prompt_with(str(running.folder / "model"), [(56, 28), (56, 28)], 1)
    first, second = prompt.images.files
    generations = []
    with running.engine() as engine:
        for files in ((first, second), (second, first), (first, png(9))):
            one = replace(prompt, images=replace(prompt.images, files=files, cache={}))
            request = replace(request_of(one, (0,)), sampling=SamplingParams(4, temperature=0.0))
            generations += running.run(engine.generate(request))
    assert len({tuple(generation.log_probs) for generation in generations}) == 3


def test_a_prompt_that_the_server_reads_as_other_tokens_is_refused(running):
    prompt = prompt_with(str(running.folder / "model"), [(56, 28)], 1)
    counted = len(prompt.token_ids)
    end = prompt.images.starts[0] + prompt.images.counts[0]
    ids = (*prompt.token_ids[:end], prompt.images.placeholder_id, *prompt.token_ids[end:])
    images = replace(prompt.images, counts=(prompt.images.counts[0] + 1,))
    with running.engine() as engine, pytest.raises(ValueError, match=f"as {counted} tokens.*with {counted + 1};"):
        running.run(engine.generate(request_of(replace(prompt, token_ids=ids, images=images))))


@pytest.mark.parametrize("written", ["<|image_pad|>?", "<|video_pad|>?", "see <image> ", "<|vision_start|>"])
def test_nothing_follows_a_placeholder_that_the_model_has_sampled(running, written):
    """SGLang reads the text <image> as an image, too, and fails if nothing follows the start of an image."""
    prompt = prompt_with(str(running.folder / "model"), [(56, 28)], 1)
    more = load_processor(prompt.images.model).tokenizer(written, add_special_tokens=False)["input_ids"]
    with running.engine() as engine:
        longer = replace(prompt, token_ids=(*prompt.token_ids, *more))
        (generation,) = running.run(engine.generate(request_of(longer, (0,))))
    assert (generation.token_ids, generation.finish_reason) == ([], "length")


def test_what_is_sampled_around_images_of_later_turns_is_what_is_trained(running):
    """A tool returns an image after each of three turns. The trainer has the tokens, log-probs and images."""
    model = str(running.folder / "model")

    class Recorded(EngineWrapper):
        async def generate(self, request):
            (answer,) = await super().generate(request)
            answers.append(answer)
            return [answer]

    samples, last = [], []
    with running.engine() as engine:
        for number in range(5):
            answers = []
            sample = running.run(play(model, Recorded(engine), number, SamplingParams(400), side=28, tokens=8))
            samples.append(sample)
            is_sampled = torch.tensor(sample.loss_mask) == 1
            sampled = [token for answer in answers for token in answer.token_ids]
            assert torch.tensor(sample.response_ids)[is_sampled].tolist() == sampled
            last += answers[2].token_ids
    assert last and max(len(sample.prompt.images.files) for sample in samples) == 4
    groups = [PromptGroup(sample.group_index, sample.prompt, [sample]) for sample in samples]
    (batch,) = convert(groups, loss=LossArguments(), global_batch_size=len(groups))
    score = Policy(load_model(model, torch.float32), 1.0, 64).scorer(
        collate(batch, range(len(groups)), torch.device("cpu"))
    )
    scored = score(with_entropy=False).log_probs.split(batch.response_lengths)
    for sample, log_probs in zip(samples, scored, strict=True):
        error = (torch.tensor(sample.rollout_log_probs) - log_probs.detach()).abs()
        assert (error * torch.tensor(sample.loss_mask)).max() <= SERVER_LOG_PROB_ERROR
