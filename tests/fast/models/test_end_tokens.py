"""An answer ends at any token that a part of the model's folder names."""

import json

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen2Config

from miles.models.reading import end_token_ids

WORDS = ["!", "x", "<|endoftext|>", "<|im_end|>", "<|user|>", "<|assistant|>"]
CHATML = "{% for m in messages %}{{ m.content }}<|im_end|>\n{% endfor %}"
NEXT_ROLE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
OF_TEXT = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


@pytest.fixture
def model(tmp_path):
    def write(template=None, eos="<|endoftext|>", config=0, generation=None):
        backend = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="x"))
        extra = {"additional_special_tokens": WORDS[3:]}
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos, **extra)
        tokenizer.chat_template = template
        tokenizer.save_pretrained(tmp_path)
        Qwen2Config(eos_token_id=config, bos_token_id=None).save_pretrained(tmp_path)
        if generation is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
        return str(tmp_path)

    return write


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ({"eos": "<|im_end|>"}, {0, 3}),
        ({"template": CHATML}, {0, 2, 3}),
        ({"template": NEXT_ROLE}, {0, 2, 4}),
        ({"template": OF_TEXT}, {0, 2}),
        ({"template": "{{ raise_exception('no') }}"}, {0, 2}),
        ({"generation": [3, 4]}, {0, 2, 3, 4}),
        ({"config": None, "eos": None}, set()),
    ],
)
def test_the_end_tokens_are_all_that_are_named(model, parts, expected, caplog):
    assert end_token_ids(model(**parts)) == expected
    assert ("answers end at any of the tokens 0 '!' of config.json, " in caplog.text) == bool(expected)


def test_parts_that_agree_are_not_reported(model, caplog):
    assert end_token_ids(model(CHATML, "<|im_end|>", 3, [3])) == {3}
    assert not caplog.records


def test_a_folder_without_a_tokenizer_has_its_configurations(tmp_path):
    Qwen2Config(eos_token_id=[5, 6]).save_pretrained(tmp_path)
    assert end_token_ids(str(tmp_path)) == {5, 6}
