"""The loop without Ray: the order of events, when saving and evaluation are due, and how a run resumes."""

import signal
from functools import partial
from types import SimpleNamespace

import pytest

from miles.config.checkpoint import CheckpointArguments
from miles.config.cluster import Offload
from miles.config.evaluation import EvaluationArguments
from miles.observe.console import PhaseTimer
from miles.observe.run_files import RunIdentity
from miles.observe.sample_records import StoredSamples
from miles.run.best_checkpoint import BestCheckpoint
from miles.run.checkpoints import RunCheckpoints
from miles.run.loop import Drivers, GenerationLoop, TrainingLoop
from miles.run.stop_requests import STOPS, StopRequested, StopRequests
from miles.run.train_actor import TrainedIteration
from miles.types.metrics import Metric


class Recorder:
    """Replace both drivers and the tracker: record every call, and report two steps per iteration."""

    num_iterations = 5
    prompts_for = 5  # iterations
    weight_metrics = {"weight_sync/bytes": Metric(7.0)}

    def __init__(self, resume_from=None):
        self.calls = []
        self.rows = {}
        self.saved_states = []
        self.saved_bests = []
        self.resume_from = resume_from

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *arguments: self.calls.append((name, *arguments))

    def generate(self, iteration):
        self.calls.append(("generate", iteration))
        if iteration >= self.prompts_for:
            return None
        metrics = {"rollout/tokens": Metric(100.0)}
        summary = SimpleNamespace(metrics=metrics, samples=StoredSamples([]))
        return SimpleNamespace(shards_by_rank="shards", summary=summary)

    def train(self, shards, iteration):
        self.calls.append(("train", iteration))
        return TrainedIteration([{"train/loss": Metric(0.0)}, {"train/loss": Metric(1.0)}], {})

    def evaluate(self):
        self.calls.append(("evaluate",))
        return {"eval/held_out": Metric(1.0, 2.0)}

    def export_weights(self):
        self.calls.append(("export",))
        return "weights"

    def update_weights(self, weights, version):
        self.weights = weights
        self.calls.append(("sync", version))

    def save(self, done, state, best):
        self.calls.append(("save", done))
        self.saved_states.append(state)
        self.saved_bests.append(best)

    def resume(self, step=None, continued=None):
        if step is not None:  # called as the tracker's
            self.continued = continued
            self.calls.append(("resume at step", step))
            return None
        return self.resume_from

    def log(self, step, metrics):
        self.calls.append(("log", step))
        self.rows[step] = metrics

    def log_samples(self, step, records):
        pass

    def of(self, *names):
        return [call for call in self.calls if call[0] in names]


OWN = RunIdentity("of this run", "2026-01-02 10:00:00")
BRANCHED = RunIdentity("branched off", "2026-01-01 10:00:00")


def loop_of(
    evaluation,
    resume_from=None,
    offload=None,
    stop=None,
    before_writing=lambda: None,
    foreseen=lambda row: {},
    wandb_run=None,
    branch=None,
    generates=True,
    **checkpoint,
):
    """Run a loop; return its calls."""
    actor = Recorder(resume_from)
    both = Drivers(actor, actor, generates, offload or Offload(train=False, rollout=False), PhaseTimer())
    loop = TrainingLoop(
        both,
        RunCheckpoints(
            both,
            CheckpointArguments(**checkpoint),
            OWN.to_state(),
            2,
            wandb_run,
            before_writing,
            settings={"optimizer": {"lr": 0.5}},
            branch=branch,
        ),
        actor,
        evaluation=evaluation,
        steps_per_iteration=2,
        is_synchronous=True,
        stop=stop or StopRequests(60.0),
        foreseen=foreseen,
    )
    loop.run()
    return actor


@pytest.fixture
def run():
    evaluation = EvaluationArguments(eval_prompt_data=("held_out", "x.jsonl"), eval_interval=2)
    return partial(loop_of, evaluation)


