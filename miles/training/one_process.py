"""A trainer of one rank in this process, without Ray: for reading the weights of a checkpoint."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from miles.config.components import call, train_backend_spec
from miles.config.settings import Settings
from miles.training.checkpoint_check import check_checkpoint
from miles.training.checkpoint_files import DamagedFile, read_state


def export_checkpoint(settings: Settings, checkpoint: Path, folder: Path) -> None:
    """Write the weights of ``checkpoint`` into ``folder`` as the run's own export would (``--save-hf``), and no more.

    The tokenizer is not part of it. The process must have no process group.

    Args:
        settings: The settings of the run that saved it.
        checkpoint: A checkpoint of any layout of ranks. It is checked against its manifest first.
        folder: An existing folder.

    Raises:
        ValueError: The checkpoint is damaged, or does not hold the model of ``settings``.
    """
    try:
        check_checkpoint(checkpoint)
        backend = read_state(checkpoint).get("backend", "fsdp")
    except DamagedFile as fault:
        raise ValueError(f"the checkpoint {checkpoint} is damaged: {fault}; give another one") from None
    with one_rank():
        call(train_backend_spec(backend).exporter, on_one_rank(settings), checkpoint, folder)


@contextmanager
def one_rank() -> Iterator[None]:
    """Have a process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def on_one_rank(settings: Settings) -> Settings:
    """Return the settings of the same run on one rank, on CPU."""
    return replace(
        settings,
        cluster=replace(settings.cluster, device="cpu", actor_num_nodes=1, actor_num_gpus_per_node=1),
        parallel=replace(settings.parallel, context_parallel_size=1, dynamic_context_parallel=False),
        megatron=replace(
            settings.megatron,
            tensor_model_parallel_size=1,
            pipeline_model_parallel_size=1,
            decoder_first_pipeline_num_layers=None,
            decoder_last_pipeline_num_layers=None,
            num_layers_per_virtual_pipeline_stage=None,
            expert_model_parallel_size=1,
            expert_tensor_parallel_size=None,
            sequence_parallel=False,
        ),
    )
