"""Tokens per second of the embedded engine against transformers' ``generate``: same model, prompts and sampling.

``python benchmarks/torch_engine.py --model outputs/models/SmolLM2-135M-Instruct`` prints one JSON object. The two run
alternately in one process, so that a busy machine slows both; the ratio of the medians is the result.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time

import torch
from transformers import AutoModelForCausalLM

from miles.engine.base import GenerationRequest, SamplingParams
from miles.engine.torch_engine import TorchEngine


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="Hugging Face folder")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples-per-prompt", type=int, default=8)
    parser.add_argument("--prompt-len", type=int, default=48, help="longest prompt; the shortest has half of it")
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--device", default="cpu")
    return parser.parse_args()


def random_prompts(count: int, longest: int, vocab_size: int) -> list[list[int]]:
    """``count`` prompts of random tokens, of lengths spread between half of ``longest`` and all of it."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.linspace(longest / 2, longest, count).long().tolist()
    return [torch.randint(3, vocab_size, (n,), generator=generator).tolist() for n in lengths]


class Reference:
    """transformers' ``generate``: left-padded prompts, its own cache, the log-probs not even asked for."""

    def __init__(self, path: str, dtype: torch.dtype, device: str) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, device_map=device).eval()

    def run(self, prompts: list[list[int]], samples: int, new_tokens: int) -> None:
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts], device=self.model.device)
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=self.model.device)
        self.model.generate(
            ids,
            attention_mask=mask,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            num_return_sequences=samples,
            pad_token_id=0,
        )


async def run_engine(engine: TorchEngine, prompts: list[list[int]], samples: int, new_tokens: int) -> int:
    """Returns the number of generated tokens; a response may end early."""
    requests = [
        GenerationRequest(tuple(p), tuple(range(i * samples, (i + 1) * samples)), SamplingParams(new_tokens))
        for i, p in enumerate(prompts)
    ]
    groups = await asyncio.gather(*(engine.generate(r) for r in requests))
    return sum(len(g.token_ids) for group in groups for g in group)


def main() -> None:
    args = parse()
    torch.set_num_threads(args.threads)
    dtype = getattr(torch, args.dtype)
    reference = Reference(args.model, dtype, args.device)
    engine = TorchEngine(args.model, dtype, args.device, args.prompts * args.samples_per_prompt)
    prompts = random_prompts(args.prompts, args.prompt_len, reference.model.config.vocab_size)
    tokens = args.prompts * args.samples_per_prompt * args.new_tokens
    speeds: dict[str, list[float]] = {"transformers": [], "miles": []}
    for repeat in range(args.repeats + 1):  # the first warms up
        start = time.perf_counter()
        reference.run(prompts, args.samples_per_prompt, args.new_tokens)
        middle = time.perf_counter()
        ours = asyncio.run(run_engine(engine, prompts, args.samples_per_prompt, args.new_tokens))
        end = time.perf_counter()
        if repeat:
            speeds["transformers"].append(tokens / (middle - start))
            speeds["miles"].append(ours / (end - middle))
    median = {name: round(statistics.median(values), 1) for name, values in speeds.items()}
    result = {"tokens_per_second": median, "ratio": round(median["miles"] / median["transformers"], 2)}
    print(json.dumps({**result, "sequences": tokens // args.new_tokens, "new_tokens": args.new_tokens}))


if __name__ == "__main__":
    main()
