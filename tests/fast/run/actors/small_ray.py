"""A Ray for tests that start actors themselves, with as few processes as a run's."""

from contextlib import contextmanager

import pytest
import ray
from ray._private.node import Node

from miles.run.session import LOCAL_RAY, RAY_DEFAULTS, without_extras


@contextmanager
def small_ray(num_cpus=1, **environment):
    """Start Ray on this machine, with these variables in the environment of its processes, and end it."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (RAY_DEFAULTS | LOCAL_RAY | environment).items():
            patch.setenv(name, value)
        patch.setattr(Node, "start_log_monitor", lambda node: None)  # nobody reads the actors' output
        with without_extras():
            ray.init(
                "local",
                num_cpus=num_cpus,
                include_dashboard=False,
                log_to_driver=False,
                object_store_memory=10**8,
            )
        try:
            yield
        finally:
            ray.shutdown()
