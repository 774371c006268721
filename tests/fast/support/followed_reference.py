"""Checks of a reference that follows the policy, for both backends."""

from forked_ranks import error_of


def assert_needs_the_interval(backend, folder):
    """A backend without ``--ref-update-interval`` loads such a reference's checkpoint with ``--finetune`` alone."""
    message = error_of(ValueError, backend.load, folder)
    assert "add --ref-update-interval" in message
    assert backend.load(folder, reference=False) == {"rollouts_done": 1}, "as with --finetune"
