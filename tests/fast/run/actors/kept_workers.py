"""Generation workers whose processes serve one test after the other, as each imports for seconds.

Ray imports this module in the workers, so it imports little.
"""

import ray

from miles.rollout.workers.worker import WorkerPlan, pickled
from miles.run.engine_actors import GenerationActor, RayWorker
from miles.run.liveness import with_heartbeat


class KeptActor(GenerationActor):
    """An actor that builds a worker for each test."""

    async def renew(self, plan):
        self._plan = plan


class KeptWorker(RayWorker):
    """A worker whose process is kept when the test ends it, unless the process was lost."""

    def __init__(self, actor, plan, pool):
        super().__init__(actor, plan.settings.cluster.worker_timeout)
        self._plan, self._idle = plan, pool

    async def prepare(self):
        await self._result(self._actor.renew.remote(self._plan))
        await super().prepare()

    def kill(self):
        if self._loss.done():
            super().kill()
        else:
            self._watching.cancel()
            self._idle.append(self._actor)


class KeptWorkers:
    """Starts workers, as ``worker_starter`` does, in the processes of earlier ones if there are any."""

    def __init__(self):
        self._idle = []

    def starter(self, settings, tokenizer):
        sent = pickled(tokenizer)
        new_actor = with_heartbeat(KeptActor).options(num_cpus=0, max_restarts=0)

        def start(number, sender_config):
            plan = WorkerPlan(settings, number, sender_config, sent)
            actor = self._idle.pop() if self._idle else new_actor.remote(plan)
            return KeptWorker(actor, plan, self._idle)

        return start

    def end(self):
        for actor in self._idle:
            ray.kill(actor)
