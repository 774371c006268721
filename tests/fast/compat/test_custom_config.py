"""--custom-config-path: settings from a YAML file."""

import pytest

from miles.base.flags import FlagError
from miles.config.functions import flags_view


@pytest.fixture
def read(accepted, tmp_path):
    def run(text, flags="", without=""):
        file = tmp_path / "config.yaml"
        file.write_text(text)
        return accepted(f"{flags} --custom-config-path {file}", without)

    return run


def test_names_of_flags_replace_those_of_the_command(read):
    settings = read("use_tis: true\ntis_clip: 3\neval_interval: null\nuse_kl_loss: false\n", "--tis-clip 5").settings
    assert settings.loss.use_tis and settings.loss.tis_clip == 3 and not settings.loss.use_kl_loss


def test_false_and_null_leave_a_flag_of_the_command_out(read):
    command = "--use-kl-loss --kl-loss-coef 0.1 --eval-interval=3 --use-tis"
    settings = read("use_kl_loss: false\nkl_loss_coef: null\neval-interval: null\n", command).settings
    assert settings.loss.use_tis and not settings.loss.use_kl_loss and settings.evaluation.eval_interval is None


def test_lists_flags_of_megatron_and_of_sglang_are_read_too(read):
    settings = read(
        "rollout_stop_token_ids: [5, 6]\nnum_layers: 4\nsglang_mem_fraction_static: 0.5\n",
        "--train-backend megatron --rollout-engine sglang --device cuda",
    ).settings
    assert settings.rollout.stop_token_ids == (5, 6)
    assert dict(settings.megatron_overrides) == {"num_layers": 4}
    assert flags_view(settings).num_layers == 4
    assert settings.server_flags.server == ("--mem-fraction-static", "0.5")


def test_other_names_are_for_functions_of_the_users(read):
    settings = read("depth: 3\n", "--rollout-sample-filter-path mine:mark").settings
    args = flags_view(settings)
    assert (args.depth, args.n_samples_per_prompt) == (3, 4)
    with pytest.raises(FlagError, match="no flags are named depth, and no function of yours reads them"):
        read("depth: 3\n")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("- a\n", "holds no object"),
        ("a: [\n", r"is not YAML \(.*, line 2\); correct it there"),
        ("tis_clip: high\nuse_tis: true\n", "--tis-clip high: must be a number"),
    ],
)
def test_a_wrong_file_is_refused(read, text, expected):
    with pytest.raises(FlagError, match=expected):
        read(text)


def test_a_missing_file_is_refused(accepted):
    with pytest.raises(FlagError, match="--custom-config-path nowhere.yaml: cannot be read"):
        accepted("--custom-config-path nowhere.yaml")
