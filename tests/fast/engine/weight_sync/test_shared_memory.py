"""Weights through shared memory, on a machine on which PyTorch's helper process answers late."""

import signal
import threading

import psutil
import torch

from miles.engine.weight_sync.shared_memory import SharedMemoryTransport, _share
from miles.types.weights import WeightChunk


def managers():
    """Return the helper processes of this process."""
    return [child for child in psutil.Process().children(recursive=True) if child.name().startswith("torch_shm_mana")]


def test_a_helper_that_does_not_answer_in_time_is_waited_for(caplog):
    SharedMemoryTransport()
    _share(WeightChunk({"first": torch.ones(3)}))  # starts the helper
    (manager,) = managers()
    shared = []
    sending = threading.Thread(target=lambda: shared.extend(_share(WeightChunk({"w": torch.arange(5.0)}))))
    manager.send_signal(signal.SIGSTOP)
    try:
        sending.start()
        while not any("has not answered for 2 s" in message for message in caplog.messages):
            sending.join(0.05)
            assert sending.is_alive()
    finally:
        manager.send_signal(signal.SIGCONT)
    sending.join()
    ((name, tensor),) = shared
    assert name == "w" and tensor.is_shared() and tensor.tolist() == [0, 1, 2, 3, 4]
    ((_, after),) = _share(WeightChunk({"w": torch.ones(2)}))  # reads the late answers
    assert after.tolist() == [1, 1]
