"""The routers' losses and multi-token prediction, from their formulas: whole samples, transformers, float64."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from layouts import MODELS, plain_model
from oracle import OracleSample
from safetensors.torch import load_file, save_file
from transformers import AutoConfig
from transformers.models.auto import AutoModelForCausalLM

HEADS = 2
OWN = {"token_layernorm": (1,), "hidden_layernorm": (1,), "input_proj": (1, 2), "final_layernorm": (1,)}


def deep(name: str) -> str:
    """Return the folder of the model with additional layers, which become its heads."""
    return f"{name}, deep"


def with_heads(name: str) -> str:
    return f"{name} with heads"


def save_with_heads(folder: Path, name: str) -> None:
    """Save ``name`` of ``MODELS`` with heads: the last layers of a deeper model, and a head's own parameters."""
    config = MODELS[name]
    torch.manual_seed(11)
    bigger = type(config)(**{**config.to_dict(), "num_hidden_layers": config.num_hidden_layers + HEADS})
    model = AutoModelForCausalLM.from_config(bigger)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(folder / deep(name))
    tensors = load_file(folder / deep(name) / "model.safetensors")
    for head in range(HEADS):
        layer = f"model.layers.{config.num_hidden_layers + head}."
        for old in [n for n in tensors if n.startswith(layer)]:
            tensors[old.replace(layer, f"model.mtp_layers.{head}.")] = tensors.pop(old)
        for own, shape in OWN.items():
            size = [config.hidden_size * factor for factor in shape]
            tensors[f"model.mtp_layers.{head}.{own}.weight"] = (len(shape) == 1) + 0.15 * torch.randn(size)
    target = folder / with_heads(name)
    target.mkdir()
    save_file({n: t.contiguous() for n, t in tensors.items()}, target / "model.safetensors", {"format": "pt"})
    read = AutoConfig.from_pretrained(folder / name)
    read.num_nextn_predict_layers = HEADS
    read.save_pretrained(target)


class Heads(torch.nn.Module):
    """The model of ``save_with_heads`` in float64: ``model`` without its heads, and the loss of the heads."""

    def __init__(self, folder: Path, name: str) -> None:
        super().__init__()
        self.model = plain_model(folder, deep(name), torch.float64).train()
        layers = list(self.model.model.layers)
        self.model.model.layers = torch.nn.ModuleList(layers[:-HEADS])
        self.layers = torch.nn.ModuleList(layers[-HEADS:])
        tensors = load_file(folder / with_heads(name) / "model.safetensors")
        self.own = torch.nn.ParameterDict(
            {f"{h}_{own}": tensors[f"model.mtp_layers.{h}.{own}.weight"].double() for h in range(HEADS) for own in OWN}
        )

    def gradients(self) -> dict[str, torch.Tensor]:
        """Return the parameters by their names in the checkpoint, except experts."""
        named = {n: p for n, p in self.model.named_parameters()}
        for head, layer in enumerate(self.layers):
            named |= {f"model.mtp_layers.{head}.{n}": p for n, p in layer.named_parameters()}
            named |= {f"model.mtp_layers.{head}.{own}.weight": self.own[f"{head}_{own}"] for own in OWN}
        return {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in named.items()}

    def loss(self, samples: Sequence[OracleSample], heads: int) -> torch.Tensor:
        """Return the mean over the heads, each a mean over its targets in the step."""
        numerators, counts = [torch.zeros((), dtype=torch.float64) for _ in range(heads)], [0.0] * heads
        for sample in samples:
            ids = torch.as_tensor(sample.tokens)
            mask = torch.zeros(len(ids)).double()
            mask[len(ids) - len(sample.mask) :] = torch.as_tensor(sample.mask).double()
            hidden = self.model.model(input_ids=ids[None]).last_hidden_state
            for head in range(heads):
                hidden = self._head(head, hidden, ids)
                log_p = self.model.lm_head(hidden)[0].log_softmax(-1)
                ahead = head + 2
                chosen = log_p[: max(0, len(ids) - ahead)].gather(1, ids[ahead:, None])[:, 0]
                numerators[head] = numerators[head] - (chosen * mask[ahead:]).sum()
                counts[head] += float(mask[ahead:].sum())
        return sum(n / max(c, 1.0) for n, c in zip(numerators, counts, strict=True)) / heads

    def _head(self, head: int, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        def norm(x: torch.Tensor, own: str) -> torch.Tensor:
            variance = x.square().mean(-1, keepdim=True)
            return x * (variance + self.model.config.rms_norm_eps).rsqrt() * self.own[f"{head}_{own}"]

        ahead = torch.cat([ids[head + 1 :], torch.zeros(head + 1, dtype=torch.int64)])[: len(ids)]
        embedded = self.model.model.embed_tokens(ahead[None])
        both = torch.cat([norm(hidden, "hidden_layernorm"), norm(embedded, "token_layernorm")], -1)
        x = both @ self.own[f"{head}_input_proj"].t()
        positions = torch.arange(len(ids))[None]
        angles = self.model.model.rotary_emb(x, positions)
        out = self.layers[head](x, attention_mask=None, position_ids=positions, position_embeddings=angles)
        return norm(out[0] if isinstance(out, tuple) else out, "final_layernorm")


Groups = Sequence[Sequence[int]]  # which samples' load is balanced together
Routers = list[tuple[Any, list[torch.Tensor]]]  # every router with its inputs, sample by sample


@contextmanager
def recorded_routers(model: Any) -> Iterator[Routers]:
    """Record what every router of ``model`` is given by the passes of the block."""
    routers: Routers = [(module, []) for name, module in model.named_modules() if name.endswith("mlp.gate")]
    hooks = [
        gate.register_forward_pre_hook(lambda _, args, inputs=inputs: inputs.append(args[0].flatten(0, -2)))
        for gate, inputs in routers
    ]
    try:
        yield routers
    finally:
        for hook in hooks:
            hook.remove()


def router_losses(
    routers: Routers, k: int, samples: Sequence[OracleSample], groups: Groups
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return load-balancing and z-loss, each summed over ``routers``, which choose ``k`` experts for a token."""
    tokens = sum(len(s.tokens) for s in samples)
    balance = z_loss = torch.zeros((), dtype=torch.float64)
    for gate, inputs in routers:
        logits = [x @ gate.weight.t() for x in inputs]
        assert [len(x) for x in logits] == [len(s.tokens) for s in samples]
        for group in groups:
            together = torch.cat([logits[i] for i in group])
            p = together.softmax(-1)
            chosen = torch.zeros_like(p).scatter(1, p.topk(k).indices, 1.0)
            experts, count = p.shape[1], len(p)
            balance = balance + count / tokens * experts * (chosen.sum(0) / (count * k) * p.mean(0)).sum()
        z_loss = z_loss + torch.cat(logits).logsumexp(-1).square().sum() / tokens
    return balance, z_loss
