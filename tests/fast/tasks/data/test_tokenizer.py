import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from miles.base.tokenizer import load_tokenizer
from miles.tasks.data.tokenizer import most_tokens


def test_saved_tokenizer_is_loaded_as_it_was(tmp_path, tokenizer):
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(str(tmp_path))
    assert loaded("2*3=")["input_ids"] == tokenizer("2*3=")["input_ids"]
    assert loaded.chat_template == tokenizer.chat_template


def test_folder_without_tokenizer(tmp_path):
    with pytest.raises(ValueError, match=r"--hf-checkpoint .*: cannot load a tokenizer .*; give a folder"):
        load_tokenizer(str(tmp_path))


@given(text=st.text(min_size=1) | st.text(st.sampled_from("\u0958\u0344\ufb1d1 aé<s>"), min_size=1))
@pytest.mark.parametrize("normalizer", [None, normalizers.NFC(), normalizers.NFKC()])
def test_no_text_has_more_tokens_than_are_foretold(base_tokenizer, normalizer, text):
    """Nor none, unless that is in doubt; NFKC can make much of a character."""
    backend = Tokenizer.from_str(base_tokenizer.backend_tokenizer.to_str())
    if normalizer is not None:
        backend.normalizer = normalizer
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>")
    most, tokens = most_tokens(tokenizer)(text), tokenizer(text)["input_ids"]
    assert (most == math.inf) == (isinstance(normalizer, normalizers.NFKC) or not any("!" <= c <= "~" for c in text))
    assert 0 < len(tokens) <= most


def test_a_tokenizer_without_all_of_ascii_is_in_doubt(base_tokenizer):
    backend = Tokenizer(models.BPE({"a": 0}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    assert tokenizer("b")["input_ids"] == [] and most_tokens(tokenizer)("b") == math.inf
