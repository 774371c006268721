"""Modes of the rollout that need or exclude one another."""

import pytest

FILTER = "--dynamic-sampling-filter-path miles.rollout.filters:check_reward_nonzero_std"


@pytest.mark.parametrize(
    "flags",
    [
        "--partial-rollout --over-sampling-batch-size 12",
        "--partial-rollout --over-sampling-batch-size 12 --mask-offpolicy-in-partial-rollout --async-steps 1",
        "--over-sampling-early-stop --over-sampling-batch-size 12",
        f"--over-sampling-batch-size 12 {FILTER}",
        "--async-steps 2",
        f"--async-steps 1 --fully-async --stale-samples mask {FILTER}",
        "--rollout-function-path my:function --async-steps 1 --custom-generate-function-path my:turns",
        "--max-restarts 2 --save some/folder",
    ],
)
def test_these_go_together(validated, flags):
    validated(flags)


@pytest.mark.parametrize(
    ("flags", "fault"),
    [
        ("--over-sampling-batch-size 12", "--over-sampling-batch-size 12: would be ignored"),
        ("--partial-rollout", "--partial-rollout: leaves nothing over"),
        ("--over-sampling-early-stop --over-sampling-batch-size 8", "--over-sampling-early-stop: leaves nothing over"),
        (
            "--partial-rollout --over-sampling-early-stop --over-sampling-batch-size 12",
            "--over-sampling-early-stop: would give up",
        ),
        ("--mask-offpolicy-in-partial-rollout", "would be ignored without --partial-rollout"),
        ("--async-steps -1", "--async-steps -1: must be"),
        ("--async-steps 1 --colocate", "--async-steps 1: generates while training, which --colocate"),
        ("--fully-async", "--fully-async: needs a bound on staleness"),
        ("--stale-samples mask", "--stale-samples mask: would be ignored without --fully-async"),
        ("--async-steps 1 --fully-async --partial-rollout --over-sampling-batch-size 12", "with --fully-async"),
        (f"--rollout-function-path my:f {FILTER}", "with --rollout-function-path"),
        ("--async-steps 1 --load-debug-rollout-data {tmp}", "with --load-debug-rollout-data"),
        ("--max-restarts 1", "--max-restarts 1: would be ignored without --save"),
        ("--max-restarts -1", "--max-restarts -1: must be"),
    ],
)
def test_these_do_not(validated, tmp_path, flags, fault):
    saved = tmp_path / "saved.jsonl"
    saved.write_text("")
    with pytest.raises(ValueError, match=fault.replace("(", r"\(")):
        validated(flags.format(tmp=saved))


def test_old_samples_without_a_correction_are_remarked_on(validated):
    assert any("--async-steps 2: samples are by weights" in note for note in validated("--async-steps 2").notes)
    assert not any("--async-steps" in note for note in validated("--async-steps 2 --use-tis").notes)
