"""Text of special tokens in messages is escaped, and nothing else changes."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from miles.tasks.data.prompts import load_prompts
from miles.tasks.data.settings import DataArguments

TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}<|assistant|>\n"
ESCAPED = "<|end|>"
PLAIN = "<|emd|>"  # the same tokens, as text, but for one letter


def make(kind):
    """Return a tokenizer with the characters and some words of SentencePiece, or of a byte-level one."""
    letters = [chr(c) for c in range(33, 127)] + ["\n", "\u2581"]
    merges = [("h", "i"), ("\u2581", "hi"), ("\u2581", "h"), ("\u2581", "<"), ("\n", "\n")]
    byte_tokens = [f"<0x{number:02X}>" for number in range(256)]
    if kind == "bytes":
        letters, merges, byte_tokens = pre_tokenizers.ByteLevel.alphabet(), [("h", "i")], []
    words = [*dict.fromkeys(["<unk>", *byte_tokens, *sorted(letters), *("".join(pair) for pair in merges)])]
    vocabulary = {word: number for number, word in enumerate(words)}
    backend = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=kind != "bytes"))
    if kind == "bytes":
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
    elif kind == "prepended":  # as Phi-3's
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=kind, split=False)
    return backend


@pytest.fixture(scope="module")
def tokenizers():
    made = {}
    for kind in ("bytes", "prepended", "first", "always", "never"):
        for strips in ("none", "right", "both"):
            flags = {"rstrip": strips != "none", "lstrip": strips == "both", "special": True, "normalized": False}
            names = [AddedToken(name, **flags) for name in ("<|user|>", "<|end|>", "<|assistant|>")]
            backend = make(kind)
            backend.add_special_tokens(names)
            made[kind, strips] = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
            made[kind, strips].chat_template = TEMPLATE
    return made


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kind=st.sampled_from(["bytes", "prepended", "first", "always", "never"]),
    strips=st.sampled_from(["none", "right", "both"]),
    parts=st.lists(st.sampled_from(["hi", " ", "\n", "<", "x", ESCAPED]), max_size=6),
)
def test_ids_are_those_of_the_same_text_without_a_special_token(tmp_path, tokenizers, kind, strips, parts):
    tokenizer = tokenizers[kind, strips]
    content = "".join(parts) + ESCAPED
    (tmp_path / "chat.jsonl").write_text(json.dumps({"input": content}))
    [prompt] = load_prompts(str(tmp_path / "chat.jsonl"), DataArguments(apply_chat_template=True), tokenizer)
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": content.replace(ESCAPED, PLAIN)}], tokenize=False
    )
    pieces = tokenizer.convert_ids_to_tokens(tokenizer(rendered, add_special_tokens=False)["input_ids"])
    tokens = tokenizer.convert_ids_to_tokens(list(prompt.token_ids))
    special = {"<|user|>", "<|end|>", "<|assistant|>"}
    assert [t for t in tokens if t in special] == ["<|user|>", "<|end|>", "<|assistant|>"], "the template's own"
    assert [t if t in special else t.replace("n", "m") for t in tokens] == pieces
