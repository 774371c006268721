"""Fixtures for tests of several folders: a tiny trainable model with a tokenizer, and one SGLang server."""

import gc
import os
import signal
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from xdist.scheduler import LoadFileScheduling

sys.path.insert(0, str(Path(__file__).parent / "support"))  # tests are no packages; several folders import from it

# Here and in the processes that tests start, threads without work sleep. Many processes share few cores, and a thread
# that waits actively for another, which has no core, made a run's step take 17 s instead of 1 s.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Names of models in tests are made up, so the hub need not be asked about them.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# Verdicts about rows are remembered there, and verdicts of an earlier session of tests must decide nothing.
USER_CACHE = tempfile.TemporaryDirectory(prefix="cache-of-tests-")
os.environ["XDG_CACHE_HOME"] = USER_CACHE.name

# Under nohup, and in the background of a script, these signals are ignored, here and in the runs that tests start.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGQUIT, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)

# An example has no deadline: on a busy machine it would fail whatever the code does. A property is tried on the same
# few examples each time, so that a new failure comes from a change. ``tests/run.sh --all`` draws more, and others.
settings.register_profile("fixed", deadline=None, derandomize=True, max_examples=40)
settings.register_profile("random", deadline=None, derandomize=False)
settings.load_profile("fixed")

CHAT_TEMPLATE = (
    "{% for message in messages %}<user>{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


# Files that take longest, in the order in which they start; all others follow. A long file that starts last would run
# alongside an idle worker. Files that compute in many processes alternate with files that mostly wait.
LONGEST = (
    "training/megatron/test_megatron_layouts.py",
    "run/runs/test_train_and_resume.py",
    "engine/test_sglang_engine.py",  # and all that share its server
    "conformance/test_matrix.py",  # and all that share its ranks
    "run/runs/test_train_backends.py",
    "training/fsdp/test_fsdp_ranks.py",
    "run/runs/test_async.py",
    "engine/test_engine_failures.py",
    "run/test_generation_workers.py",
    "commands/sweeps/test_sweep_command.py",
    "run/runs/test_ppo_run.py",
    "engine/test_server_states.py",
    "observe/report/test_browser.py",
    "tasks/rewards/test_reward_process.py",
    "tasks/rewards/test_hostile_answers.py",
    "engine/test_torch_engine.py",
)


class FileScheduling(LoadFileScheduling):
    """Keep files that share a server or ranks on one worker of pytest-xdist, and each other file; longest first."""

    def schedule(self):
        """Hand out files in the order of collection, which follows ``LONGEST``."""
        self.config.option.loadscopereorder = False
        super().schedule()

    def _split_scope(self, nodeid):
        file = super()._split_scope(nodeid)
        if Path(file).parent.name == "conformance":
            return "the ranks of conformance"
        return "the SGLang server" if Path(file).name.startswith("test_sglang") else file


def pytest_collection_modifyitems(config, items):
    """Under pytest-xdist, put the longest files first."""
    if hasattr(config, "workerinput"):
        place = {Path(__file__).parent / file: number for number, file in enumerate(LONGEST)}
        items.sort(key=lambda item: place.get(item.path, len(LONGEST)))


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Import all tests without collecting garbage, and let later collections pass over what was imported."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_unconfigure():
    gc.unfreeze()  # or libraries complain at the end of what was not freed


def pytest_xdist_make_scheduler(config, log):
    """Return this scheduler for ``--dist loadfile``, which tests/run.sh uses."""
    return FileScheduling(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """Return a folder with a random two-layer Llama in fp32 and a byte-level tokenizer with a chat template."""
    folder = str(tmp_path_factory.mktemp("tiny-llama"))
    save_tiny_model(folder)
    return folder


@pytest.fixture(scope="session")
def sglang_address(tiny_model, tmp_path_factory):
    """Start the suite's one SGLang server and return HOST:PORT. It keeps the weights of the last test that used it.

    Starting takes 10 s on two idle cores and minutes on busy ones, so tests that use it need a longer timeout. This
    server reads text (--rollout-stop); the servers of runs in other tests do not.
    """
    from tests.fast.engine.sglang_servers import server_of

    server = server_of(tiny_model, tmp_path_factory.mktemp("sglang") / "server.log", reads_text=True)
    url = server.start()
    yield url.removeprefix("http://")
    server.stop()


# vLLM's attention on CPU takes no heads of 8.
VLLM_SHAPE = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}


def save_tiny_model(folder, **shape):
    """Write a random two-layer Llama in fp32 and ``byte_tokenizer()`` into ``folder``. ``shape`` replaces defaults."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = byte_tokenizer()
    usual = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "initializer_range": 0.3,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
        "pad_token_id": tokenizer.pad_token_id,
        "dtype": "float32",
    }
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**usual | shape)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def byte_tokenizer():
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
