"""Note when functions begin and end in every process of a run: Python imports this file when it starts.

start_up.py puts this folder on PYTHONPATH, and names a folder in ``START_UP_MARKS``. Each process writes a file there,
with a line of JSON per mark: its name, the times at which it began and ended (seconds since 1970), and the process
seconds between them. Processes without the variable are left alone.
"""

import functools
import importlib.abc
import importlib.machinery
import inspect
import json
import os
import sys
import time

# Module: {function: mark}. Only the first call of a function counts.
MARKED = {
    "miles.compat.border": {"parse_or_exit": "launcher: flags"},
    "miles.run.session": {"_connect": "launcher: start Ray", "_place": "launcher: placement group"},
    "miles.run.launcher": {"train": "launcher: attempt"},
    "miles.run.loop": {"TrainingLoop.run": "launcher: loop"},
    "miles.run.train_actor": {
        "TrainActor.__init__": "trainer: actor",
        "TrainActor.import_code": "trainer: imports",
        "TrainActor.connect": "trainer: connect and build",
        "TrainActor.export_weights": "trainer: export weights",
    },
    "miles.training.backend": {"build_backend": "trainer: backend"},
    "miles.run.rollout_actor": {
        "RolloutActor.__init__": "rollout: actor",
        "RolloutActor.prepare": "rollout: prepare",
        "RolloutActor.generate": "rollout: generate",
    },
    "miles.rollout.pipeline": {
        "build_pipeline": "rollout: pipeline",
        "tokenizer_of_process": "rollout: tokenizer",
        "RolloutPipeline.update_weights": "rollout: update weights",
    },
    "miles.engine.base": {"start_engine": "rollout: engine"},
    "miles.engine.embedded.torch_engine": {
        "ModelRunner": "rollout: engine's model",
        "TorchEngine.generate": "rollout: first answer",
    },
    "miles.engine.servers.engine": {"ServersEngine.generate": "rollout: first answer"},
}


class Marks:
    """The marks of this process."""

    def __init__(self, folder: str) -> None:
        self._path = os.path.join(folder, f"{os.getpid()}.jsonl")
        self._seen: set[str] = set()

    def add(self, mark: str, began: float, cpu: float) -> None:
        row = {"mark": mark, "began": began, "ended": time.time(), "cpu": time.process_time() - cpu}
        with open(self._path, "a") as file:
            file.write(json.dumps(row) + "\n")

    def first(self, mark: str) -> bool:
        is_first = mark not in self._seen
        self._seen.add(mark)
        return is_first

    def around(self, function, mark):
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def marked(*args, **kwargs):
                is_first, began, cpu = self.first(mark), time.time(), time.process_time()
                result = await function(*args, **kwargs)
                if is_first:
                    self.add(mark, began, cpu)
                return result
        else:

            @functools.wraps(function)
            def marked(*args, **kwargs):
                is_first, began, cpu = self.first(mark), time.time(), time.process_time()
                result = function(*args, **kwargs)
                if is_first:
                    self.add(mark, began, cpu)
                return result

        return marked

    def mark_functions(self, module) -> None:
        for path, mark in MARKED[module.__name__].items():
            *owners, name = path.split(".")
            owner = functools.reduce(getattr, owners, module)
            setattr(owner, name, self.around(getattr(owner, name), mark))


class Finder(importlib.abc.MetaPathFinder):
    """Mark functions of modules when they are imported."""

    def __init__(self, marks: Marks) -> None:
        self._marks = marks

    def find_spec(self, name, path, target=None):
        if name not in MARKED:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        execute = spec.loader.exec_module

        def execute_and_mark(module) -> None:
            execute(module)
            self._marks.mark_functions(module)

        spec.loader.exec_module = execute_and_mark
        return spec


if folder := os.environ.get("START_UP_MARKS"):
    marks = Marks(folder)
    marks.add("process", time.time(), 0.0)
    sys.meta_path.insert(0, Finder(marks))
