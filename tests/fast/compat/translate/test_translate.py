"""``miles translate``: files in, flags and objectives out, through the command's own entry point."""

import json
import re
import subprocess
import sys

import pytest
from tolerance import DOUBLE_ERROR

from miles import cli
from miles.compat.border import read_command
from miles.compat.translate.launchers.base import all_launchers, launcher_of
from miles.compat.translate.reading import read_document
from miles.compat.translate.translation import UNEVEN, Expression, Translation, table_of
from miles.config.parser import judge, parse
from tests.fast.support.rows import rows

FILES = {
    "trl.py": """
from trl import GRPOConfig
EPSILON = 0.28
args = GRPOConfig(
    loss_type="bnpo",
    epsilon_high=EPSILON,
    beta=0.04,
    learning_rate=open("/nonexistent").read(),
    made_up=3,
    num_generations=4,
)
""",
    "trl.json": '{\n "loss_type": "dr_grpo",\n "max_completion_length": 256,\n "num_generations": 4,\n "made_up": 1}',
    "verl.yaml": """
actor_rollout_ref:
  actor:
    loss_agg_mode: seq-mean-token-mean
    ppo_mini_batch_size: 16
    optim: {lr: 1e-6}
  rollout: {n: 4}
algorithm: {adv_estimator: grpo}
made: {up: 1}
""",
    "verl.sh": """#!/bin/bash
N=8
ARGS=(
  data.train_batch_size=128
)
python3 -m verl.trainer.main_ppo \\
  algorithm.adv_estimator=grpo "${ARGS[@]}" \\
  actor_rollout_ref.rollout.n=$N actor_rollout_ref.actor.ppo_mini_batch_size=64 \\
  actor_rollout_ref.actor.loss_agg_mode=token-sum +made.up=1 actor_rollout_ref.model.path=$MODEL
""",
    "openrlhf.sh": "python3 -m openrlhf.cli.train_ppo_ray --actor.loss_agg_mode seq-mean-token-mean --made_up 1\n",
    "openrlhf_underscores.sh": """
python3 -m openrlhf.cli.train_ppo_ray --actor_learning_rate 5e-7 --init_kl_coef 1e-3 --use_kl_loss --kl_estimator k3 \\
  --micro_train_batch_size 8 --train_batch_size 128 --rollout_batch_size 16 --n_samples_per_prompt 8 \\
  --advantage_estimator group_norm --eps_clip_low_high 0.2 0.3 --prompt_data rows.jsonl --input_key q --label_key a \\
  --pretrain model --prompt_max_len 512 --generate_max_len 1024 --vllm_num_engines 4 --vllm_tensor_parallel_size 2 \\
  --actor_num_gpus_per_node 8 --zero_stage 3 --bf16 --ref_num_nodes 1 --critic_learning_rate 9e-6 --made_up 1
""",
    "slime.sh": "python3 slime/train.py --calculate-per-token-loss --lr 1e-6 --made-up 1\n",
    "miles.sh": "A=(\n --lr 1e-6\n --moe-grouped-gemm\n)\nray job submit -- python3 train.py ${A[@]} --made-up 1\n",
    "prime.toml": "max_steps = 5\n[orchestrator]\nbatch_size = 128\ngroup_size = 8\n[made]\nup = 1\n",
    "nemo.yaml": """
grpo: {num_prompts_per_step: 4, num_generations_per_prompt: 2}
loss_fn: {token_level_loss: false}
made: {up: 1}
""",
}
# launcher, flags that must be there, the value of the uneven batch there, whether our mode is exact
EXPECTED = {
    "trl.py": (
        "trl",
        ["--input-key prompt", "--loss-aggregation token_mean", "--eps-clip-high 0.28", "--kl-loss-type k3"],
        7 / 24,
        False,
    ),
    "trl.json": ("trl", ["--loss-aggregation constant", "--loss-aggregation-divisor 256"], 5 / 64, True),
    "verl.yaml": ("verl", ["--loss-aggregation sample_mean", "--global-batch-size 64", "--lr 1e-06"], 7 / 16, True),
    "verl.sh": ("verl", ["--loss-aggregation-divisor 0.001953125", "--rollout-batch-size 128"], 5.0, True),
    "openrlhf.sh": (
        "openrlhf",
        ["--loss-aggregation sample_mean", "--kl-coef 0.01", "--normalize-advantages"],
        1 / 2,
        False,
    ),
    "openrlhf_underscores.sh": (
        "openrlhf",
        [
            "--hf-checkpoint model",
            "--lr 5e-07",
            "--lr-decay-style cosine --min-lr 5e-08",
            "--use-kl-loss --kl-loss-coef 0.001",
            "--kl-loss-type k3",
            "--advantage-estimator grpo",
            "--eps-clip 0.2 --eps-clip-high 0.3",
            "--rollout-max-response-len 1024",
            "--rollout-num-gpus 8",
            "--loss-aggregation token_mean",
        ],
        7 / 24,
        False,
    ),
    "slime.sh": ("slime", ["--calculate-per-token-loss", "--lr 1e-6"], 5 / 33, False),
    "miles.sh": ("miles", ["--lr 1e-6"], 7 / 16, True),
    "prime.toml": ("prime-rl", ["--rollout-batch-size 16", "--global-batch-size 128"], 5 / 32, True),
    "nemo.yaml": ("nemo-rl", ["--loss-aggregation sample_mean", "--rollout-batch-size 4"], 1 / 2, False),
}


