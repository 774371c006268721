"""Compute the loss of another trainer, in a process that has its package: ``python -m … trl < case > result``.

A case has the trainer's own settings and a batch (``batch.py``). The trainer's code builds its configuration object and
its loss from the settings, and computes the loss of every micro-batch from given log-probs. Only the model is left out:
its log-probs are the leaf whose gradient is compared. A framework also changes gradients around the loss (averages over
ranks, DeepSpeed's division by the number of micro-batches); this is done here, once, as its documentation states.
"""

from __future__ import annotations

import ast
import importlib
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

Columns = dict[str, torch.Tensor]  # of one micro-batch, padded: [samples, longest]
MicroLoss = Callable[[Columns, int], torch.Tensor]


def gradients(case: dict[str, Any], log_probs: torch.Tensor, loss_of: MicroLoss) -> float:
    """Add up the loss of all micro-batches, averaged over ranks, and its gradient in ``log_probs``."""
    total = 0.0
    for rank in case["ranks"]:
        for place in rank:
            columns = {name: torch.tensor(value, dtype=torch.float64)[place] for name, value in case["columns"].items()}
            columns["log_probs"] = log_probs[place]
            loss = loss_of(columns, len(rank)) / len(case["ranks"])
            loss.backward()
            total += loss.item()
    return total


def trl(case: dict[str, Any], log_probs: torch.Tensor) -> float:
    """Build a ``GRPOTrainer`` from a ``GRPOConfig``, and ask it for its loss."""
    datasets, transformers = (importlib.import_module(name) for name in ("datasets", "transformers"))
    tokenizers, package = (importlib.import_module(name) for name in ("tokenizers", "trl"))
    names = {"a": 0, "<eos>": 1, "<pad>": 2, "<unk>": 3}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(names, unk_token="<unk>"))
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_object=words, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>"
        )
        config = transformers.Qwen2Config(vocab_size=4, num_key_value_heads=1, **sizes)
        transformers.Qwen2ForCausalLM(config).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        settings = {**case["settings"], "output_dir": folder, "use_cpu": True, "bf16": False, "report_to": "none"}
        is_vllm = settings.pop("use_vllm", False)
        trainer = package.GRPOTrainer(
            model=folder,
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=package.GRPOConfig(**settings),
            train_dataset=datasets.Dataset.from_list([{"prompt": "a"}] * 64),
            processing_class=tokenizer,
        )
    trainer.use_vllm = is_vllm  # no engine is started: its log-probs are given
    trainer.model.train()
    trainer.accelerator.state.num_processes = len(case["ranks"])
    tokens = torch.tensor(case["columns"]["mask"], dtype=torch.float64).sum()

    def loss_of(columns: Columns, micro_batches: int) -> torch.Tensor:
        trainer.current_gradient_accumulation_steps = micro_batches
        values = (columns["log_probs"], torch.zeros_like(columns["log_probs"]), None)
        trainer._get_per_token_logps_and_entropies = lambda *_, **__: values
        # The generation has more steps than this one, with as many tokens each, if the settings ask for several.
        share = trainer.args.steps_per_generation / trainer.args.gradient_accumulation_steps
        ids = torch.zeros_like(columns["mask"], dtype=torch.int64)
        ratios = (columns["old"] - columns["engine"]).exp()
        if "sequence" in trainer.vllm_importance_sampling_mode:
            ratios = ((columns["old"] - columns["engine"]) * columns["mask"]).sum(-1, keepdim=True).exp()
        bound = trainer.vllm_importance_sampling_clip_max
        ratios = ratios.clamp(max=bound) if "truncate" in trainer.vllm_importance_sampling_mode else ratios
        ratios = ratios.masked_fill(ratios > bound, 0.0)
        inputs = {
            "prompt_ids": ids[:, :1],
            "prompt_mask": ids[:, :1] + 1,
            "completion_ids": ids,
            "completion_mask": columns["mask"],
            "advantages": columns["advantages"][:, 0],
            "old_per_token_logps": columns["old"],
            "ref_per_token_logps": columns["ref"],
            "num_items_in_batch": tokens * share,
            "importance_sampling_ratio": ratios,
        }
        loss: torch.Tensor = trainer._compute_loss(trainer.model, inputs)
        return loss

    return gradients(case, log_probs, loss_of)


class _Padded(dict[str, Any]):
    """A batch of verl that is padded already."""

    def select(self, *names: str) -> _Padded:
        return _Padded({name: self[name] for name in names})

    def to_padded_tensor(self) -> _Padded:
        return self


