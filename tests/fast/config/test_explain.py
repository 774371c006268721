"""What --explain states is true of the run."""

from fractions import Fraction

import pytest

from miles.commands import train
from miles.commands.explain import main
from miles.config.explain import explain, without_effect
from miles.objective import chosen as objective
from miles.objective.aggregation import token_weights
from tests.fast.support.rows import rows
from tests.fast.support.small_checkpoint import save_checkpoint

MODES = {
    "sample_mean": "--loss-aggregation sample_mean",
    "prompt_mean": "--loss-aggregation prompt_mean",
    "token_mean": "--loss-aggregation token_mean",
    "constant": "--loss-aggregation constant --loss-aggregation-divisor 100",
    "delta_l": "--loss-aggregation delta_l --loss-aggregation-divisor 100",
}


def objective_formula(settings):
    return objective.objective_formula(settings.loss, settings.step_shape)


def objective_in_words(settings):
    return objective.objective_in_words(settings.loss, settings.step_shape)


def test_explain_prints_and_stops(command, capsys):
    with pytest.raises(SystemExit) as caught:
        train.main(command("--pg-loss-divisor 24 --explain --actor-num-gpus-per-node 8"))
    text = capsys.readouterr().out
    assert caught.value.code == 0
    for said in (
        "L = 24",
        "N = 32",
        "--pg-loss-divisor 24 is read as",
        "metrics.jsonl",
        "starts a local Ray",
        "8 trainer",
    ):
        assert said in text


def test_a_folder_of_another_runs_checkpoints_is_told_before_the_start(command, tmp_path, capsys):
    save_checkpoint(tmp_path, 2)
    for more, is_told in (("", True), (" --start-over", False)):
        with pytest.raises(SystemExit) as ended:
            main(command(f"--save {tmp_path}{more}"))
        text = " ".join(capsys.readouterr().out.split())
        assert ended.value.code == 0
        assert (f"a start on this host would be refused: --save {tmp_path}: holds checkpoints of " in text) == is_told


@pytest.mark.parametrize(
    "flags",
    [
        *MODES.values(),
        "--use-kl-loss",
        "--custom-pg-loss-reducer-function-path mine:reducer",
        "--loss-type sft_loss --load-debug-rollout-data d{rollout_id}",
        "--save s --save-hf h --save-debug-rollout-data d{rollout_id} --num-steps-per-rollout 2 --ray-address auto",
    ],
)
def test_every_kind_of_run_can_be_explained(validated, flags):
    result = validated(flags, "--rm-type" if "sft_loss" in flags else "")
    text = explain(result)
    assert objective_formula(result.settings).splitlines()[0] in text
    assert all(len(line) <= 112 for line in text.splitlines())
    assert "None" not in text


def test_modes_read_differently(validated):
    all_settings = [validated(flags).settings for flags in MODES.values()]
    for say in (objective_formula, objective_in_words):
        assert len({say(settings) for settings in all_settings}) == len(MODES)


def test_terms_of_the_formula(validated):
    settings = validated(
        "--use-kl-loss --kl-loss-coef 0.02 --kl-loss-type k3 --entropy-coef 0.001 --eps-clip-high 0.28"
    )
    formula = objective_formula(settings.settings)
    assert "loss = pg_loss + 0.02 KL_k3(policy, reference) - 0.001 entropy" in formula
    assert "clip(ρ, 0.8, 1.28)" in formula
    assert "KL" not in objective_formula(validated("--use-kl-loss").settings), "only measured"


def test_what_is_left_to_your_loss_is_not_said_to_be_added(validated):
    custom = "--loss-type custom_loss --custom-loss-function-path mine:f"
    words = objective_in_words(validated(f"{custom} --use-kl-loss --kl-loss-coef 0.1 --entropy-coef 0.01").settings)
    assert "is added" not in words and "Entropy is" not in words
    assert "is given the log-probs of the reference model" in words
    adapted = validated(f"{custom} --advantage-estimator ppo --kl-coef 0.1 --kl-target 0.2").settings
    assert "kl_coef <- kl_coef (1 + clip(KL / 0.2" in objective_formula(adapted)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("", "A = mine:f(...) instead of --advantage-estimator grpo"),
        ("--advantage-estimator ppo", "reward, or its difference from a mean, is what mine:f(...) says"),
    ],
)
@pytest.mark.parametrize("path", ["--custom-reward-post-process-path", "--custom-convert-samples-to-train-data-path"])
def test_advantages_of_a_function_are_not_said_to_be_the_estimators(validated, path, flags, said):
    lines = objective_formula(validated(f"{path} mine:f {flags}").settings).splitlines()
    assert said in lines
    assert not any(line.startswith("A = (reward") for line in lines)


