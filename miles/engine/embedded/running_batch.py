"""Decode a batch of sequences together: admit new ones, take a step, retire finished ones. Synchronous, one thread."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, field

import numpy as np
import torch

from miles.engine.base import FinishReason, Generation, SamplingParams
from miles.engine.embedded.model_runner import ModelRunner
from miles.engine.embedded.sampling import RowSampling, sample, seeded_uniforms
from miles.engine.embedded.stop_text import StopText
from miles.profiling.spans import span
from miles.replay.token_sets import TokenSetsBuilder

PREFILL_TOKENS = 16384  # per prefill pass, with padding
MASK_STEP = 16  # attended widths are multiples of this, which suits the fused kernels


@dataclass(eq=False)
class Sequence:
    """A response in progress. ``weight_version`` is that of its last token; before the first token, the engine's."""

    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    stop_ids: frozenset[int]
    uniforms: np.ndarray  # one per token to come
    weight_version: int
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    earlier_versions: list[tuple[int, int]] = field(default_factory=list)  # (version, tokens) of the weights before
    finish_reason: FinishReason | None = None
    stop_text: StopText | None = None
    support: TokenSetsBuilder | None = None  # what each token was drawn from, if it is asked for
    experts: list[np.ndarray] = field(default_factory=list)  # of the positions that were read, if they are asked for

    @classmethod
    def start(
        cls,
        prompt_ids: tuple[int, ...],
        sampling: SamplingParams,
        stop_ids: frozenset[int],
        seed: int,
        version: int,
        stop_text: StopText | None = None,
        vocab_size: int = 0,
    ) -> Sequence:
        """Return a sequence without tokens, with its random numbers drawn."""
        uniforms = seeded_uniforms(seed, sampling.max_new_tokens)
        support = TokenSetsBuilder(vocab_size) if sampling.returns_support else None
        return cls(prompt_ids, sampling, stop_ids, uniforms, version, stop_text=stop_text, support=support)

    @property
    def position(self) -> int:
        """The position of the last token: the tokens of prompt and response, minus one."""
        return len(self.prompt_ids) + len(self.token_ids) - 1

    def append(self, token: int, log_prob: float, version: int, kept: np.ndarray | None = None) -> None:
        """Append the next token, drawn from ``kept`` (None: from all), and finish if it ends the response."""
        if self.support is not None:
            self.support.add(kept)
        if version != self.weight_version:
            self._end_run(version)
        self.token_ids.append(token)
        self.log_probs.append(log_prob)
        if token in self.stop_ids or (self.stop_text is not None and self.stop_text.ends(self.token_ids)):
            self.finish_reason = "stop"
        elif len(self.token_ids) == self.sampling.max_new_tokens:
            self.finish_reason = "length"

    def _end_run(self, version: int) -> None:
        """Note how many tokens the old weights generated, if any: the weights have changed."""
        tokens = len(self.token_ids) - sum(count for _, count in self.earlier_versions)
        if tokens:
            self.earlier_versions.append((self.weight_version, tokens))
        self.weight_version = version

    def result(self) -> Generation:
        """Return the finished response."""
        assert self.finish_reason is not None, "a running sequence has no result"
        return Generation(
            self.token_ids,
            self.log_probs,
            self.finish_reason,
            self.weight_version,
            tuple(self.earlier_versions),
            None if self.support is None else self.support.build(),
            np.concatenate(self.experts) if self.experts else None,
        )


