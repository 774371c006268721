"""Take new weights inside a vLLM server: from a process group, or from the host's shared memory.

This is a weight-transfer engine of vLLM (``--weight-transfer-config``), by which its servers take weights over the same
transports as SGLang's, on CPU too. vLLM's own engines would need its communicator on the trainer's side (NCCL), or the
trainer on the same GPU (IPC). A plugin of vLLM registers it in each of the server's processes; launch.py writes the
plugin's entry point. This file runs in vLLM's environment only.
"""

from __future__ import annotations

import base64
import pickle
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from miles.engine.vllm import TRANSFER
from miles.engine.weight_sync.broadcast import JOIN_TIMEOUT, TCPStore, broadcast, join


def register() -> None:
    """Make this engine known to vLLM: its plugin calls this."""
    WeightTransferEngineFactory.register_engine(TRANSFER, Transfer)


class Transfer(WeightTransferEngine):
    """Take the weights of one rank of a server. What it takes is a ``dict``; client.py sends it."""

    init_info_cls = dict
    update_info_cls = dict
    _ranks: Any = None

    def init_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Join the newest group of the sender."""
        host, rank = init_info["host"], 1 + self.parallel_config.rank
        store = TCPStore(host, init_info["port"], is_master=False, timeout=JOIN_TIMEOUT)
        self._ranks = join(store, init_info["group"], rank, init_info["size"], self.device, host)

    def start_weight_update(self) -> None:
        """Prepare the layers to be loaded again."""
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load one chunk."""
        self.receive_weights(update_info)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def receive_weights(self, update_info: dict[str, Any]) -> None:
        """Load the tensors that rank 0 broadcasts, or those in shared memory; copied, as vLLM uses them later."""
        if "shared" in update_info:
            shared: list[tuple[str, torch.Tensor]] = pickle.loads(base64.b64decode(update_info["shared"]))
            weights = [(name, tensor.to(self.device, copy=True)) for name, tensor in shared]
        else:
            described = zip(update_info["names"], update_info["dtypes"], update_info["shapes"], strict=True)
            weights = [
                (name, torch.empty(shape, dtype=getattr(torch, dtype), device=self.device))
                for name, dtype, shape in described
            ]
            broadcast(self._ranks, [tensor for _, tensor in weights])
        with disable_mtp_completeness_check():
            self.model.load_weights(weights)

    def finish_weight_update(self) -> None:
        """Use the new weights."""
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Leave the group."""
        self._ranks = None