def test_groups_that_are_left_out_of_a_step_are_left_out_of_its_counts(validated):
    [line] = set(objective_formula(validated("--drop-zero-std-groups").settings).splitlines()) - set(
        objective_formula(validated().settings).splitlines()
    )
    assert "without the groups whose A are all 0, and its counts too" in line


@pytest.mark.parametrize("estimator", ["ppo", "vapo", "reinforce_plus_plus", "optimal_token_baseline"])
def test_the_tokens_of_a_trajectory_and_of_the_step_have_different_names(validated, estimator):
    """T counts the tokens of a step under token_mean, so the last token of a trajectory is not token T."""
    flags = f"--advantage-estimator {estimator} --normalize-advantages --loss-aggregation token_mean"
    formula = objective_formula(validated(flags).settings)
    assert "T = loss tokens of the step" in formula
    assert "= T]" not in formula and "0.05 T" not in formula


@pytest.mark.parametrize("mode", MODES)
def test_token_weights_are_those_of_the_objective(validated, mode):
    """Over the imagined step the weights add up to 1 under the means, to T / (L N) under constant.

    Under delta_l each prompt's harmonic mean of the lengths is divided by L.
    """
    settings = validated(MODES[mode]).settings
    short, long = 3, 40
    weights = token_weights(settings.loss, settings.step_shape, short, long)[mode]
    n = settings.global_batch_size
    tokens = (n // 4 * short, n // 4 * long, n // 2 * long)
    mass = sum(count * weight for count, weight in zip(tokens, weights, strict=True))
    harmonic = (Fraction(2, 1) / (Fraction(1, short) + Fraction(1, long)) + long) / 2
    expected = {"constant": Fraction(sum(tokens), 100 * n), "delta_l": harmonic / 100}.get(mode, 1)
    assert mass == pytest.approx(float(expected))


def test_flags_without_effect(validated):
    assert any("nothing is clipped" in line for line in without_effect(validated().settings))
    assert without_effect(validated("--num-steps-per-rollout 2").settings) == []
    greedy = without_effect(validated("--num-steps-per-rollout 2 --rollout-temperature 0").settings)
    assert any("greedy" in line for line in greedy)


@pytest.mark.parametrize(("flags", "said"), rows(__file__, "test_ranks_that_share_tokens_count_once"))
def test_ranks_that_share_tokens_count_once(validated, flags, said):
    text = " ".join(explain(validated(flags)).split())
    assert " ".join(said.split()) in text


def test_ranks_of_each_node_are_shown_and_groups_that_span_nodes_noted(validated):
    megatron = "--train-backend megatron --tensor-model-parallel-size 4 --actor-num-nodes 2 --actor-num-gpus-per-node"
    whole, cut = (validated(f"{megatron} {size}") for size in (8, 6))
    assert "nodes: ranks 0 1 .. 7 | 8 9 .. 15" in explain(whole)
    assert "nodes: ranks 0 1 .. 5 | 6 7 .. 11" in explain(cut)
    said = "--tensor-model-parallel-size 4 does not divide --actor-num-gpus-per-node 6"
    assert [any(said in note for note in one.notes) for one in (whole, cut)] == [False, True]
    assert "nodes: " not in explain(validated())


@pytest.mark.parametrize("layout", ["", "--context-parallel-size 2", "--train-backend megatron"])
def test_balance_data_needs_replicas(validated, layout):
    two_ranks = f"--balance-data --num-steps-per-rollout 2 --actor-num-gpus-per-node 2 {layout}"
    if "megatron" in layout:
        two_ranks += " --tensor-model-parallel-size 2"
    lines = without_effect(validated(two_ranks).settings)
    assert any("--balance-data" in line for line in lines) == bool(layout)
