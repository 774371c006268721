"""``--config``: a YAML file means the flags that it lists, later words win, and run.yaml repeats a run."""

import dataclasses
import re
from contextlib import suppress
from pathlib import Path

import pytest

from miles.base.flags import Errors, FlagError
from miles.base.secrets import public_words
from miles.compat.border import read_command
from miles.config.files import expand_configs
from miles.config.parser import build_parser, judge
from miles.config.run_file import run_config
from miles.config.settings import Settings

REPO = Path(__file__).parents[3]

NESTED = """\
# a comment
model:
  hf-checkpoint: some/model
data: {prompt_data: "reasoning_gym:products", apply_chat_template: true}
reward:
  rm_type: last_number
rollout:
  num_rollout: 10        # iterations
  rollout_batch_size: 8
  n_samples_per_prompt: 4
  rollout_max_response_len: 64
optimizer:
  lr: 1e-5
critic:
cluster:
  train_env_vars: {NCCL_DEBUG: INFO, N: 3}
  colocate: false
evaluation:
  eval_prompt_data: {held out: "reasoning_gym:products", gcd: "reasoning_gym:gcd"}
rollout_seed: 012
sglang_mem_fraction_static: 0.5
num_experts: 8
"""
FLAT = "".join(f"{line.strip()}\n" for line in NESTED.splitlines() if not line.endswith(":") and "{" not in line)


def settings_of(*words: str) -> Settings:
    return judge(read_command(words)).settings


def read(*words: str) -> Settings:
    """The settings as written: nothing is judged."""
    command = read_command(words)
    assert not command.errors
    return command.settings


def errors_of(*words: str) -> tuple[str, ...]:
    with pytest.raises(FlagError) as caught:
        judge(read_command(words))
    return caught.value.messages


@pytest.fixture
def nested(tmp_path) -> str:
    path = tmp_path / "nested.yaml"
    path.write_text(NESTED)
    return str(path)


def test_a_nested_file_means_its_flags(nested, command):
    settings = read("--config", nested)
    flags = "--apply-chat-template --rollout-seed 12 --lr 1e-5 --sglang-mem-fraction-static 0.5 --num-experts 8"
    expected = read(
        *command(flags),
        "--eval-prompt-data",
        "held out",
        "reasoning_gym:products",
        "gcd",
        "reasoning_gym:gcd",
        "--train-env-vars",
        '{"NCCL_DEBUG": "INFO", "N": 3}',
    )
    assert settings == expected


def test_a_flat_file_means_its_flags(tmp_path, command):
    (tmp_path / "flat.yaml").write_text(FLAT + 'prompt-data: "reasoning_gym:products"\n')
    expected = read(*command("--rollout-seed 12 --lr 1e-5 --sglang-mem-fraction-static 0.5 --num-experts 8"))
    assert read("--config", str(tmp_path / "flat.yaml")) == expected


def test_what_comes_later_wins(nested, tmp_path):
    assert read("--lr", "1", "--config", nested).optimizer.lr == 1e-5
    assert read("--config", nested, "optimizer.lr=2", "--lr", "3").optimizer.lr == 3
    after_others = [
        "--colocate",
        "lr=2",
        "--rollout-seed",
        "7",
        "data.rollout_shuffle=true",
        "--sglang-tp-size",
        "1",
        "n_samples_per_prompt=4",
    ]
    mixed = read("--config", nested, *after_others)
    assert (mixed.optimizer.lr, mixed.data.rollout_seed, mixed.data.rollout_shuffle) == (2, 7, True)
    assert mixed.rollout.n_samples_per_prompt == 4
    settings = read("--config", nested, "lr=2", "apply-chat-template=false", "colocate=true", "eval_prompt_data=[a, b]")
    assert (settings.optimizer.lr, settings.data.apply_chat_template, settings.cluster.colocate) == (2, False, True)
    assert settings.evaluation.eval_prompt_data == ("a", "b")
    again = tmp_path / "again.yaml"
    again.write_text("lr: 7\ntrain_env_vars: null\nsglang_mem_fraction_static: null\n")
    both = read("--config", nested, "lr=2", "--config", str(again))
    assert (both.optimizer.lr, both.cluster.train_env_vars, both.server_flags.server) == (7, None, ())
    assert read_command(["--config", nested, "lr=2", "--lr", "3"]).notes == (), "an override is no surprise"
    (note,) = read_command(["--lr", "1", "--config", nested]).notes
    assert "given twice" in note.why