class RunningBatch:
    """Assign rows of the KV cache to sequences: ``sequences[i]`` owns row i."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._row_sampling: RowSampling | None = None  # of the current sequences
        self.sequences: list[Sequence] = []

    def admit(self, sequences: Many[Sequence], version: int) -> None:
        """Prefill the prompts of new sequences, each distinct prompt once, and draw their first tokens."""
        by_prompt: dict[tuple[int, ...], list[Sequence]] = {}
        for sequence in sequences:
            self._runner.cache.expect(len(sequence.prompt_ids) + sequence.sampling.max_new_tokens)
            by_prompt.setdefault(sequence.prompt_ids, []).append(sequence)
        prompts = sorted(by_prompt, key=len, reverse=True)  # similar lengths together: little padding
        while prompts:
            count = max(1, PREFILL_TOKENS // len(prompts[0]))
            if self._runner.is_recurrent:  # padding would enter the states
                count = min(count, sum(len(prompt) == len(prompts[0]) for prompt in prompts))
            self._prefill(prompts[:count], by_prompt, version)
            prompts = prompts[count:]

    def step(self, version: int) -> None:
        """Decode one token of every sequence."""
        last_tokens = [s.token_ids[-1] for s in self.sequences]
        positions = [s.position for s in self.sequences]
        width = -(-(max(positions) + 1) // MASK_STEP) * MASK_STEP
        with span(f"decode {len(positions)} sequences"):
            logits = self._decode(last_tokens, positions, width)
        if self._row_sampling is None:
            self._row_sampling = self._sampling_of(self.sequences)
        self._draw(self.sequences, logits, self._row_sampling, version)

    @torch.inference_mode()
    def retire(self) -> list[Sequence]:
        """Remove and return the finished sequences; the last rows move into the gaps."""
        retired = [s for s in self.sequences if s.finish_reason is not None]
        if retired:
            self._row_sampling = None
        row = 0
        while row < len(self.sequences):
            if self.sequences[row].finish_reason is None:
                row += 1
                continue
            last = self.sequences.pop()
            if row < len(self.sequences):
                if last.finish_reason is None:
                    self._runner.cache.move(len(self.sequences), row, last.position)
                self.sequences[row] = last
        if not self.sequences:
            self._runner.cache.clear()
        return retired

    def _prefill(
        self, prompts: Many[tuple[int, ...]], by_prompt: dict[tuple[int, ...], list[Sequence]], version: int
    ) -> None:
        new = [s for prompt in prompts for s in by_prompt[prompt]]
        prompt_of_row = [i for i, prompt in enumerate(prompts) for _ in by_prompt[prompt]]
        with span(f"prefill {len(prompts)} prompts"):
            logits = self._prefill_rows(prompts, new, prompt_of_row)
        self.sequences.extend(new)
        self._row_sampling = None
        self._draw(new, logits[torch.tensor(prompt_of_row, device=logits.device)], self._sampling_of(new), version)

    def _decode(self, last_tokens: list[int], positions: list[int], width: int) -> torch.Tensor:
        """Return the logits of the next token of every sequence, and record the experts of those that want them."""
        if not any(s.sampling.returns_experts for s in self.sequences):
            return self._runner.decode(last_tokens, positions, width)
        with self._runner.recording_experts() as take:
            logits = self._runner.decode(last_tokens, positions, width)
            for sequence, row in zip(self.sequences, take(), strict=True):
                if sequence.sampling.returns_experts:
                    sequence.experts.append(row[None])
        return logits

    def _prefill_rows(
        self, prompts: Many[tuple[int, ...]], new: Many[Sequence], prompt_of_row: list[int]
    ) -> torch.Tensor:
        """Return the logits of each prompt's first token, and record the experts for the sequences that want them."""
        if not any(s.sampling.returns_experts for s in new):
            return self._runner.prefill(prompts, prompt_of_row, first_row=len(self.sequences))
        with self._runner.recording_experts() as take:
            logits = self._runner.prefill(prompts, prompt_of_row, first_row=len(self.sequences))
            chosen = take()
        rows = chosen.reshape(len(prompts), -1, *chosen.shape[1:])  # padded to the longest
        of_prompts = [row[: len(prompt)].copy() for row, prompt in zip(rows, prompts, strict=True)]
        for sequence, prompt_row in zip(new, prompt_of_row, strict=True):
            if sequence.sampling.returns_experts:
                sequence.experts.append(of_prompts[prompt_row])
        return logits

    def _sampling_of(self, sequences: Many[Sequence]) -> RowSampling:
        return RowSampling.of([s.sampling for s in sequences], self._runner.vocab_size, self._runner.device)

    @torch.inference_mode()
    def _draw(self, sequences: Many[Sequence], logits: torch.Tensor, rows: RowSampling, version: int) -> None:
        uniforms = torch.tensor([s.uniforms[len(s.token_ids)] for s in sequences], dtype=torch.float64)
        with span("sample"):
            drawn = sample(logits, rows, uniforms.to(logits.device))
        tokens = zip(sequences, drawn.tokens.tolist(), drawn.log_probs.tolist(), strict=True)
        for row, (sequence, token, log_prob) in enumerate(tokens):
            sequence.append(token, log_prob, version, drawn.supports.get(row))
