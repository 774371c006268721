"""A tokenizer with a chat template of ChatML's form, and an engine that samples random tokens."""

import random

import pytest

from miles.engine.base import Generation, SamplingParams
from miles.rollout.groups import response_seed
from miles.rollout.trajectory import Trajectory
from miles.types.sample import Prompt, Sample

TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def chat_tokenizer():
    """Return a byte-level tokenizer with merges, so that text can be tokenized in several ways."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    letters = Tokenizer(models.BPE())
    letters.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    letters.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<pad>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    letters.train_from_iterator(["abababab cdcdcd user assistant", "abc abcd acd"] * 4, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters, eos_token="<|im_end|>", pad_token="<pad>")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


class RandomEngine:
    """Answers with random tokens, or with scripted texts. Every sampled token has its own log-prob."""

    def __init__(self, tokenizer, seed=0, alphabet=None, texts=(), finish=None):
        self.tokenizer = tokenizer
        self.random = random.Random(seed)
        special = set(tokenizer.all_special_ids)
        self.alphabet = alphabet or [i for i in range(len(tokenizer)) if i not in special]
        self.texts = list(texts)
        self.finish = finish
        self.answers = []  # (request, generation)

    async def generate(self, request):
        limit, end = request.sampling.max_new_tokens, self.tokenizer.eos_token_id
        if self.texts:
            ids = [*self.tokenizer(self.texts.pop(0), add_special_tokens=False)["input_ids"], end]
        else:
            ids = [*self.random.choices(self.alphabet, k=self.random.randint(0, 6)), end]
        finish = self.finish or ("stop" if len(ids) <= limit else "length")
        ids = ids[:limit]
        number = len(self.answers)
        log_probs = [-number - 0.001 * (place + 1) for place in range(len(ids))]
        generation = Generation(ids, log_probs, finish, weight_version=number)
        self.answers.append((request, generation))
        return [generation]


@pytest.fixture(scope="session")
def random_engine(chat_tokenizer):
    return lambda *arguments, **options: RandomEngine(chat_tokenizer, *arguments, **options)


@pytest.fixture(scope="session")
def new_trajectory(chat_tokenizer):
    def make(engine, max_new=10_000, max_context=20_000):
        prompt = Prompt("the task", (1, 2), "42", {"difficulty": 3}, "set.jsonl:7", input="the task")
        sample = Sample(prompt, 5, 17)
        sampling = SamplingParams(max_new)
        return Trajectory(sample, chat_tokenizer, engine, sampling, lambda n: response_seed(1, n), max_context)

    return make
