"""Checks of a reference that follows the policy, for both backends."""


def assert_needs_the_interval(backend, folder):
    """A backend without ``--ref-update-interval`` loads such a reference's checkpoint with ``--finetune`` alone."""
    message = ""
    try:
        backend.load(folder)
    except ValueError as error:
        message = str(error)
    assert "add --ref-update-interval" in message
    assert backend.load(folder, reference=False) == {"rollouts_done": 1}, "as with --finetune"
