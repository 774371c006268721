"""Every type that transformers has as a causal language model is right in the torch engine and in FSDP, or refused.

With ``-s`` the tests print a table: the largest difference of a log-prob from transformers, or why the type is refused.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engine_answers import ROWS, answers, largest_difference
from tiny_kinds import FAMILIES, config_of, tiny_config, tiny_model
from torch.distributed.fsdp import FSDPModule
from transformers import AutoConfig

from miles.config.parallel import ParallelArguments
from miles.engine.embedded import model_runner
from miles.engine.embedded.torch_engine import TorchEngine
from miles.models import packing
from miles.training.fsdp.models import Policy, load_model, shard_model
from miles.training.fsdp.packing_check import check_layout, check_untested_model, layout_log_probs, own_log_probs

ERROR = 1e-4  # of a log-prob, and of a gradient by its norm
# Families without a tiny model that runs: refused with the flags, or compared at the start of a run as all are.
UNBUILT = {
    "blt": "four models in one",
    "cohere_compass_text": "no default for its rotary positions",
    "gemma3n": "needs the package timm",
    "gemma4_assistant": "no separate model",
    "gemma4_unified_assistant": "no separate model",
    "musicgen": "needs a text encoder",
    "musicgen_melody": "needs a text encoder",
    "prophetnet": "other names of its sizes",
    "xlm": "its layers are no lists",
}
BUILT = [kind for kind in FAMILIES if kind not in UNBUILT]
SAMPLE = {"cohere", "diffllama", "gpt2", "gptj", "granitemoe", "jamba", "jetmoe", "mamba", "opt", "qwen3_moe"}
SAMPLE |= {"stablelm", "bart"}
# Only longer sequences of a deepseek_v4 differ.
DIFFERENT = sorted({*packing._DIFFERENT, *packing._NOT_GENERATED} - {*UNBUILT, "deepseek_v4"})
DIFFERENT += ["bart", "bloom", "gptj", "jamba", "mamba", "rwkv", "xglm"]


def engine_error(path: str) -> float:
    """The largest difference of a log-prob from transformers'."""
    return largest_difference(path, asyncio.run(answers(TorchEngine(path, torch.float32, "cpu", ROWS))))


def trainer_error(path: str, qkv_format: str) -> float:
    """The larger of the errors of log-probs and of the gradient, after all checks and sharding."""
    layout = ParallelArguments(qkv_format=qkv_format)
    check_layout("--hf-checkpoint", path, layout)
    policy = Policy(load_model(path, torch.float32), 0.8, 5)
    check_untested_model(policy, "--hf-checkpoint", path, layout, torch.device("cpu"))
    weights = torch.randn(17, generator=torch.Generator().manual_seed(0))

    def gradient() -> dict[str, torch.Tensor]:
        named = policy.language_model.named_parameters()
        return {n: getattr(p.grad, "_local_tensor", p.grad) for n, p in named if p.grad is not None}

    own = own_log_probs(policy)
    (own * weights).sum().backward()
    wanted = gradient()
    policy.zero_grad()
    shard_model(policy, dist.init_device_mesh("cpu", (1,)), torch.float32, checkpointing=False)
    policy.train()
    log_probs = layout_log_probs(policy, "", packed=not layout.pads)
    (log_probs * weights).sum().backward()
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    computed, none = gradient(), torch.zeros(())
    differences = [(computed.get(n, none) - wanted.get(n, none)).norm() for n in computed.keys() | wanted.keys()]
    size = torch.stack([part.norm() for part in wanted.values()]).norm()
    return max((log_probs - own).abs().max().item(), (torch.stack(differences).norm() / size).item())


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = tmp_path_factory.mktemp("ranks") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def check_refusal(kind: str, config: dict[str, Any], refusal: tuple[str, str]) -> str:
    assert kind in refusal[0] or packing.model_type(config) in refusal[0], refusal
    return f"refused: {refusal[0]}"


def save(kind: str, folder: Path) -> dict[str, Any]:
    tiny_model(tiny_config(kind)).save_pretrained(folder)
    return json.loads((folder / "config.json").read_text())


def marked(kinds: list[str]) -> list[Any]:
    return [kind if kind in SAMPLE else pytest.param(kind, marks=pytest.mark.slow) for kind in kinds]


@pytest.mark.parametrize("kind", marked(BUILT))
def test_a_family_is_right_or_refused_with_the_flags(kind, tmp_path):
    config = save(kind, tmp_path)
    results = []
    if refusal := packing.why_not_generated(config):
        results.append(check_refusal(kind, config, refusal))
    else:
        results.append(engine_error(str(tmp_path)))
    if refusal := packing.why_not_trained(config):
        results.append(check_refusal(kind, config, refusal))
    else:
        formats = ("bshd",) if packing.must_be_padded(config) else ("thd", "bshd")
        results += [trainer_error(str(tmp_path), qkv_format) for qkv_format in formats]
    print(f"{kind} | " + " | ".join(r if isinstance(r, str) else f"{r:.1e}" for r in results))
    assert all(result < ERROR for result in results if not isinstance(result, str))


@pytest.mark.parametrize("kind", UNBUILT)
def test_a_family_that_is_not_tried_is_refused_or_compared_at_the_start(kind):
    config = AutoConfig.for_model(kind).to_dict() if "musicgen" not in kind else {"model_type": kind}
    for refusal in (packing.why_not_generated(config), packing.why_not_trained(config)):
        if refusal is None:
            assert not packing.is_compared_by_test(config)
        else:
            check_refusal(kind, config, refusal)


@pytest.mark.parametrize("kind", marked(DIFFERENT))
def test_the_start_of_a_run_finds_what_the_flags_refuse(kind, tmp_path, monkeypatch):
    """As of a type that another release of transformers adds."""
    save(kind, tmp_path)
    monkeypatch.setattr(model_runner, "why_not_generated", lambda config: None)
    monkeypatch.setattr(model_runner, "has_recurrent_state", lambda config: False)
    with pytest.raises(ValueError, match=f"a {kind} (in --rollout-engine torch does not|cannot be computed)"):
        engine_error(str(tmp_path))


@pytest.mark.parametrize("changes", [dict(hidden_size=26, head_dim=6), dict(moe_intermediate_size=18)])
def test_experts_of_odd_widths_are_right_in_the_engine(tmp_path, changes):
    tiny_model(config_of("qwen3_moe", **changes)).save_pretrained(tmp_path)
    assert engine_error(str(tmp_path)) < ERROR
    assert trainer_error(str(tmp_path), "thd") < ERROR
