"""``--train-backend`` offers exactly the existing backends."""

from __future__ import annotations

from typing import get_args, get_type_hints

import pytest
import torch

from miles.arguments.settings import Settings
from miles.arguments.training import TrainingArguments
from miles.training.table import BACKENDS, build_backend


def test_the_flag_offers_the_backends_of_the_table() -> None:
    assert set(get_args(get_type_hints(TrainingArguments)["train_backend"])) == set(BACKENDS)


def test_an_unknown_backend_is_refused() -> None:
    settings = Settings(training=TrainingArguments(train_backend="another"))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="--train-backend another: unknown; choose from fsdp, megatron"):
        build_backend(settings, torch.device("cpu"), total_steps=1)