VERL_SH = "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo"


def translated(tmp_path, name, text=None):
    path = tmp_path / name
    path.write_text(FILES[name] if text is None else text)
    document = read_document(str(path))
    launcher = launcher_of(document, None)
    translation = Translation(document, launcher.table())
    return launcher, translation, launcher.translate(translation)


def computed(translation):
    return [setting for setting in translation.unread if isinstance(setting.value, Expression)]


def test_every_launcher_has_a_case():
    assert {name for name, *_ in EXPECTED.values()} == {*all_launchers()}


@pytest.mark.parametrize("name", FILES)
def test_a_file_becomes_flags_and_an_objective(tmp_path, name):
    launcher, translation, objective = translated(tmp_path, name)
    expected, flags, uneven, exact = EXPECTED[name]
    assert launcher.name == expected
    command = " ".join(translation.words)
    assert [flag for flag in flags if flag not in command] == []
    assert objective.reduce(UNEVEN) == pytest.approx(uneven, rel=DOUBLE_ERROR)
    assert objective.exact is exact
    assert (objective.ours(objective.mode)(UNEVEN) == pytest.approx(uneven, rel=DOUBLE_ERROR)) is exact


@pytest.mark.parametrize("name", FILES)
def test_the_printed_flags_exist_here(tmp_path, name):
    parse(translated(tmp_path, name)[1].words)


@pytest.mark.parametrize("name", FILES)
def test_a_setting_that_is_not_known_is_listed(tmp_path, name, capsys):
    _, translation, _ = translated(tmp_path, name)
    unknown = [setting.key for setting in translation.unread if not isinstance(setting.value, Expression)]
    assert [re.sub(r"\W", "", key).replace("_", "") for key in unknown] == ["madeup"]
    assert cli.main(["translate", str(tmp_path / name)]) == 0
    assert unknown[0] in capsys.readouterr().out.partition("Not read, and could change learning")[2]


def test_python_is_parsed_and_never_run(tmp_path):
    _, translation, _ = translated(tmp_path, "trl.py")
    assert [setting.key for setting in computed(translation)] == ["learning_rate"]
    assert "--lr" not in translation.words


def test_a_variable_that_the_script_does_not_set_is_listed(tmp_path, monkeypatch):
    monkeypatch.setenv("MODEL", "from-the-environment")
    _, translation, _ = translated(tmp_path, "verl.sh")
    assert [(setting.key, setting.line) for setting in computed(translation)] == [("actor_rollout_ref.model.path", 9)]


def test_verl_ignores_clip_ratio_beside_its_defaults(tmp_path):
    text = "actor_rollout_ref: {actor: {clip_ratio: 0.3}}\n"
    _, translation, _ = translated(tmp_path, "verl.yaml", text)
    assert "--eps-clip 0.2" in " ".join(translation.words)
    text = "actor_rollout_ref: {actor: {clip_ratio: 0.3, clip_ratio_low: null}}\n"
    words = " ".join(translated(tmp_path, "verl.yaml", text)[1].words)
    assert "--eps-clip 0.3" in words and "--eps-clip-high 0.2" in words


def test_both_bounds_of_verls_cispo_are_kept(tmp_path):
    text = "actor_rollout_ref: {actor: {policy_loss: {loss_mode: cispo}, clip_ratio_low: 0.5, clip_ratio_high: 4}}\n"
    words = " ".join(translated(tmp_path, "verl.yaml", text)[1].words)
    assert "--policy-loss cispo --ratio-max 5" in words and "--ratio-min 0.5" in words


@pytest.mark.parametrize(("name", "text", "feature"), rows(__file__, "refused"))
def test_what_is_not_translated_is_refused_by_its_name(tmp_path, capsys, name, text, feature):
    (tmp_path / name).write_text(text)
    assert cli.main(["translate", str(tmp_path / name)]) == 2
    output = capsys.readouterr()
    assert feature in output.err and len(output.err.splitlines()) == 1 and output.out == ""


