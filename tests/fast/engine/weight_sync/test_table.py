"""The table of weight transports."""

from typing import get_args

import torch

from miles.config.servers.flags import SglangArguments
from miles.engine.weight_sync.sender import TRANSPORTS


def test_every_choice_of_the_flag_has_a_transport(tmp_path):
    choices = get_args(SglangArguments.__annotations__["update_weight_transfer_mode"])
    assert TRANSPORTS.keys() == set(choices)
    for mode in choices:
        transport = TRANSPORTS[mode](tmp_path, torch.device("cpu"), None)
        transport.forget_all_but(set())
        assert callable(transport.send)
