"""What counts as secret: credentials by their names, all environment variables given, and parts of URLs."""

import dataclasses
import json

import pytest

from miles.base.secrets import HIDDEN, hide_in_text, is_secret, public, public_words, secrets_in, split_secret_words
from miles.config.megatron.fields import megatron_fields
from miles.config.parser import declared
from miles.config.sglang.installed import router_flags, server_flags


def test_every_flag_with_a_suspicious_name_is_classified():
    """A new flag with such a name fails here until somebody has decided about it."""
    own = {name for name in declared() if is_secret(name)}
    assert own == {"wandb_key", "notify_url", "judge_api_key"}
    assert not {name for name in megatron_fields() if is_secret(name)}
    of_servers = {"--api-key", "--admin-api-key", "--ssl-keyfile-password"}
    assert {name for name in server_flags() if is_secret(name)} <= of_servers
    of_routers = {"--api-key", "--control-plane-api-keys", "--oracle-password"}
    assert {name for name in router_flags() if is_secret(name)} <= of_routers


@pytest.mark.parametrize("name", ["HF_TOKEN", "AWS_ACCESS_KEY_ID", "PGPASSWORD", "MY_SECRETS", "OPENAI_API_KEY"])
def test_credentials_in_the_environment_are_secret(name):
    assert is_secret(name)


@pytest.mark.parametrize("name", ["input_key", "--label-key", "metadata_key", "eval_label_key", "max_tokens_per_gpu"])
def test_columns_and_counts_are_shown(name):
    assert public(name, "gold") == "gold"


def test_all_given_environment_variables_are_hidden_and_their_names_shown():
    text = json.dumps({"NCCL_DEBUG": "INFO", "HF_TOKEN": "hf_sesame"})
    assert json.loads(public("train_env_vars", text)) == {"NCCL_DEBUG": HIDDEN, "HF_TOKEN": HIDDEN}
    assert secrets_in("train_env_vars", text) == {"hf_sesame"}  # INFO is no secret to be hunted for in log lines


def test_text_that_is_no_json_is_hidden_whole():
    assert public("train_env_vars", '{"HF_TOKEN": hf_sesame}') == HIDDEN


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("https://user:sesame@host/a", "https://(hidden)@host/a"),
        ("https://sesame@host:8/a", "https://(hidden)@host:8/a"),
        ("postgres://u:se@same@h/d", "postgres://(hidden)@h/d"),
        ("s3://bucket/a?X-Amz-Signature=sesame&part=1", "s3://bucket/a?X-Amz-Signature=(hidden)&part=1"),
        ("see https://h/?token=sesame#top or mail", "see https://h/?token=(hidden)#top or mail"),
        ("https://host/a@b?label_key=gold", "https://host/a@b?label_key=gold"),
    ],
)
def test_urls_are_shown_without_what_opens_them(url, expected):
    assert public("hf_checkpoint", url) == expected


def test_objects_in_json_are_searched():
    text = '{"url": "http://a:sesame@b", "api_token": "t0ken", "deep": {"password": 12345}, "n": 3}'
    value = json.loads(public("model_loader_extra_config", text))
    assert value == {"url": "http://(hidden)@b", "api_token": HIDDEN, "deep": {"password": HIDDEN}, "n": 3}


def test_json_without_secrets_stays_as_it_is_written():
    assert public("apply_chat_template_kwargs", '{"a":false}') == '{"a":false}'


def test_words_of_a_command_line():
    words = [
        "--dtype",
        "float32",
        "--api-key",
        "sesame",
        "--control-plane-api-keys",
        "a:b",
        "c:d",
        "--redis-url=r://:s@h",
    ]
    assert public_words([*words, "--api-key=sesame", "--api-key sesame", "--tp", "2"]) == [
        *["--dtype", "float32", "--api-key", HIDDEN, "--control-plane-api-keys", HIDDEN, HIDDEN],
        *["--redis-url=r://(hidden)@h", "--api-key=(hidden)", "--api-key (hidden)", "--tp", "2"],
    ]


def test_flags_with_secrets_are_divided_from_the_others():
    words = ["--dtype", "float32", "--api-key", "sesame", "--kv", '{"a":1}', "--redis-url", "r://:sesame@h", "--x"]
    plain, secret = split_secret_words(words)
    assert plain == ["--dtype", "float32", "--kv", '{"a":1}', "--x"]
    assert secret == ["--api-key", "sesame", "--redis-url", "r://:sesame@h"]


def test_values_of_other_types_and_missing_ones_are_kept():
    @dataclasses.dataclass
    class Section:
        wandb_key: str | None = None
        label_key: str = "label"
        ratio: float = 0.5
        addresses: tuple[str, ...] = ("h:1", "http://u:sesame@h:2")

    value = public("settings", {"section": dataclasses.asdict(Section())})["section"]
    assert value == {"wandb_key": None, "label_key": "label", "ratio": 0.5, "addresses": ("h:1", "http://(hidden)@h:2")}


def test_a_secret_that_contains_another_is_hidden_whole():
    assert hide_in_text("open sesame-seed, sesame", {"sesame", "sesame-seed"}) == f"open {HIDDEN}, {HIDDEN}"