@pytest.mark.parametrize("words", ["--config-path={folder} --config-name=mine", "-cp {folder} -cn mine.yaml"])
def test_a_command_of_hydra_overrides_the_file_that_it_names(tmp_path, words):
    (tmp_path / "conf").mkdir()
    below = (
        "trainer: {test_freq: 5}\ndata: {train_files: a.parquet, val_files: b.parquet, filter_overlong_prompts: true}"
    )
    (tmp_path / "conf" / "mine.yaml").write_text(f"{FILES['verl.yaml']}{below}\n")
    for folder in ("conf", tmp_path / "conf"):
        command = f"python3 -m verl.trainer.main_ppo {words.format(folder=folder)} actor_rollout_ref.rollout.n=2"
        _, translation, objective = translated(tmp_path, "run.sh", f"{command} trainer.nnodes=3\n")
        text = " ".join(translation.words)
        assert "--n-samples-per-prompt 2" in text and "--actor-num-nodes 3" in text and "--lr 1e-06" in text
        assert "--advantage-estimator grpo" in text and objective.mode == "sample_mean"
        assert "--eval-prompt-data val b.parquet" in text and "--eval-interval 5" in text
        assert "--label-key reward_model.ground_truth" in text and "" not in translation.words
        assert [setting.key for setting in translation.unread] == ["made.up"]


def test_a_file_that_a_command_of_hydra_names_must_be_there(tmp_path, capsys):
    path = tmp_path / "run.sh"
    path.write_text("python3 -m verl.trainer.main_ppo --config-name ppo_trainer data.train_batch_size=8\n")
    assert cli.main(["translate", str(path)]) == 0
    path.write_text("python3 -m verl.trainer.main_ppo --config-name mine data.train_batch_size=8\n")
    capsys.readouterr()
    assert cli.main(["translate", str(path)]) == 2
    assert "those of mine.yaml, which is not there" in capsys.readouterr().err


def test_verl_without_a_scale_factor_divides_by_the_padded_width(tmp_path):
    text = "actor_rollout_ref: {actor: {loss_agg_mode: seq-mean-token-sum-norm}}\n"
    _, _, objective = translated(tmp_path, "verl.yaml", text)
    assert objective.reduce(UNEVEN) == pytest.approx(43 / 192)
    assert not objective.exact


@pytest.mark.parametrize(("files", "words"), [("[a, b]", 0), ("[a]", 1), ("a", 1)])
def test_several_files_of_prompts_are_a_mix(tmp_path, files, words):
    _, translation, _ = translated(
        tmp_path, "verl.yaml", f"algorithm: {{adv_estimator: grpo}}\ndata: {{train_files: {files}}}\n"
    )
    assert translation.words.count("--prompt-data") == words
    assert translation.words.count("--prompt-mix") == 1 - words
    parse(translation.words)


VERL = "actor_rollout_ref: {actor: {clip_ratio_low: 0.2}}\n"
TRL_REFERENCE = '"sync_ref_model": true, "ref_model_sync_steps": 64'
TRL_ENTROPY = '"use_adaptive_entropy": true, "entropy_coef_max": 0.5'


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("trl.json", f'"beta": 0.1, {TRL_REFERENCE}', "--ref-mixup-alpha 0.6 --ref-update-interval 64"),
        ("trl.json", TRL_REFERENCE, ""),
        ("trl.json", TRL_ENTROPY, "--entropy-target 0.2 --entropy-coef-max 0.5"),
        ("trl.json", '"entropy_target": 0.3', ""),
        ("verl.yaml", "type: adaptive, kl_coef: 0.01", "--kl-coef 0.01 --kl-target 0.1 --kl-horizon 10000"),
        ("verl.yaml", "type: fixed, target_kl: 1", ""),
    ],
)
def test_weights_that_adapt_and_a_reference_that_follows(tmp_path, name, text, words):
    """The flags of this feature are those given; without the feature's switch there are none."""
    in_file = {
        "trl.json": f'{{"loss_type": "grpo", {text}}}',
        "verl.yaml": f"{VERL}algorithm: {{use_kl_in_reward: true, kl_ctrl: {{{text}}}}}\n",
    }
    _, translation, _ = translated(tmp_path, name, in_file[name])
    command = " ".join(map(str, translation.words))
    flags = ("--ref-update-interval", "--ref-mixup-alpha", "--kl-target", "--kl-horizon", "--entropy-target")
    assert all(pair in command for pair in re.findall(r"--\S+ \S+", words))
    assert bool(words) == any(flag in command for flag in flags)
    parse(translation.words)