def test_the_settings_of_files_that_are_replaced_are_named(nested, tmp_path):
    (tmp_path / "flags").write_text("--lr 3 --seed 4\n--wandb-key sesame\n")
    assert read_command(["--config", nested]).expanded.replaced == ()
    words = ["--config", nested, "rollout_seed=9", f"@{tmp_path / 'flags'}", "--lr", "5", "--wandb-key", "x"]
    assert read_command(words).expanded.replaced == (
        f"--lr 3 ({tmp_path / 'flags'})",
        f"--wandb-key (hidden) ({tmp_path / 'flags'})",
        f"--rollout-seed 012 ({nested}:20)",
        f"--lr 1e-5 ({nested}:13)",
    )


def test_false_asks_for_the_other_precision(tmp_path):
    for text, words in (
        ("bf16: false\nfp32: true", ["--fp32"]),
        ("bf16: false", ["--fp32"]),
        ("fp32: false", ["--bf16"]),
    ):
        (tmp_path / "precision.yaml").write_text(text)
        assert read("--config", str(tmp_path / "precision.yaml")) == read(*words)


def test_flags_files_may_name_configuration_files(nested, tmp_path):
    (tmp_path / "flags").write_text(f"--config {nested} lr=2\n--rollout-seed 5\n")
    settings = read(f"@{tmp_path / 'flags'}")
    assert (settings.optimizer.lr, settings.data.rollout_seed) == (2, 5)


WRONG = [
    ("rolout_seed: 3", ":1: rolout_seed: no such setting; did you mean rollout_seed?"),
    ("optimizer:\n  rollout_seed: 3", ":2: rollout_seed: belongs to the section data; move it there"),
    ("optimiser:\n  lr: 3", ":1: optimiser: no such setting; did you mean optimizer?"),
    ("a:\n b: [", ":2: not YAML: "),
    ("lr: 1 # one\n  seed: 2", ":2: not YAML: begins further right than the line before; move it left"),
    ("lr: 1\n\tseed: 2", ":2: not YAML: begins with a tab; write spaces, or nothing"),
    ("lr: 1\nseed:2\nmin_lr: 3", ":2: not YAML: has no ': ' between key and value; write key: value"),
    ("lr: 1: 2", ":1: not YAML: has a second ': ', or begins too far right; quote the value, or move it"),
    ("lr: &x 3\nmin_lr: *x", ":2: not YAML: an alias (*name) is not supported; correct the line"),
    ("lr: 1\noptimizer: {lr: 2}", ":2: lr: is set twice, first in "),
    ("colocate: 1", ":1: colocate: is a switch; write true or false"),
    ("colocate: [a]", ":1: colocate: is a switch; write true or false"),
    ("config: x.yaml", ":1: config: is not a setting of a run; give it on the command line"),
    ("eval_prompt_data: [a, --lr]", ":1: eval_prompt_data: a value in a list cannot start with --; "),
    ("[1]: 2", ":1: a key that is no word: no such setting; "),
    ("- lr", ": the file holds no settings; write one line, key: value, for each"),
    ("", ": the file holds no settings; "),
    ("[" * 5000, ": the file is nested too deeply; "),
    ("\x00", ": the file is not UTF-8 text; check the path"),
]


@pytest.mark.parametrize(("text", "message"), WRONG)
def test_what_is_no_setting_is_refused_with_file_and_line(tmp_path, text, message):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    errors = [error for error in errors_of("--config", str(path)) if error.startswith("--config ")]
    assert len(errors) == 1 and errors[0].startswith(f"--config {path}{message}"), errors


def test_errors_about_values_name_the_line(nested, tmp_path):
    (tmp_path / "b.yaml").write_text("optimizer:\n\n  lr: fast\nmicro_batch_size: -1\n")
    errors = errors_of("--config", nested, "--config", str(tmp_path / "b.yaml"))
    place = f"{tmp_path / 'b.yaml'}"
    assert f"--lr fast: must be a number; correct the value [{place}:3]" in errors
    assert any(message.startswith("--micro-batch-size -1: ") and message.endswith(f"[{place}:4]") for message in errors)
    assert not any("[" in message for message in errors_of("--config", nested, "lr=1", "--lr", "slow"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--config"], "--config: expected the path of a YAML file; write --config FILE"),
        (["--config", "none.yaml"], "--config none.yaml: the file cannot be read (No such file or directory); "),
        (["--config", "{}", "lr"], "--config {} lr: is not an override of the file; write key=value"),
        (["--config", "{}", "lr="], "--config {} lr=: has no value; give one, or write lr=null for the default"),
        (["--config", "{}", "losses.lr=1"], "--config {} losses.lr=1: losses is not a section; write lr=value"),
        (["--config", "{}", "lrr=1"], "--config {} lrr=1: no such setting; "),
    ],
)
def test_wrong_words_after_config_are_refused(nested, words, message):
    words, message = [word.format(nested) for word in words], message.format(nested)
    errors = Errors()
    with suppress(FlagError):  # a file that cannot be read ends the reading
        expand_configs(words, build_parser()._option_string_actions, lambda: {"--num-experts"}, errors)
    assert len(errors.messages) == 1 and errors.messages[0].startswith(message)


