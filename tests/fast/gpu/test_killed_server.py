"""The crash of a server on one GPU (tests/gpu), with a server on CPU."""

import pytest
from tolerance import SERVER_LOG_PROB_ERROR

from tests.fast.run.conftest import launch, workplace  # noqa: F401  # fixtures
from tests.gpu.run_checks import engine_against_trainer, kill_server
from tests.gpu.test_sglang_runs_gpu import KILLED, flags


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_server_that_is_killed_is_replaced(launch):  # noqa: F811
    run = launch("killed_on_cpu", *flags(KILLED, "cpu"))
    kill_server(run)
    assert engine_against_trainer(run.output) < SERVER_LOG_PROB_ERROR