def test_trl_token_mean_with_several_steps_per_generation_is_not_ours(tmp_path):
    text = '{"loss_type": "dapo", "gradient_accumulation_steps": 2, "steps_per_generation": 4}'
    _, _, objective = translated(tmp_path, "trl.json", text)
    assert objective.reduce(UNEVEN) == pytest.approx(5 / 40)
    assert not objective.exact
    _, _, objective = translated(tmp_path, "trl.json", '{"loss_type": "dapo", "gradient_accumulation_steps": 2}')
    assert objective.exact


@pytest.mark.parametrize(("name", "text", "place"), rows(__file__, "bad_files"))
def test_a_bad_file_is_one_sentence_with_file_and_line(tmp_path, capsys, name, text, place):
    path = tmp_path / name
    path.write_text(text)
    assert cli.main(["translate", str(path)]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert f"{path}, {place}" in output.err
    assert len(output.err.splitlines()) == 1


def test_a_text_that_yaml_takes_for_a_broken_number_is_text(tmp_path):
    assert translated(tmp_path, "a.sh", f"{VERL_SH} 'data.prompt_key=!!int +' 'trainer.made_up={{a:!!int +}}'")[1].words


def test_a_value_of_another_kind_is_text(tmp_path):
    text = "loss_type: grpo\noutput_dir: .inf\nreport_to: [[wandb]]\n"
    _, translation, _ = translated(tmp_path, "trl.yaml", text)
    assert "--use-wandb" not in translation.words and "inf" in translation.words


@pytest.mark.parametrize("data", [b"\xff\xfe\xfa", b"a\x00b", b""])
@pytest.mark.parametrize("suffix", ["json", "yaml", "toml", "py", "sh"])
def test_bytes_that_are_no_text_are_one_sentence(tmp_path, capsys, suffix, data):
    path = tmp_path / f"a.{suffix}"
    path.write_bytes(data)
    assert cli.main(["translate", str(path)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_missing_file_a_folder_and_another_suffix_are_one_sentence(tmp_path, capsys):
    (tmp_path / "a.txt").touch()
    faults = {"none.yaml": "no such file", "none": "no such file", "": "is a folder", "a.txt": "'.txt' is not known"}
    for name, fault in faults.items():
        assert cli.main(["translate", str(tmp_path / name)]) == 2
        output = capsys.readouterr().err
        assert fault in output and len(output.splitlines()) == 1


@pytest.mark.parametrize(("name", "text", "expected", "absent"), rows(__file__, "needed"))
def test_the_command_has_what_its_flags_need(tmp_path, name, text, expected, absent):
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "rows").touch()
    translation = translated(tmp_path, name, text)[1]
    words = " ".join(translation.words)
    assert expected in words and absent not in words and translation.unread == []
    parse(translation.words)


ROLLOUT = "actor_rollout_ref.rollout."
VERL_GRPO = f"{VERL_SH} data.train_batch_size=1024 actor_rollout_ref.rollout.n=8"


@pytest.mark.parametrize(("name", "text", "expected"), rows(__file__, "translated"))
def test_the_command_starts_with_what_it_asks_for(tmp_path, name, text, expected):
    words = translated(tmp_path, name, text)[1].words
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    (tmp_path / "data.jsonl").write_text('{"prompt": "", "input": ""}')
    added = ["--hf-checkpoint", str(tmp_path), "--prompt-data", str(tmp_path / "data.jsonl"), "--rm-type", "length"]
    for flag, value in (("--rollout-max-response-len", "8"), ("--rollout-batch-size", "256"), ("--num-epoch", "1")):
        added += [flag, value] if flag not in words else []
    assert expected in " ".join(words)
    judge(read_command([*added, *words, "--device", "cuda", "--explain"]))


def test_it_needs_no_torch(tmp_path):
    (tmp_path / "a.json").write_text(FILES["trl.json"])
    code = "import sys; from miles import cli; cli.main(sys.argv[1:]); assert not {'torch', 'ray'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", code, "translate", str(tmp_path / "a.json")], check=True, capture_output=True)


