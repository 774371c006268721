"""A run that ends before its first iteration: the exit status, the message on stderr, and no process left running.

Runs that end later: test_generation_workers_run.py (an error in a reward function), test_restarts.py (a reward function
kills its process) and test_ppo_run.py (Ctrl-C).
"""


def test_malformed_row_is_reported_in_one_sentence(launch, workplace):
    rows = (workplace / "prompts.jsonl").read_text().splitlines()
    malformed = workplace / "malformed.jsonl"
    malformed.write_text("\n".join([*rows[:6], '{"input": nope}', *rows[7:]]))
    run = launch("malformed", "--debug-rollout-only", "--prompt-data", str(malformed))
    assert run.wait() == 2, run.err
    (error,) = run.said()
    assert error.startswith(f"train.py: error: --prompt-data {malformed}:7: not JSON")
    assert run.none_left()
