"""Prompts that are tasks of the package verifiers."""

from collections.abc import Iterator

from miles.tasks.data.row import Row
from miles.tasks.environments.verifiers_tasks import METADATA as ORIGIN
from miles.tasks.environments.verifiers_tasks import SCHEME, read_tasks

__all__ = ["INPUT", "LABEL", "METADATA", "SCHEME", "read_verifiers"]
INPUT, LABEL, METADATA = "prompt", "label", "metadata"


def read_verifiers(source: str) -> Iterator[Row]:
    """Yield the tasks of ``verifiers:TASKSET[:key=value,...]`` as rows of a prompt and metadata, without labels.

    ``--environment verifiers`` needs the metadata to find the task again. Raises ``InputError`` as ``read_tasks`` does.
    """
    for prompt, origin in read_tasks(source):
        yield Row(f"{source}:{origin['index'] + 1}", {INPUT: prompt, LABEL: None, METADATA: {ORIGIN: origin}})