def test_both_spellings_of_openrlhf_become_the_same_flags(tmp_path):
    """But for what has another default, or no flag, in the earlier releases."""
    values = {
        "--algo.advantage.estimator": "gae",
        "--algo.kl.init_coef": "0.02",
        "--actor.adam.betas": "0.8 0.9",
        "--actor.eps_clip_low_high": "0.1 0.3",
        "--actor.policy_loss_type": "ppo",
        "--actor.lr_scheduler": "constant_with_warmup",
        "--data.label_key": "label",
        "--vllm.num_engines": "2",
        "--critic.adam.lr": "3e-6",
        "--train.batch_size": "64",
    }
    earlier = {row.now: key for key, row in table_of("openrlhf_underscores").rows.items()}
    both, differ = [], ("--loss-aggregation", "--adam-eps", "--micro-batch-size")  # other defaults, or no such flag
    for names in (dict.fromkeys(values), earlier):
        words = " ".join(f"{names[key] or key} {value}" for key, value in values.items())
        translation = translated(tmp_path, "train.sh", f"python3 -m openrlhf.cli.train_ppo_ray {words}\n")[1]
        assert translation.unread == []
        both.append({group for group in translation.groups if group[0] not in differ})
    assert both[0] == both[1] and ("--critic-lr", "3e-06") in both[0] and ("--policy-loss", "ppo") in both[0]


def test_a_file_of_one_process_of_prime_rl_is_refused(tmp_path, capsys):
    (tmp_path / "train.toml").write_text("max_steps = 5\n[optim]\nlr = 3e-6\n")
    assert cli.main(["translate", str(tmp_path / "train.toml"), "--from", "prime-rl"]) == 2
    assert "optim.lr = 3e-06: is a setting of one process alone" in capsys.readouterr().err


def test_a_file_of_another_release_is_not_translated_to_defaults(tmp_path, capsys):
    path = tmp_path / "train.sh"
    path.write_text("python3 -m openrlhf.cli.train_ppo_ray --base_model model --zero 3\n")
    assert cli.main(["translate", str(path)]) == 2
    output = capsys.readouterr()
    assert output.out == "" and f"{path}: none of its 2 settings, such as --base_model = model, is one of" in output.err


def flags_of_computed():
    flags = {"--kl-coef", "--kl-loss-coef", "--advantage-estimator", "--num-epoch", "--lr-decay-style", "--adam-beta1"}
    return flags | {"--loss-aggregation", "--prompt-data"}


COMPUTED = {
    "trl.py": "GRPOConfig(beta=args.b, scale_rewards=args.s, num_train_epochs=args.e, lr_scheduler_type=args.l)",
    "openrlhf.sh": "python3 -m openrlhf.cli.train_ppo_ray --algo.kl.init_coef $K --algo.advantage.estimator $E "
    "--actor.adam.betas $A 0.9 --actor.loss_agg_mode $M\n",
    "verl.sh": "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=$E actor_rollout_ref.actor.kl_loss_coef=$K "
    "actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.optim.betas=[0.9,$B] trainer.total_epochs=$N "
    "actor_rollout_ref.actor.loss_agg_mode=$M\n",
    "nemo.yaml": "loss_fn: {token_level_loss: '${a.b}', reference_policy_kl_penalty: '${a.c}'}\n"
    "policy: {optimizer: {kwargs: {betas: [0.9, '${a.d}']}}}\n",
    "verl.yaml": "algorithm: {adv_estimator: grpo}\ndata: {train_files: ['${a.b}/rows.parquet']}\n",
}


@pytest.mark.parametrize(
    ("name", "left"),
    [
        ("trl.py", {"--loss-aggregation", "--adam-beta1"}),
        ("openrlhf.sh", {"--lr-decay-style", "--num-epoch"}),
        ("verl.sh", {"--lr-decay-style"}),
        ("nemo.yaml", {"--advantage-estimator", "--num-epoch", "--lr-decay-style"}),
        ("verl.yaml", flags_of_computed() - {"--kl-coef", "--kl-loss-coef", "--prompt-data"}),
    ],
)
def test_a_value_that_is_computed_becomes_no_flag(tmp_path, name, left):
    """Neither does the default that the other trainer has instead of it."""
    _, translation, _ = translated(tmp_path, name, COMPUTED[name])
    assert flags_of_computed() & {*translation.words} == left
    assert not any("$" in word or "args" in word for word in translation.words)
    names = {setting.key for setting in computed(translation)}
    assert len(names) == COMPUTED[name].count("$") + COMPUTED[name].count("args.")


def test_arguments_by_position_are_read_and_those_of_a_function_are_not_constants(tmp_path):
    text = "lr = 1e-6\ndef main(lr):\n a = GRPOConfig(learning_rate=lr, seed=3)\n GRPOTrainer('model', f, a, rows)\n"
    _, translation, _ = translated(tmp_path, "trl.py", text)
    assert "--hf-checkpoint model" in " ".join(translation.words) and "--lr" not in translation.words
    assert [setting.key for setting in computed(translation)] == ["learning_rate", "reward_funcs", "train_dataset"]


