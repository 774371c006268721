"""Complete runs with a loss and a function of the scored data that were written for a related launcher."""

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

FUNCTIONS = """
import torch
from slime.backends.megatron_utils.loss import get_log_probs_and_entropy

def loss(args, batch, logits, sum_of_sample_mean):
    _, scores = get_log_probs_and_entropy(
        logits, args=args, unconcat_tokens=batch["unconcat_tokens"], total_lengths=batch["total_lengths"],
        response_lengths=batch["response_lengths"],
    )
    advantages = torch.cat(batch["advantages"])
    pg_loss = sum_of_sample_mean(-torch.cat(scores["log_probs"]) * advantages) * args.lr
    return pg_loss, {"advantage": sum_of_sample_mean(advantages)}

def by_iteration(args, rollout_id, rollout_data):
    assert args.rollout_batch_size == 4 and len(rollout_data["log_probs"]) == len(rollout_data["tokens"])
    for advantages in rollout_data["advantages"]:
        advantages.fill_(rollout_id + 1)
"""
FLAGS = ["--num-rollout", "2", "--loss-type", "custom_loss", "--custom-loss-function-path", "of_slime.loss"]
FLAGS += ["--rollout-data-postprocess-path", "of_slime.by_iteration"]


@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_both_see_the_run_and_decide_what_is_learned(launch, workplace, backend):
    (workplace / "of_slime.py").write_text(FUNCTIONS)
    run = launch(f"functions_{backend}", *FLAGS, "--train-backend", backend, ranks=2)
    assert run.wait() == 0, run.err
    rows = run.rows()
    assert sorted(rows) == [1, 2, 3, 4]
    advantages = [rows[step]["train/advantage"] for step in sorted(rows)]
    assert advantages == pytest.approx([1.0, 1.0, 2.0, 2.0])
    assert all(row["train/grad_norm"] > 0 for row in rows.values())