def verl(case: dict[str, Any], log_probs: torch.Tensor) -> float:
    """Build an ``FSDPActorConfig`` from overrides, and ask ``ppo_loss`` for the loss."""
    configs = importlib.import_module("verl.workers.config")
    losses: Any = importlib.import_module("verl.workers.utils.losses")
    losses.no_padding_2_padding = lambda values, _: values
    settings = dict(case["settings"])
    names = [name for name in settings if name.startswith("policy_")]
    of_policy = {name.removeprefix("policy_loss."): settings.pop(name) for name in names}
    config = configs.FSDPActorConfig(
        rollout_n=4,
        ppo_micro_batch_size_per_gpu=1,
        optim=configs.FSDPOptimizerConfig(lr=1e-6),
        policy_loss=configs.PolicyLossConfig(**of_policy),
        **settings,
    )
    mask = torch.tensor(case["columns"]["mask"], dtype=torch.float64)

    def loss_of(columns: Columns, _: int) -> torch.Tensor:
        batch: dict[str, Any] = {
            "response_mask": columns["mask"],
            "old_log_probs": columns["old"],
            "ref_log_prob": columns["ref"],
        }
        batch |= {"advantages": columns["advantages"], "dp_size": len(case["ranks"])}
        counts: dict[str, Any] = {"batch_num_tokens": mask.sum(), "global_batch_size": len(mask)}
        loss: torch.Tensor = losses.ppo_loss(config, {"log_probs": columns["log_probs"]}, _Padded(batch | counts))[0]
        return loss

    return gradients(case, log_probs, loss_of)


def openrlhf(case: dict[str, Any], log_probs: torch.Tensor) -> float:
    """Parse flags with the parser of ``train_ppo_ray``, and build a ``PolicyLoss`` as its actor does."""
    package = importlib.import_module("openrlhf")
    sys.modules["deepspeed"] = ModuleType("deepspeed")  # imported by the package, and not used by its losses
    sys.modules["deepspeed"].__spec__ = ModuleSpec("deepspeed", None)
    models = ModuleType("openrlhf.models")
    models.__path__ = [f"{package.__path__[0]}/models"]
    sys.modules["openrlhf.models"] = models
    losses, utils = (importlib.import_module(f"openrlhf.models.{name}") for name in ("loss", "utils"))
    args = _openrlhf_flags(f"{package.__path__[0]}/cli/train_ppo_ray.py", case["settings"])
    correction = {
        f"is_correction_{name}": getattr(args.algo.advantage, f"is_correction_{name}") for name in _CORRECTION
    }
    clips = args.actor.eps_clip_low_high or (args.actor.eps_clip, args.actor.eps_clip)
    policy_loss = losses.PolicyLoss(
        clip_eps_low=clips[0],
        clip_eps_high=clips[1],
        dual_clip=args.actor.dual_clip,
        token_level_loss=args.actor.loss_agg_mode == "token-mean",
        policy_loss_type=args.actor.policy_loss_type,
        **correction,
    )
    mask = torch.tensor(case["columns"]["mask"], dtype=torch.float64)

    def loss_of(columns: Columns, micro_batches: int) -> torch.Tensor:
        counts: dict[str, Any] = {"batch_num_tokens": mask.sum() / micro_batches, "dp_size": len(case["ranks"])}
        counts["global_batch_size"] = (mask.sum(-1) > 0).sum() / micro_batches
        inputs = (columns["log_probs"], columns["old"], columns["advantages"], columns["mask"], columns["engine"])
        loss: torch.Tensor = policy_loss(*inputs, **counts)[0]
        if args.algo.kl.use_loss:
            options = {"kl_estimator": args.algo.kl.estimator, "unbiased_gradient": args.algo.kl.unbiased_gradient}
            kl = utils.compute_approx_kl(columns["log_probs"], columns["ref"], log_probs_old=columns["old"], **options)
            loss = loss + args.algo.kl.init_coef * losses.aggregate_loss(kl, columns["mask"], **counts)
        return loss / micro_batches  # DeepSpeed's

    return gradients(case, log_probs, loss_of)


_CORRECTION = ("level", "mode", "gating", "threshold")


def _openrlhf_flags(path: str, words: Sequence[str]) -> SimpleNamespace:
    """Run the statements that build the parser of a script, which is no function there."""
    with open(path, encoding="utf-8") as file:
        tree = ast.parse(file.read())
    body = next(node.body for node in tree.body if isinstance(node, ast.If) and "__main__" in ast.unparse(node.test))
    stop = next(number for number, node in enumerate(body) if "parse_args" in ast.unparse(node))
    imports: list[ast.stmt] = [node for node in tree.body if ast.unparse(node) in _NEEDED]
    scope: dict[str, Any] = {}
    exec(compile(ast.Module([*imports, *body[:stop]], []), path, "exec"), scope)  # noqa: S102
    flat = scope["parser"].parse_args([*words])
    args: SimpleNamespace = importlib.import_module("openrlhf.utils.config").hierarchize(flat)
    return args


_NEEDED = ("import argparse", "from datetime import datetime")
TRAINERS = {"trl": trl, "verl": verl, "openrlhf": openrlhf}


def main() -> None:
    """Read cases as a JSON list, and print the loss and gradient of each, or why there is none."""
    results = []
    for case in json.load(sys.stdin):
        log_probs = torch.tensor(case["columns"]["log_probs"], dtype=torch.float64, requires_grad=True)
        loss = TRAINERS[sys.argv[1]](case, log_probs)
        assert log_probs.grad is not None
        results.append({"loss": loss, "gradient": log_probs.grad.tolist()})
    print(f"\n{json.dumps(results)}")


if __name__ == "__main__":
    main()