@pytest.mark.parametrize(("estimator", "flags"), [("gae", 3), ("reinforce", 1), ("group_norm", 0)])
def test_openrlhf_gives_an_estimator_only_what_it_reads(tmp_path, estimator, flags):
    values = "--algo.advantage.gamma 0.9 --algo.advantage.lambd 0.95 --critic.value_clip 0.3"
    text = f"python3 -m openrlhf.cli.train_ppo_ray --algo.advantage.estimator {estimator} {values}\n"
    _, translation, _ = translated(tmp_path, "openrlhf.sh", text)
    assert len({"--gamma", "--lambd", "--value-clip"} & {*translation.words}) == flags
    assert translation.unread == []


NEMO_BASE = """grpo: {num_prompts_per_step: 32, num_generations_per_prompt: 16, max_num_steps: 400}
policy: {train_global_batch_size: 128, max_total_sequence_length: 512, optimizer: {kwargs: {lr: 4.0e-6}}}
loss_fn: {reference_policy_kl_penalty: 0.0, ratio_clip_max: 0.25, token_level_loss: false}
"""
SCRIPT = """N=16
BASE=$((1024 * 2))
COMMON="data.train_batch_size=$N actor_rollout_ref.model.path=$HOME/model data.max_response_length=$BASE"
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo $COMMON actor_rollout_ref.rollout.n=$GROUP
"""
TRL = "num_generations: 8\nper_device_train_batch_size: 8\n"


@pytest.mark.parametrize(("name", "text", "has", "lacks"), rows(__file__, "right"))
def test_the_command_is_the_run_of_the_file(tmp_path, name, text, has, lacks):
    _, translation, _ = translated(tmp_path, name, text)
    groups = {" ".join(group).replace(" ", "=", 1) for group in translation.groups}
    assert {*has.split()} <= groups
    assert not {*lacks.split()} & (groups | {group.partition("=")[0] for group in groups})
    parse(translation.words)


@pytest.mark.parametrize(("name", "text", "setting", "sentence"), rows(__file__, "different"))
def test_what_differs_is_named(tmp_path, name, text, setting, sentence):
    _, translation, _ = translated(tmp_path, name, text)
    assert [entry for entry in translation.differences if entry.label.startswith(setting) and sentence in entry.why]
    parse(translation.words)


@pytest.mark.parametrize(
    ("name", "text", "listed"),
    [
        ("a.sh", f"C='{VERL_SH}'\nif $X; then C=\"$C data.seed=1\"; fi\n$C {ROLLOUT}n=8\n", "$C is set in a branch"),
        ("a.sh", f"{VERL_SH} trainer.made_up=3", "trainer.made_up = 3"),
        ("a.py", "class A(GRPOTrainer): pass\nA('m', f, GRPOConfig())", "A = another trainer than GRPOTrainer"),
        ("a.py", "a = GRPOConfig()\nb = GRPOTrainer(args=a)\nb.args.beta = 1\n", "beta = b.args.beta = 1"),
    ],
)
def test_what_is_not_read_is_listed(tmp_path, capsys, name, text, listed):
    (tmp_path / name).write_text(text)
    assert cli.main(["translate", str(tmp_path / name)]) == 0
    assert listed in capsys.readouterr().out.partition("Not read, and could change learning")[2]


@pytest.mark.parametrize("is_on", [False, True])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.sh", f"{VERL_SH} reward_model.overlong_buffer.len=8 reward_model.overlong_buffer.enable={{}}\n"),
        ("a.yaml", "grpo: {{reward_shaping: {{overlong_buffer_length: 8, enabled: {}}}}}\n"),
    ],
)
def test_what_is_switched_off_is_not_listed(tmp_path, name, text, is_on):
    _, translation, _ = translated(tmp_path, name, text.format(is_on))
    listed = [entry.label for entry in translation.differences] + [setting.key for setting in translation.unread]
    assert any("buffer" in label for label in listed) is is_on


def test_a_clamp_of_the_kl_that_is_null_is_not_named(tmp_path):
    text = "loss_fn: {reference_policy_kl_penalty: 0.1, kl_input_clamp_value: null}\n"
    (why,) = (
        entry.why for entry in translated(tmp_path, "a.yaml", text)[1].entries if entry.why and "kl_pen" in entry.label
    )
    assert "values are clamped to 10" in why and "inputs" not in why


def test_null_is_not_read_as_a_default_that_is_not_null(tmp_path):
    _, translation, _ = translated(tmp_path, "a.yaml", f"{TRL}max_completion_length: null\n")
    assert "--rollout-max-response-len" not in translation.words
    assert any("null, and not its default 512" in entry.why for entry in translation.entries)


