"""Compare the tokens per second of the embedded engine and transformers' ``generate``: same model, prompts, sampling.

``python benchmarks/torch_engine.py --model outputs/models/SmolLM2-135M-Instruct`` prints one JSON object with the
medians and their ratio. The two run alternately, so that a busy machine slows both.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import time
from concurrent.futures import ProcessPoolExecutor

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from miles.engine.base import GenerationRequest, SamplingParams
from miles.engine.embedded.torch_engine import TorchEngine


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="Hugging Face folder")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples-per-prompt", type=int, default=8)
    parser.add_argument(
        "--prompt-len", type=int, default=48, help="tokens of the longest prompt; the shortest has half"
    )
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--device", default="cpu")
    return parser.parse_args()


def random_prompts(count: int, longest: int, vocab_size: int) -> list[list[int]]:
    """Return ``count`` prompts of random tokens, with lengths spread from half of ``longest`` to ``longest``."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.linspace(longest / 2, longest, count).long().tolist()
    return [torch.randint(3, vocab_size, (n,), generator=generator).tolist() for n in lengths]


class Reference:
    """transformers' ``generate``: left-padded prompts, its own cache, no log-probs."""

    def __init__(self, path: str, dtype: torch.dtype, device: str) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, device_map=device).eval()

    def run(self, prompts: list[list[int]], samples: int, new_tokens: int) -> int:
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts], device=self.model.device)
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=self.model.device)
        output = self.model.generate(
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
        return len(prompts) * samples * (output.shape[1] - longest)


class Embedded:
    """The embedded engine, with log-probs."""

    def __init__(self, path: str, dtype: torch.dtype, device: str) -> None:
        self.engine = TorchEngine(path, dtype, device, max_batch_size=256)

    def run(self, prompts: list[list[int]], samples: int, new_tokens: int) -> int:
        return asyncio.run(self._generate(prompts, samples, new_tokens))

    async def _generate(self, prompts: list[list[int]], samples: int, new_tokens: int) -> int:
        requests = [
            GenerationRequest(tuple(p), tuple(range(i * samples, (i + 1) * samples)), SamplingParams(new_tokens))
            for i, p in enumerate(prompts)
        ]
        groups = await asyncio.gather(*(self.engine.generate(r) for r in requests))
        return sum(len(g.token_ids) for group in groups for g in group)


class Contender:
    """One implementation in its own process, so that neither disturbs the other's thread pool."""

    def __init__(self, kind: type[Reference] | type[Embedded], args: argparse.Namespace) -> None:
        self.speeds: list[float] = []
        context = multiprocessing.get_context("spawn")
        loading = (kind, args.model, args.dtype, args.device, args.threads)
        self._process = ProcessPoolExecutor(1, context, initializer=load, initargs=loading)

    def run(self, prompts: list[list[int]], samples: int, new_tokens: int) -> float:
        """Return the tokens per second of one run."""
        return self._process.submit(timed_run, prompts, samples, new_tokens).result()

    def close(self) -> None:
        self._process.shutdown()


loaded: list[Reference | Embedded] = []  # one per process of a contender


def load(kind: type[Reference] | type[Embedded], path: str, dtype: str, device: str, threads: int) -> None:
    torch.set_num_threads(threads)
    loaded.append(kind(path, getattr(torch, dtype), device))


def timed_run(prompts: list[list[int]], samples: int, new_tokens: int) -> float:
    start = time.perf_counter()
    tokens = loaded[0].run(prompts, samples, new_tokens)
    return tokens / (time.perf_counter() - start)


def main() -> None:
    args = parse()
    vocab_size = AutoConfig.from_pretrained(args.model).get_text_config().vocab_size
    work = (random_prompts(args.prompts, args.prompt_len, vocab_size), args.samples_per_prompt, args.new_tokens)
    contenders = {"transformers": Contender(Reference, args), "miles": Contender(Embedded, args)}
    for repeat in range(args.repeats + 1):  # the first is warm-up
        for contender in contenders.values():
            speed = contender.run(*work)
            if repeat:
                contender.speeds.append(speed)
    for contender in contenders.values():
        contender.close()
    median = {name: round(statistics.median(c.speeds), 1) for name, c in contenders.items()}
    result = {"tokens_per_second": median, "ratio": round(median["miles"] / median["transformers"], 2)}
    print(json.dumps({**result, "sequences": args.prompts * args.samples_per_prompt, "new_tokens": args.new_tokens}))


if __name__ == "__main__":
    main()
