"""Megatron's ``torch_dist`` format, written by the training processes themselves.

Megatron's own strategy is made for saving in the background: it starts a server process on every rank, which a killed
run leaves behind, and forks writers from a process that has threads. The files are the same without either.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)


class DirectWriter(TorchDistSaveShardedStrategy):
    """For ``dist_checkpointing.save``. Each part of a tensor is written by the one rank that has its main replica."""

    def __init__(self) -> None:
        super().__init__("torch_dist", 1)

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | Path) -> None:
        """Collective; returns when every file is flushed to the disk."""
        by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        dcp.save(
            mcore_to_pyt_state_dict(by_key),
            storage_writer=dcp.FileSystemWriter(checkpoint_dir),
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
        )