def test_settings_of_a_critic_are_not_listed_without_one(tmp_path):
    value = "value: {model_name: b, train_global_batch_size: 8, max_grad_norm: 0.5}\n"
    _, translation, _ = translated(tmp_path, "a.yaml", NEMO_BASE + value)
    assert not [setting.key for setting in translation.unread if setting.key.startswith("value.")]


def test_quoted_text_in_an_object_of_hydra_stays_as_written(tmp_path):
    _, translation, _ = translated(
        tmp_path, "a.sh", f"{VERL_SH} {ROLLOUT}n=8 'actor_rollout_ref.model={{path:\"x:y\"}}'"
    )
    assert "x:y" in map(str, translation.words)


def test_a_child_has_the_settings_of_its_parent(tmp_path, capsys):
    (tmp_path / "base.yaml").write_text(NEMO_BASE)
    child = "defaults: base.yaml\ngrpo: {num_prompts_per_step: 64}\npolicy: {optimizer: null}\n"
    words = " ".join(translated(tmp_path, "child.yaml", child)[1].words)
    for flags in ("--rollout-batch-size 64", "--n-samples-per-prompt 16", "--num-rollout 400", "--eps-clip-high 0.25"):
        assert flags in words
    assert "--lr 4" not in words  # null takes the parent's block away
    (tmp_path / "base.yaml").unlink()
    assert cli.main(["translate", str(tmp_path / "child.yaml")]) == 2
    assert "base.yaml" in capsys.readouterr().err


def test_a_command_of_nemo_rl_overrides_the_file_that_it_names(tmp_path):
    (tmp_path / "base.yaml").write_text(NEMO_BASE)
    text = (
        "CONFIG=$(cd $(dirname $0) && pwd)/base.yaml\n"
        "uv run examples/run_grpo_math.py --config $CONFIG grpo.num_prompts_per_step=64 ++policy.max_grad_norm=0.5 $@\n"
    )
    launcher, translation, _ = translated(tmp_path, "run.sh", text)
    words = " ".join(translation.words)
    assert launcher.name == "nemo-rl" and translation.unread == [] and [*translation.document.elsewhere] == ["$@"]
    for flags in ("--rollout-batch-size 64", "--n-samples-per-prompt 16", "--lr 4e-06", "--clip-grad 0.5"):
        assert flags in words


@pytest.mark.parametrize(("words", "samples"), [("", 64), (" --num_processes 2", 16)])
def test_the_number_of_processes_is_in_the_file_of_accelerate(tmp_path, words, samples):
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "zero3.yaml").write_text("distributed_type: DEEPSPEED\nnum_processes: 8\n")
    text = f"accelerate launch --config_file recipes/zero3.yaml{words} grpo.py --num_generations 8\n"
    translation = translated(tmp_path, "run.sh", text)[1]
    assert f"--global-batch-size {samples}" in " ".join(translation.words) and translation.unread == []
    assert not [entry for entry in translation.differences if "number of processes" in entry.why]


def test_references_within_a_file_are_followed(tmp_path):
    text = (
        "grpo: {num_prompts_per_step: 4}\npolicy: {max_total_sequence_length: 512, train_micro_batch_size: 4,\n"
        " dynamic_batching: {enabled: true, train_mb_tokens: '${mul:${policy.max_total_sequence_length}, "
        "${policy.train_micro_batch_size}}'},\n generation: {max_new_tokens: '${policy.max_total_sequence_length}'}}\n"
    )
    words = " ".join(translated(tmp_path, "a.yaml", text)[1].words)
    assert "--max-tokens-per-gpu 2048" in words and "--rollout-max-response-len 511" in words


def test_what_the_shell_computes_is_computed_and_the_rest_is_left_out_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "of-this-user")
    _, translation, _ = translated(tmp_path, "run.sh", SCRIPT)
    words = " ".join(translation.words)
    assert "--rollout-batch-size 16" in words and "--rollout-max-response-len 2048" in words
    assert "--global-batch-size" not in words and "--n-samples-per-prompt" not in words
    assert "--hf-checkpoint ~/model" in words and "of-this-user" not in words
    assert [setting.value.text for setting in computed(translation)] == ["$GROUP"]


