"""When the loss-mass canary watches."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.objective.canary import CanarySchedule
from miles.objective.settings import LossArguments


@pytest.mark.parametrize("when", ["off", "first-step", "always"])
@given(masses=st.lists(st.sampled_from([0.0, 0.5, 1.0]), max_size=8))
def test_it_watches_up_to_the_first_step_with_a_loss_token(when, masses):
    schedule = CanarySchedule(LossArguments(loss_canary=when))
    flags = [schedule.is_due(SimpleNamespace(expected_loss_mass=mass)) for mass in masses]
    wanted = {"off": lambda step: False, "first-step": lambda step: not any(masses[:step]), "always": lambda step: True}
    assert flags == [wanted[when](step) for step in range(len(masses))]