@pytest.mark.parametrize("generates", [True, False])
def test_weights_are_exported_for_engines_alone(run, generates):
    actor = run(generates=generates)
    assert len(actor.of("export")) == generates * len(actor.of("sync")) and len(actor.of("sync")) == 6
    assert actor.weights == ("weights" if generates else None)


def test_an_iteration_generates_trains_syncs_evaluates_logs_and_saves_in_this_order(run):
    actor = run(save="checkpoints", save_interval=2)
    second = actor.calls[actor.calls.index(("generate", 1)) : actor.calls.index(("generate", 2))]
    assert [call for call in second if call[0] in ("generate", "train", "sync", "evaluate", "log", "save")] == [
        ("generate", 1),
        ("train", 1),
        ("sync", 2),
        ("evaluate",),
        ("log", 3),
        ("log", 4),
        ("save", 2),
    ]


def test_what_was_foreseen_is_logged_in_the_row_of_what_was_measured(run):
    rows = run(foreseen=lambda row: {"foreseen": Metric(len(row))}).rows
    logged = [step for step, row in rows.items() if "foreseen" in row]
    assert logged == [step for step in rows if step and step % 2 == 0], "the last step of each iteration"
    assert all(rows[step]["foreseen"].value > 0 for step in logged), "the row has the other metrics by then"


def test_weights_are_synced_before_the_first_iteration_and_evaluated_as_step_0(run):
    assert run().of("sync", "evaluate", "log", "generate")[:4] == [
        ("sync", 0),
        ("evaluate",),
        ("log", 0),
        ("generate", 0),
    ]


def test_checkpoints_and_evaluation_come_every_interval_and_after_the_last_iteration(run):
    actor = run(save="checkpoints", save_interval=3)
    assert actor.of("save") == [("save", 3), ("save", 5)]
    evaluated = [step for step, row in actor.rows.items() if "eval/held_out" in row]
    assert evaluated == [0, 4, 8, 10]


def test_without_a_folder_nothing_is_saved(run):
    assert run().of("save") == []


def test_the_best_iteration_is_saved_beside_those_that_are_due(monkeypatch, run, tmp_path, capsys):
    accuracies = iter([0.0, 0.5, 0.2, 0.1])  # before the first iteration, and after 2, 4 and 5
    monkeypatch.setattr(Recorder, "evaluate", lambda self: {"eval/held_out": Metric(next(accuracies))})
    actor = run(save=str(tmp_path), save_interval=4, save_best="eval/held_out")
    assert actor.of("save") == [("save", 2), ("save", 4), ("save", 5)]
    assert [best and (best.iterations, best.value) for best in actor.saved_bests] == [(2, 0.5), None, None]
    assert "--save-best" not in capsys.readouterr().out


def test_a_metric_that_no_iteration_has_is_named_at_the_end(run, tmp_path, capsys):
    actor = run(save=str(tmp_path), save_best="eval/other/accuracy")
    assert actor.of("save") == [("save", 5)]
    assert "note: --save-best eval/other/accuracy: no iteration had this metric" in capsys.readouterr().out


def test_a_run_that_trains_nothing_does_not_miss_the_metric(monkeypatch, run, tmp_path, capsys):
    monkeypatch.setattr(Recorder, "prompts_for", 0)
    assert run(save=str(tmp_path), save_best="eval/held_out").of("save") == []
    assert "--save-best" not in capsys.readouterr().out


def test_a_run_ends_when_its_last_checkpoint_is_written(run, tmp_path):
    assert run(save=str(tmp_path)).calls[-1] == ("settle_save",)


def test_every_step_has_a_row_and_the_last_of_an_iteration_has_seconds_and_throughput(run):
    rows = run().rows
    assert list(rows) == list(range(11))
    assert "time/step" in rows[2] and "perf/tokens_per_second" in rows[2]
    assert "time/step" not in rows[1]


