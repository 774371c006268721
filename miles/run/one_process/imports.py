"""Import the modules that a run in one process uses, so that forks of this process have them at once."""

import miles.engine.embedded.torch_engine
import miles.run.one_process.drivers
import miles.training.fsdp.backend
import miles.training.trainer  # noqa: F401
