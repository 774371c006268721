import pytest

from miles.tasks.data.tokenizer import load_tokenizer


def test_saved_tokenizer_is_loaded_as_it_was(tmp_path, tokenizer):
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(str(tmp_path))
    assert loaded("2*3=")["input_ids"] == tokenizer("2*3=")["input_ids"]
    assert loaded.chat_template == tokenizer.chat_template


def test_folder_without_tokenizer(tmp_path):
    with pytest.raises(ValueError, match=r"--hf-checkpoint .*: cannot load a tokenizer .*; give a folder"):
        load_tokenizer(str(tmp_path))