def test_a_resumed_run_continues_after_the_iterations_that_are_done(run):
    actor = run(resume_from={"rollouts_done": 3, "prompts": {"position": 7}}, load="checkpoints")
    assert actor.of("restore", "resume at step", "sync", "generate")[:4] == [
        ("restore", {"position": 7}),
        ("resume at step", 7),
        ("sync", 3),
        ("generate", 3),
    ]
    assert min(actor.rows) == 7


def test_checkpoints_carry_the_run_that_they_belong_to(run):
    assert run(save="checkpoints").saved_states[-1]["run"] == OWN.to_state()
    earlier = {"rollouts_done": 3, "prompts": {}, "run": RunIdentity("resumed", "2026-01-01 10:00:00").to_state()}
    actor = run(resume_from=earlier, save="checkpoints")
    assert actor.saved_states[-1]["run"] == earlier["run"]
    assert actor.continued == RunIdentity("resumed", "2026-01-01 10:00:00"), "the tracker finds its own metrics by it"


def test_a_branch_is_a_run_of_its_own(run):
    earlier = {"rollouts_done": 3, "prompts": {}, "run": BRANCHED.to_state(), "wandb_run": "earlier"}
    for load, own in (("run/iter_0000003", True), ("branch", False)):  # second: a restart of the branch
        actor = run(resume_from=earlier, save="branch", load=load, branch="run/iter_0000003")
        state = actor.saved_states[-1]
        assert (state["run"] == OWN.to_state(), "wandb_run" not in state) == (own, own)
        assert actor.continued == (OWN if own else BRANCHED)


def test_checkpoints_carry_the_settings_of_the_run(run):
    assert run(save="checkpoints").saved_states[-1]["settings"] == {"optimizer": {"lr": 0.5}}


def test_checkpoints_carry_the_steps_of_an_iteration(run):
    assert run(save="checkpoints").saved_states[-1]["steps_per_iteration"] == 2


def test_checkpoints_carry_the_wandb_run_of_their_run_even_if_a_part_of_it_has_none(run):
    earlier = {"rollouts_done": 3, "prompts": {}, "wandb_run": "earlier"}
    assert "wandb_run" not in run(save="checkpoints").saved_states[-1]
    for this, carried in ((None, "earlier"), ("earlier", "earlier"), ("named by a flag", "named by a flag")):
        saved = run(resume_from=earlier, wandb_run=this, save="checkpoints").saved_states[-1]
        assert saved["wandb_run"] == carried


def test_a_run_that_is_already_done_says_so(run, capsys):
    actor = run(resume_from={"rollouts_done": 7, "prompts": {}})
    assert actor.of("generate", "train") == []
    assert "note: 7 iterations are done already, and this run has 5: nothing is left" in capsys.readouterr().out


@pytest.mark.parametrize(("done", "evaluated"), [(0, [0]), (2, [0, 4]), (3, [0, 4, 6])])
def test_a_run_whose_prompts_are_all_mastered_ends_with_what_is_due_after_the_last_iteration(
    monkeypatch, run, capsys, tmp_path, done, evaluated
):
    monkeypatch.setattr(Recorder, "prompts_for", done)
    actor = run(save="checkpoints", save_interval=2, save_hf=str(tmp_path / "{rollout_id}"))
    assert len(actor.of("train")) == done
    assert [call[1] for call in actor.of("log") if "eval/held_out" in actor.rows[call[1]]][-1] == evaluated[-1]
    assert len(actor.of("evaluate")) == len(evaluated), "each once"
    assert actor.of("save") == {0: [], 2: [("save", 2)], 3: [("save", 2), ("save", 3)]}[done]
    assert len(actor.of("export_hf")) == max(1, len(actor.of("save")))
    assert actor.of("save", "log", "end_early")[-1] == ("end_early", 2 * done), "when all else is there"
    assert f"the run ends after {done} of 5 iterations" in capsys.readouterr().out


