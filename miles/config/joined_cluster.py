"""Ask a Ray cluster for its GPUs before the run joins it, in a separate process: validation imports no Ray."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass

from miles.base.flags import count
from miles.base.processes import importing_miles
from miles.base.text import one_line

ASKING = "miles.run.gpus_of_cluster"
ANSWER_SECONDS = 2.0  # for a cluster to answer
PROCESS_SECONDS = 60.0  # for the process that asks, which imports Ray: 0.5 s, or many on a busy host
LONGEST_FAULT = 200  # characters


@dataclass(frozen=True)
class JoinedCluster:
    """Hold a cluster's report on its GPUs.

    Attributes:
        address: Its address, as given.
        gpus: Its GPUs; None if they are not known.
        fault: Why not.
    """

    address: str
    gpus: int | None
    fault: str = ""

    @property
    def in_words(self) -> str:
        """The known facts, in a few words."""
        if self.gpus is None:
            return f"the GPUs of the Ray cluster at {self.address} are not known ({self.fault})"
        return f"the Ray cluster at {self.address} has {count(self.gpus, 'GPU') if self.gpus else 'no GPU'}"

    @property
    def is_absent(self) -> bool:
        """Whether nothing listens at the address: a run would wait for it, and never start."""
        return self.gpus is None and "refused" in self.fault

    @property
    def doubt(self) -> str:
        """The note on GPUs that are not known."""
        planned = "the run is planned for CPU; give --device cuda if the cluster has GPUs, else --device cpu"
        return f"--ray-address {self.address}: the GPUs of the cluster are not known ({self.fault}), so {planned}"


@functools.cache
def joined_cluster(address: str) -> JoinedCluster:
    """Ask the cluster at ``address``, once in this process; returns after seconds if it does not answer."""
    words = [sys.executable, "-P", "-m", ASKING, address, str(ANSWER_SECONDS)]
    try:
        ended = subprocess.run(
            words,
            env=os.environ | importing_miles(),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PROCESS_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return JoinedCluster(address, None, f"asking it took more than {PROCESS_SECONDS:g} s")
    if ended.returncode == -signal.SIGALRM:
        return JoinedCluster(address, None, f"it did not answer within {ANSWER_SECONDS:g} s")
    try:
        answer = json.loads(ended.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        lines = [line for line in ended.stderr.splitlines() if line.strip()]
        return JoinedCluster(address, None, one_line(lines[-1] if lines else "no answer", LONGEST_FAULT))
    if "fault" in answer:
        return JoinedCluster(address, None, one_line(answer["fault"].split(". ")[0], LONGEST_FAULT))
    return JoinedCluster(address, int(answer["gpus"]))