def test_the_arguments_of_the_chat_template_are_written(tmp_path):
    for name, text in (
        ("a.sh", f"{VERL_GRPO} +data.apply_chat_template_kwargs.enable_thinking=False"),
        ("a.yaml", "num_generations: 4\nchat_template_kwargs: {enable_thinking: false}\n"),
        ("a.py", "GRPOConfig(chat_template_kwargs={'enable_thinking': False})"),
        ("b.sh", "trl grpo --num_generations 4 --chat_template_kwargs '{\"enable_thinking\": false}'"),
        ("b.yaml", "grpo: {seed: 1}\npolicy: {tokenizer: {chat_template_kwargs: {enable_thinking: false}}}\n"),
    ):
        groups = translated(tmp_path, name, text)[1].groups
        assert ("--apply-chat-template-kwargs", '{"enable_thinking": false}') in groups


def test_images_are_read_from_their_column(tmp_path):
    for name, text, column in (
        ("a.sh", "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.image_key=pictures", "pictures"),
        ("a.sh", f"{VERL_GRPO} actor_rollout_ref.model.path=Qwen/Qwen2.5-VL-7B-Instruct", "images"),
        ("a.sh", "python3 -m openrlhf.cli.train_ppo_ray --data.max_images_per_prompt 1 --data.image_key p", "p"),
        ("a.yaml", "model_name_or_path: HuggingFaceTB/SmolVLM2-2.2B\nnum_generations: 4\n", "images"),
        ("a.yaml", "grpo: {num_prompts_per_step: 8}\npolicy: {model_name: Qwen/Qwen3-VL-4B}\n", "images"),
    ):
        _, translation, _ = translated(tmp_path, name, text)
        assert ("--multimodal-keys", json.dumps({"image": column})) in translation.groups
        assert json.loads(parse(translation.words).data.multimodal_keys or "")["image"] == column
    assert "--multimodal-keys" not in translated(tmp_path, "a.sh", VERL_GRPO)[1].words


@pytest.mark.parametrize(("name", "text", "is_same"), rows(__file__, "proved"))
def test_a_loss_is_called_the_same_only_where_conformance_has_proved_it(tmp_path, name, text, is_same, capsys):
    (tmp_path / name).write_text(text)
    assert cli.main(["translate", str(tmp_path / name)]) == 0
    assert ("The gradient of a step's loss is the same" in capsys.readouterr().out) is is_same


@pytest.mark.parametrize("program", ["-m recipe.sppo.main_sppo", "-u my_verl/main_ppo_of_mine.py"])
def test_a_program_on_top_of_verl_and_further_commands_are_named(tmp_path, capsys, program):
    text = VERL_GRPO.replace("-m verl.trainer.main_ppo", program)
    (tmp_path / "a.sh").write_text(f"{text}\n{text} data.train_batch_size=8\n")
    assert cli.main(["translate", str(tmp_path / "a.sh")]) == 0
    out = capsys.readouterr().out
    assert f"{program.split()[1]}: another program than verl.trainer.main_ppo" in out
    assert "2 commands train here (lines 1, 2): the last one is translated" in out and "--rollout-batch-size 8" in out


@pytest.mark.parametrize(
    ("name", "text", "model"),
    [
        ("a.sh", "python3 -m verl.trainer.main_ppo data.train_files=$DATA actor_rollout_ref.model.path=", "$MODEL"),
        ("a.sh", "python3 verl/trainer/main_ppo.py data.train_files=$DATA actor_rollout_ref.model.path=", "a/b"),
        ("a.py", "GRPOTrainer(train_dataset=load(where), model=", "args.model)"),
    ],
)
def test_how_rows_are_read_does_not_depend_on_unknown_names(tmp_path, capsys, name, text, model):
    (tmp_path / name).write_text(text + model)
    assert cli.main(["translate", str(tmp_path / name)]) == 0
    out = capsys.readouterr().out
    assert "--input-key prompt" in out and "--apply-chat-template" in out and "another program" not in out


def test_a_trainer_without_a_configuration_has_the_defaults(tmp_path, capsys):
    text = 'GRPOTrainer(model="a/b", train_dataset=load_dataset("c/d", split="train"))'
    words = " ".join(translated(tmp_path, "a.py", text)[1].words)
    for flags in (
        "--hf-checkpoint a/b",
        "--prompt-data hf:c/d",
        "--n-samples-per-prompt 8",
        "--loss-aggregation token_mean",
    ):
        assert flags in words
    for text, what in (
        ("SFTTrainer(model='a', args=SFTConfig())", "SFTTrainer is SFT"),
        ("DPOTrainer(args=DPOConfig(beta=0.1))", "DPOTrainer is DPO"),
        ("GRPOTrainer(args=TrlParser(x).parse())", "its settings are the arguments of its command"),
    ):
        (tmp_path / "b.py").write_text(text)
        assert cli.main(["translate", str(tmp_path / "b.py")]) == 2
        assert what in capsys.readouterr().err
