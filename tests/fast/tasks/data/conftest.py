"""A byte-level tokenizer: one token per character, a beginning-of-sequence token and a chat template."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from tests.fast.config.conftest import command, refused, validated  # noqa: F401

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{{ opening | default('') }}{% endif %}"
)


@pytest.fixture(scope="session")
def base_tokenizer():
    """Return the tokenizer without its chat template."""
    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({"<s>": 0, **{c: i for i, c in enumerate(characters, start=1)}}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>")


@pytest.fixture(scope="session")
def tokenizer(base_tokenizer):
    with_template = PreTrainedTokenizerFast(tokenizer_object=base_tokenizer.backend_tokenizer, bos_token="<s>")
    with_template.chat_template = CHAT_TEMPLATE
    return with_template
