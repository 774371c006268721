"""How worker processes import and compute on CPU."""

import gc

import pytest

from miles.cluster.cpu_tuning import importing


@pytest.mark.parametrize("was_enabled", [True, False])
def test_nothing_is_collected_during_imports_and_what_they_made_is_not_passed_over_later(was_enabled):
    if not was_enabled:
        gc.disable()
    try:
        with importing():
            assert not gc.isenabled()
            made = [[] for _ in range(1000)]
        assert gc.isenabled() == was_enabled
        assert gc.get_freeze_count() >= 1000
        assert not any(each is made for each in gc.get_objects())
    finally:
        gc.unfreeze()
        gc.enable()