@pytest.mark.parametrize(("interval", "saved"), [(None, [2, 3]), (3, [2, 3, 3])])
def test_the_last_evaluation_of_a_run_that_ends_early_may_be_the_best(monkeypatch, run, tmp_path, interval, saved):
    accuracies = iter([0.0, 0.5, 0.7])  # before the first iteration, and after 2 and 3
    monkeypatch.setattr(Recorder, "prompts_for", 3)
    monkeypatch.setattr(Recorder, "evaluate", lambda self: {"eval/held_out": Metric(next(accuracies))})
    actor = run(save=str(tmp_path), save_interval=interval, save_best="eval/held_out")
    assert actor.of("save") == [("save", done) for done in saved]
    best = actor.saved_bests[-1]
    assert (best.iterations, best.value, best.due) == (3, 0.7, True)


def test_a_resumed_run_without_prompts_counts_the_checkpoint_that_it_resumed_from(monkeypatch, run, tmp_path):
    (tmp_path / "iter_0000003").mkdir()
    BestCheckpoint("eval/held_out", "max", 0.7, 3, True).save(tmp_path)
    monkeypatch.setattr(Recorder, "prompts_for", 3)
    monkeypatch.setattr(Recorder, "evaluate", lambda self: {"eval/held_out": Metric(0.6)})
    earlier = {"rollouts_done": 3, "prompts": {}}
    assert run(resume_from=earlier, save=str(tmp_path), save_best="eval/held_out").of("save") == []


@pytest.fixture
def stop():
    with StopRequests(60.0).listening() as stop:
        yield stop


def signalled_in(monkeypatch, method, number, at):
    """Have the process receive a signal while ``method`` of iteration ``at`` runs."""
    original = getattr(Recorder, method)

    def interrupted(self, *arguments):
        result = original(self, *arguments)
        if arguments[-1] == at:
            signal.raise_signal(number)
        return result

    monkeypatch.setattr(Recorder, method, interrupted)


def ended(run, stop, **checkpoint):
    """Run until the signal ends it; return its calls and its exit status."""
    actors = []
    original = Recorder.__init__
    with pytest.raises(StopRequested) as stopped, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Recorder, "__init__", lambda self, *a: (actors.append(self), original(self, *a))[1])
        run(stop=stop, **checkpoint)
    assert stopped.type is StopRequested
    return actors[0], stop.exit_status


@pytest.mark.parametrize(("number", "status"), [(number, 128 + number) for number in STOPS])
def test_a_signal_while_generating_abandons_the_iteration_and_saves_those_before(
    monkeypatch, run, stop, number, status
):
    signalled_in(monkeypatch, "generate", number, at=2)
    actor, exit_status = ended(run, stop, save="checkpoints")
    assert actor.of("generate", "train", "save")[-2:] == [("generate", 2), ("save", 2)]
    assert exit_status == status


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGUSR1, 0)])
def test_a_signal_while_training_finishes_the_iteration_and_saves_it(monkeypatch, run, stop, number, status):
    signalled_in(monkeypatch, "train", number, at=2)
    actor, exit_status = ended(run, stop, save="checkpoints")
    assert actor.of("train", "sync", "save")[-3:] == [("train", 2), ("sync", 3), ("save", 3)]
    assert exit_status == status


def test_a_second_signal_stops_at_the_last_checkpoint(monkeypatch, run, stop):
    signalled_in(monkeypatch, "train", signal.SIGINT, at=2)
    signalled_in(monkeypatch, "update_weights", signal.SIGINT, at=3)
    actor, exit_status = ended(run, stop, save="checkpoints", save_interval=2)
    assert actor.of("save") == [("save", 2)]
    assert exit_status == 130


def test_what_is_saved_already_is_not_saved_again(monkeypatch, run, stop):
    signalled_in(monkeypatch, "generate", signal.SIGTERM, at=2)
    actor, _ = ended(run, stop, save="checkpoints", save_interval=2)
    assert actor.of("save") == [("save", 2)]


