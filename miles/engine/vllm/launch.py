"""Start vLLM servers: the command line and environment of one, which runs in a separate environment."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

import miles
from miles.config.vllm.environment import missing_vllm
from miles.engine.servers.launch import Default, ServerProgram, answers
from miles.engine.vllm import TRANSFER
from miles.engine.vllm.guard import ADMIN_KEY, KEY

MODULE = "vllm.entrypoints.openai.api_server"
GUARD = "miles.engine.vllm.guard.Guard"
PLUGIN = "[vllm.general_plugins]\nmiles = miles.engine.vllm.transfer:register\n"
# Each of its processes runs this first: vLLM's engine would live on if the server is killed.
DIE_WITH_PARENT = "import os\nfrom miles.base.processes import die_with_parent\ndie_with_parent(os.getppid())\n"
# A prompt is prefilled at once: vLLM 0.32.0 ends on CPU when a request with a seed has one that is prefilled in parts
# ("CPU Generator does not use offset", v1/worker/gpu_model_runner.py).
_ON_CPU: tuple[Default, ...] = (("--enforce-eager", None, ()), ("--no-enable-chunked-prefill", None, ()))


@dataclass(frozen=True)
class VllmProgram(ServerProgram):
    """Describe one server; ``miles.engine.servers.launch.ServerProgram``.

    Attributes:
        raw_log_probs: Whether log-probs come from the logits, and not from the distribution that is sampled from.
        cache_gib: On CPU: the memory of the cache.
    """

    title = "vLLM"

    raw_log_probs: bool = False
    cache_gib: int = 1

    @property
    def module(self) -> str:
        """What ``python -m`` runs: the command ``vllm`` does not run with the package for CPU."""
        return MODULE

    def check(self) -> None:
        """Raise ``ValueError`` if vLLM is not installed there."""
        if (missing := missing_vllm(self.python)) is not None:
            raise ValueError(missing)

    def arguments(self, host: str, port: int, meeting: str | None = None) -> list[str]:
        """Return the words after ``python -m module``; ``ServerProgram.arguments``.

        Raises ``ValueError`` if it would listen on another interface than loopback: its control calls can run anything.
        """
        if not ip_address(host).is_loopback:
            raise ValueError(
                f"--rollout-engine vllm: a server would listen on {host}, and its calls for weights are for loopback "
                "only; run it on the launcher's host, or use --rollout-engine sglang"
            )
        words = ["--model", self.model_path, "--host", host, "--port", str(port), "--enable-scale-out"]
        words += ["--generation-config", "vllm", "--middleware", GUARD]  # the request alone states how tokens are drawn
        words += ["--logprobs-mode", "raw_logprobs" if self.raw_log_probs else "processed_logprobs"]
        words += ["--weight-transfer-config", json.dumps({"backend": TRANSFER})]
        words += ["--max-logprobs", "-1", "--disable-uvicorn-access-log"]
        defaults: list[Default] = [
            ("--tensor-parallel-size", str(self.num_devices), ("-tp",)),
            ("--dtype", self.dtype, ()),
            ("--seed", str(self.seed), ()),
            *(_ON_CPU if self.device == "cpu" else ()),
            *([("--enable-sleep-mode", None, ())] if self.releases_memory else ()),
        ]
        return self._with_flags(words, defaults)

    def environment(self, base: Mapping[str, str], folder: Path) -> dict[str, str]:
        """Return the environment ``base`` with the variables that a server needs in addition.

        The import path has this package, by a link in ``folder``, and nothing else of the run's environment.
        """
        path = folder / "path"
        plugin = path / "miles_in_vllm-1.dist-info"
        plugin.mkdir(parents=True, exist_ok=True)
        (plugin / "entry_points.txt").write_text(PLUGIN)
        (path / "miles").symlink_to(Path(miles.__file__).parent)
        (path / "sitecustomize.py").write_text(DIE_WITH_PARENT)
        # One thread: waiting threads of OpenMP starve their neighbours. Nothing is compiled: the few functions
        # that vLLM compiles even so keep the first requests waiting, for half a minute or more on a busy host.
        cpu = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_KVCACHE_SPACE": str(self.cache_gib)}
        if self.num_devices == 1:  # one process less: vLLM on CPU has its only worker in the engine's process then
            cpu["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        plugins = base.get("VLLM_PLUGINS")
        assert self.keys.server is not None and self.keys.admin is not None
        return {
            **(cpu | {"VLLM_CPU_OMP_THREADS_BIND": "nobind"} if self.device == "cpu" else {}),
            **{name: value for name, value in base.items() if name not in ("VIRTUAL_ENV", "PYTHONHOME")},
            "PYTHONPATH": str(path),
            "VLLM_SERVER_DEV_MODE": "1",  # pauses, weights and versions, behind the guard
            "VLLM_NO_USAGE_STATS": "1",
            **({} if plugins is None else {"VLLM_PLUGINS": f"{plugins},miles"}),
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a forked process would not run DIE_WITH_PARENT
            KEY: self.keys.server,
            ADMIN_KEY: self.keys.admin,
            **({"HF_HUB_OFFLINE": "1"} if os.path.isdir(self.model_path) else {}),
        }

    def is_ready(self, url: str) -> bool:
        """Return whether the server at ``url`` serves, and takes the key: another run's may have taken the port."""
        return answers(url, "/health") and answers(url, "/weight_info", self.keys.admin)
