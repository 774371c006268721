"""A start is refused at once if this host lacks a requirement; a plan for another host names it in a note."""

import pytest

from miles.base.flags import FlagError
from miles.base.host import num_gpus
from miles.compat.border import parse_or_exit, read_command
from miles.config.parser import judge, parse
from miles.config.validate import validate
from miles.run.launcher import _resume_point
from tests.fast.support.rows import rows


@pytest.fixture
def started(monkeypatch):
    """Return ``started(command)``: the refusals of a start on a host of ``gpus`` GPUs, also as the notes of a plan."""

    def refusals(words, gpus):
        monkeypatch.setattr("miles.config.rules.num_gpus", lambda: gpus)
        monkeypatch.setattr("miles.config.host_share.has_gpu", lambda: bool(gpus))
        monkeypatch.setattr("miles.config.parser.has_gpu", lambda: bool(gpus))
        try:
            judge(read_command(words), starts=True)
            messages = ()
        except FlagError as error:
            messages = error.messages
        notes = judge(read_command(words)).surprises
        lead = "a start on this host would be refused: "
        assert [note.removeprefix(lead) for note in notes if note.startswith(lead)] == list(messages)
        return messages

    return refusals


@pytest.mark.parametrize(
    ("flags", "gpus", "message"), rows(__file__, "test_what_this_host_lacks_is_refused_by_a_start")
)
def test_what_this_host_lacks_is_refused_by_a_start(started, command, flags, gpus, message):
    (refusal,) = started(command(flags), gpus)
    assert refusal.startswith(message)


@pytest.mark.parametrize(
    ("flags", "gpus"),
    [
        ("--device cuda --colocate", 8),
        ("--device cuda", 9),
        ("--device cuda", None),  # nobody knows
        ("--device cuda --actor-num-nodes 4 --ray-address 10.0.0.1:6379", 0),
        ("--load kept --save ./kept", 0),
        ("--load lost --use-kl-loss --kl-loss-coef 0.1 --ref-load ref", 0),
    ],
)
def test_what_may_work_is_started(started, command, flags, gpus):
    assert started(command(flags), gpus) == ()


@pytest.mark.parametrize("name", ["iter_0000004", ".replaced_iter_0000004", "state.json"])
def test_a_folder_with_a_checkpoint_is_loaded_or_found_damaged(started, command, tmp_path, name):
    (refusal,) = started(command(f"--load {tmp_path}"), 0)
    assert refusal.startswith(f"--load {tmp_path}: holds no checkpoint; check the path")
    (tmp_path / "config.json").touch()
    (refusal,) = started(command(f"--load {tmp_path}"), 0)
    assert refusal.startswith(f"--load {tmp_path}: is a model, and no checkpoint of a run; give it to --hf-checkpoint")
    (tmp_path / name).mkdir()
    assert started(command(f"--load {tmp_path}"), 0) == ()


def test_all_errors_are_told_together(command, capsys):
    with pytest.raises(SystemExit):
        parse_or_exit(command("--lr -1 --load lost"))
    told = capsys.readouterr().err
    assert "--lr -1" in told and "--load lost: there is no such folder" in told


def test_an_empty_folder_in_remote_storage_is_refused_by_the_launcher(command, tmp_path):
    flags = f"--load memory://nothing/here --output-dir {tmp_path}"
    with pytest.raises(ValueError, match=r"--load memory://nothing/here: holds no checkpoint; check the path"):
        _resume_point(validate(parse(command(flags))))


@pytest.mark.parametrize(
    ("visible", "files", "number"),
    [(None, 3, 3), (None, 0, 0), ("0,2", 3, 2), ("", 3, 0), ("-1", 3, 0), ("1,-1,0", 3, 1)],
)
def test_gpus_are_counted_as_processes_see_them(monkeypatch, tmp_path, visible, files, number):
    for name in ("nvidiactl", "null", *(f"nvidia{place}" for place in range(files))):
        (tmp_path / name).touch()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert num_gpus(str(tmp_path)) == number