def test_after_the_timeout_the_run_stops(monkeypatch, run):
    def hangs(self, shards, iteration):
        signal.raise_signal(signal.SIGTERM)
        while True:  # only the alarm's handler ends it
            signal.pause()

    monkeypatch.setattr(Recorder, "train", hangs)
    with StopRequests(0.2).listening() as stop:
        actor, exit_status = ended(run, stop, save="checkpoints")
    assert exit_status == 143 and actor.of("save") == []


def test_a_run_whose_folder_is_anothers_by_now_does_not_write(monkeypatch, run):
    """It notices that before a row of metrics, or before a checkpoint if the folder was lost after the row."""
    written = []
    monkeypatch.setattr(Recorder, "log", lambda self, step, row: written.append(step))
    monkeypatch.setattr(Recorder, "save", lambda self, done, state, best: written.append("checkpoint"))

    def lost_at(step):
        def check():
            if written[-1:] == [step]:
                raise ValueError("taken over")

        return check

    for last, wanted in ((4, [0, 1, 2, 3, 4]), (0, [0])):
        written.clear()
        with pytest.raises(ValueError, match="taken over"):
            run(before_writing=lost_at(last), save="checkpoints", save_interval=2)
        assert written == wanted


def test_the_export_has_weights_and_tokenizer(run, tmp_path):
    """It is written to a folder that gets its name when it is complete."""
    staged = tmp_path / ".writing_hf"
    calls = run(save_hf=str(tmp_path / "hf")).of("export_hf", "save_tokenizer")
    assert calls == [("export_hf", staged), ("save_tokenizer", staged)]
    assert (tmp_path / "hf").is_dir() and not staged.exists()


def test_every_checkpoint_has_an_export(run, tmp_path):
    exported = run(save="checkpoints", save_interval=2, save_hf=str(tmp_path / "hf_{rollout_id}")).of("export_hf")
    assert exported == [("export_hf", tmp_path / f".writing_hf_{done}") for done in (2, 4, 5)]
    assert {path.name for path in tmp_path.iterdir()} == {"hf_2", "hf_4", "hf_5"}


def test_shared_gpus_are_given_to_the_trainer_before_it_trains_and_back_with_the_weights(run):
    actor = run(offload=Offload(train=True, rollout=True))
    names = [call[0] for call in actor.of("generate", "release_memory", "onload", "train", "offload", "sync")]
    assert names[2:8] == ["generate", "release_memory", "onload", "train", "offload", "sync"]


def test_without_a_trainer_every_iteration_is_generated_evaluated_and_logged_with_the_first_weights():
    actor = Recorder()
    evaluation = EvaluationArguments(eval_prompt_data=("held_out", "x.jsonl"), eval_interval=2)
    GenerationLoop(actor, actor, evaluation=evaluation, steps_per_iteration=2, stop=StopRequests(60.0)).run()
    assert actor.of("generate") == [("generate", iteration) for iteration in range(5)]
    assert actor.of("sync") == [("sync", version) for version in range(6)]
    assert not actor.of("train", "save", "export_weights")
    assert list(actor.rows) == [0, 2, 4, 6, 8, 10]
    assert [step for step, row in actor.rows.items() if "eval/held_out" in row] == [0, 4, 8, 10]
    assert "perf/tokens_per_second" in actor.rows[2]


def test_without_a_trainer_a_run_without_prompts_ends_too(monkeypatch, capsys):
    monkeypatch.setattr(Recorder, "prompts_for", 1)
    actor = Recorder()
    GenerationLoop(actor, actor, evaluation=EvaluationArguments(), steps_per_iteration=2, stop=StopRequests(60.0)).run()
    assert list(actor.rows) == [2]
    assert actor.of("end_early") == [("end_early", 2)]
    assert "the run ends after 1 of 5 iterations" in capsys.readouterr().out
