import pytest

from miles.tasks.rewards.built_in import REWARDS

reasoning_gym = REWARDS["reasoning_gym"]


@pytest.mark.parametrize("task", ["gcd", "n_queens", "decimal_arithmetic"])
def test_the_task_scores_its_own_answers(make_sample, task):
    import reasoning_gym as gym  # slow to import, which every worker of pytest-xdist would do

    options = {"size": 2, "seed": 1}
    samples = []
    for entry in gym.create_dataset(task, **options):
        origin = {"reasoning_gym": {"task": task, "options": options, "entry": entry}}
        samples += [
            make_sample(f" {entry['answer']}\n", metadata=origin),
            make_sample(f"<answer>1</answer> or rather <answer>{entry['answer']}</answer>.", metadata=origin),
            make_sample("no idea", metadata=origin),
        ]
    rewards = reasoning_gym(samples)
    assert rewards[0::3] == rewards[1::3] == [1.0, 1.0]
    assert max(rewards[2::3]) < 1.0


def test_prompts_from_elsewhere(make_sample):
    with pytest.raises(ValueError, match="prompts.jsonl:17 is no reasoning_gym entry"):
        reasoning_gym([make_sample("7", "7")])
