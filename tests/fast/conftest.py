"""What tests of several packages share: a model small enough to train in a test, with a tokenizer of its own."""

import sys
from pathlib import Path

import pytest
from xdist.scheduler import LoadFileScheduling

sys.path.insert(0, str(Path(__file__).parent))  # tests have no packages; tiny_llama.py serves several folders

CHAT_TEMPLATE = (
    "{% for message in messages %}<user>{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


class FileScheduling(LoadFileScheduling):
    """A file stays on one worker of pytest-xdist, for its fixtures; so do all files that share the SGLang server."""

    def _split_scope(self, nodeid):
        file = super()._split_scope(nodeid)
        return "the SGLang server" if Path(file).name.startswith("test_sglang") else file


def pytest_xdist_make_scheduler(config, log):
    """For ``--dist loadfile``, which tests/run.sh gives; others are pytest-xdist's own."""
    return FileScheduling(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """Folder of a random two-layer Llama in fp32, and of a byte-level tokenizer with a chat template."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = _tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.3,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    folder = str(tmp_path_factory.mktemp("tiny-llama"))
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def sglang_address(tiny_model, tmp_path_factory):
    """HOST:PORT of the one SGLang server of the suite; whatever weights the last test has left are in it.

    Starting takes 10 s on two idle cores and minutes on busy ones: tests that use it need a longer timeout.
    """
    from tests.fast.engine.sglang_servers import server_of

    server = server_of(tiny_model, tmp_path_factory.mktemp("sglang") / "server.log")
    url = server.start()
    yield url.removeprefix("http://")
    server.stop()


def _tokenizer():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    letters = Tokenizer(models.BPE())
    letters.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    letters.decoder = decoders.ByteLevel()
    sums = [f"{a} + {b} = {a + b}" for a in range(10) for b in range(10)]
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<pad>", "<eos>", "<user>", "<assistant>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    letters.train_from_iterator(sums, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters, eos_token="<eos>", pad_token="<pad>")
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