COMMANDS = [
    "",
    "--fp32 --use-kl-loss --kl-loss-coef 0.1 --ref-load some/model --lr 3e-7 --adam-eps 1e-15 --rollout-top-k 5",
    "--eval-prompt-data held reasoning_gym:products no reasoning_gym:gcd --eval-interval 3 --eval-top-p 0.7",
    "--advantage-estimator ppo --num-critic-only-steps 2 --loss-aggregation token_mean --use-tis --tis-clip 3",
    "--calculate-per-token-loss --num-steps-per-rollout 4 --use-dynamic-batch-size --max-tokens-per-gpu 99",
    "--train-backend megatron --tensor-model-parallel-size 2 --actor-num-gpus-per-node 4 --no-rope-fusion "
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "--rollout-engine sglang --sglang-dtype float32 --sglang-enable-metrics --rollout-num-gpus 4 "
    "--rollout-num-gpus-per-engine 2 --router-policy random --sglang-chunked-prefill-size -1",
    "--save out/no --save-interval 2 --save-hf out/true --load out/1e5 --output-dir out/#a:b --finetune",
]


@pytest.mark.parametrize("flags", COMMANDS)
def test_the_file_of_a_run_repeats_its_settings(command, tmp_path, flags):
    path = tmp_path / "run.yaml"
    settings = settings_of(*command(flags))
    path.write_text(run_config(settings, ["a run", ""]))
    assert settings_of("--config", str(path)) == settings


def test_a_value_that_follows_from_others_is_not_pinned(command, tmp_path):
    """One override is enough: values that validation has filled in follow it, and the user's values stay."""
    path = tmp_path / "run.yaml"
    flags = "--eval-prompt-data test reasoning_gym:products --eval-interval 2 --advantage-estimator gspo"
    path.write_text(run_config(settings_of(*command(flags))))
    assert not re.search("\n  (global_batch_size|policy_loss|eval_max_response_len|eval_top_p):", path.read_text())
    setup = settings_of("--config", str(path), "rollout_batch_size=6", "advantage_estimator=grpo", "rollout_top_p=0.9")
    assert (setup.training.global_batch_size, setup.loss.policy_loss, setup.evaluation.eval_top_p) == (24, "ppo", 0.9)

    steps = judge(read_command(command("--num-steps-per-rollout 2")))
    path.write_text(run_config(steps.settings, set_fields=steps.set_fields))
    assert settings_of("--config", str(path), "rollout_batch_size=6").training.global_batch_size == 12
    sized = judge(read_command(command("--global-batch-size 32 --policy-loss ppo")))
    path.write_text(run_config(sized.settings, set_fields=sized.set_fields))
    assert "global_batch_size: 32" in path.read_text() and "policy_loss: ppo" in path.read_text()


def test_every_value_of_a_run_is_in_its_file(command):
    text = run_config(settings_of(*command()))
    for section in (
        f.name for f in dataclasses.fields(Settings) if f.name not in ("server_flags", "megatron_overrides")
    ):
        assert f"\n{section}:\n" in text
    assert "  lr: 1.0e-06\n" in text and "  n_samples_per_prompt: 4  # default 1\n" in text


def test_no_secret_is_in_the_file_and_a_run_without_it_is_refused(command, tmp_path):
    path = tmp_path / "run.yaml"
    words = command("--rollout-engine sglang --sglang-api-key sesame --use-wandb --wandb-host https://me:sesame@host")
    words += ["--train-env-vars", '{"HF_TOKEN": "sesame"}', "--wandb-key", "sesame"]
    settings = settings_of(*words)
    path.write_text(run_config(settings))
    assert "sesame" not in path.read_text()
    refused = errors_of("--config", str(path))
    assert len(refused) == 4
    for name in ("train_env_vars", "wandb_key", "wandb_host", "sglang-api-key"):
        line = next(n for n, row in enumerate(path.read_text().splitlines(), 1) if name.replace("-", "_") in row)
        assert any(m.startswith(f"--config {path}:{line}: ") and "a secret was left out" in m for m in refused), refused
    again = ["wandb_host=null", "--wandb-key", "sesame", "--sglang-api-key", "sesame", *words[-4:-2]]
    restored = settings_of("--config", str(path), *again)
    assert dataclasses.replace(restored.tracking, wandb_host="https://me:sesame@host") == settings.tracking
    assert (restored.server_flags, restored.cluster) == (settings.server_flags, settings.cluster)


def test_a_secret_in_an_override_is_not_shown():
    words = public_words(["--config", "a.yaml", "tracking.wandb_key=sesame", "train_env_vars={A: sesame}", "lr=1"])
    assert words == ["--config", "a.yaml", "tracking.wandb_key=(hidden)", "train_env_vars=(hidden)", "lr=1"]
