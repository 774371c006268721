"""How one SGLang server is started: its command line and its environment. No process is started here."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from miles.arguments.sglang.server_flags import has_flag

MODULE = "sglang.launch_server"
MODULE_ON_CPU = "sglang_on_cpu"  # in cpu/, which is on the path there

# What SGLang needs, or is better off with, on CPU: (the flag, its value, other spellings that the user may have given).
# Without a limit of its own the cache takes a tenth of the host's memory.
_ON_CPU = (
    ("--device", "cpu", ()),
    ("--attention-backend", "torch_native", ("--prefill-attention-backend", "--decode-attention-backend")),
    ("--sampling-backend", "pytorch", ()),
    ("--disable-overlap-schedule", None, ()),
    ("--max-total-tokens", "32768", ()),
    ("--mem-fraction-static", "0.1", ()),
    ("--sleep-on-idle", None, ()),
)


@dataclass(frozen=True)
class ServerSpec:
    """One server: what it serves, on how many devices, and the user's ``--sglang-*`` words.

    ``releases_memory``: it gives its GPU memory up and takes it again when told to, by the package torch-memory-saver.
    """

    model_path: str
    dtype: str  # bfloat16 or float32
    device: str  # cpu or cuda
    num_devices: int
    seed: int
    flags: tuple[str, ...] = ()
    releases_memory: bool = False

    @property
    def module(self) -> str:
        """What ``python -m`` runs."""
        return MODULE_ON_CPU if self.device == "cpu" else MODULE

    def arguments(self, host: str, port: int) -> list[str]:
        """Words after ``python -m`` and ``module``. What the user gives stands instead of what we would."""
        words = ["--model-path", self.model_path, "--host", host, "--port", str(port)]
        words += ["--skip-tokenizer-init", "--skip-server-warmup", "--weight-version", "0"]
        defaults = [
            ("--tp-size", str(self.num_devices), ("--tp", "--tensor-parallel-size")),
            ("--dtype", self.dtype, ()),
            ("--random-seed", str(self.seed), ()),
            *(_ON_CPU if self.device == "cpu" else ()),
            *([("--enable-memory-saver", None, ())] if self.releases_memory else ()),
        ]
        for flag, value, spellings in defaults:
            if not has_flag(self.flags, flag, *spellings):
                words += [flag] if value is None else [flag, value]
        return [*words, *self.flags]

    def environment(self, given: Mapping[str, str]) -> dict[str, str]:
        """The environment ``given``, and what servers need beside it: on every device, and on CPU."""
        # The router asks /health before it takes a server, which must then answer while it is paused or busy as well;
        # whether the server generates, our own checks ask /health_generate.
        common = {**given, "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0"}
        if self.device != "cpu":
            return common
        path = os.pathsep.join(filter(None, [str(cpu_support()), given.get("PYTHONPATH")]))
        # One thread a server: with more, and a busy neighbour, OpenMP's waiting threads starve the scheduler.
        return {"OMP_NUM_THREADS": "1", **common, "PYTHONPATH": path, "SGLANG_USE_CPU_ENGINE": "1"}


def cpu_support() -> Path:
    """The folder of the stand-ins that only server processes on CPU see."""
    return Path(__file__).parent / "cpu"
