"""Decode a batch of sequences together: admit new ones, take a step, retire finished ones. Synchronous, one thread.

Sequences that are admitted together with one prompt share a row of the KV cache as long as their tokens are equal, so
that what they begin with is computed once. When their next tokens differ, the row is copied. The less a policy varies
its answers, the fewer rows there are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Many  # here a ``Sequence`` is a response in progress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch

from miles.base.profiling import span
from miles.engine.base import FinishReason, Generation, SamplingParams
from miles.engine.embedded.model_runner import ModelRunner
from miles.engine.embedded.sampling import RowSampling, StopText, sample, seeded_uniforms
from miles.types.replay import TokenSetsBuilder

if TYPE_CHECKING:
    from miles.types.images import PromptImages

ReadPrompt: TypeAlias = "tuple[tuple[int, ...], PromptImages | None]"
PREFILL_TOKENS = 16384  # per prefill pass, with padding
MASK_STEP = 16  # attended widths are multiples of this, which suits the fused kernels


@dataclass(eq=False)
class Sequence:
    """A response in progress. ``weight_version`` belongs to its last token; before the first token, to the engine."""

    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    stop_ids: frozenset[int]
    seed: int
    weight_version: int
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    earlier_versions: list[tuple[int, int]] = field(default_factory=list)  # (version, tokens) of the weights before
    finish_reason: FinishReason | None = None
    stop_text: StopText | None = None
    support: TokenSetsBuilder | None = None  # what each token was drawn from, if it is asked for
    images: PromptImages | None = None
    experts: list[np.ndarray] = field(default_factory=list)  # of the positions that were read, if they are asked for

    def __post_init__(self) -> None:
        """Draw the random numbers: one per token to come."""
        self.uniforms = seeded_uniforms(self.seed, self.sampling.max_new_tokens)

    @property
    def prompt(self) -> ReadPrompt:
        """The input of the prefill; sequences with the same prompt share it."""
        return self.prompt_ids, self.images

    @property
    def position(self) -> int:
        """The position of the last token: the tokens of prompt and response, minus one."""
        return len(self.prompt_ids) + len(self.token_ids) - 1

    def append(self, token: int, log_prob: float, version: int, candidates: np.ndarray | None = None) -> None:
        """Append the next token, drawn from ``candidates`` (None: from all), and finish if it ends the response."""
        if self.support is not None:
            self.support.add(candidates)
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
    """Assign rows of the KV cache to sequences: row i belongs to ``_rows[i]``, which have equal tokens."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._rows: list[list[Sequence]] = []
        self._sampling: RowSampling | None = None  # of the current sequences

    @property
    def sequences(self) -> list[Sequence]:
        """The running sequences, in the order of their rows."""
        return [sequence for row in self._rows for sequence in row]

    def admit(self, sequences: Many[Sequence], version: int) -> None:
        """Prefill the prompts of new sequences, each distinct prompt once, and draw their first tokens."""
        by_prompt: dict[ReadPrompt, list[Sequence]] = {}
        self._runner.cache.reserve(len(self.sequences) + len(sequences), 0)  # each may need a separate row
        for sequence in sequences:
            self._runner.cache.expect(len(sequence.prompt_ids) + sequence.sampling.max_new_tokens)
            by_prompt.setdefault(sequence.prompt, []).append(sequence)
        # Prompts of similar lengths are prefilled together: little padding.
        prompts = sorted(by_prompt, key=lambda prompt: len(prompt[0]), reverse=True)
        while prompts:
            count = max(1, PREFILL_TOKENS // len(prompts[0][0]))
            if self._runner.is_recurrent:  # padding would enter the states
                count = min(count, sum(len(ids) == len(prompts[0][0]) for ids, _ in prompts))
            self._prefill(prompts[:count], by_prompt, version)
            prompts = prompts[count:]

    def step(self, version: int) -> None:
        """Decode one token of every sequence."""
        last_tokens = [row[0].token_ids[-1] for row in self._rows]
        positions = [row[0].position for row in self._rows]
        images = [row[0].images for row in self._rows]
        width = -(-(max(positions) + 1) // MASK_STEP) * MASK_STEP
        with span(f"decode {len(positions)} rows"):
            logits = self._decode(last_tokens, positions, width, images)
        if self._sampling is None:
            self._sampling = self._sampling_of(self.sequences)
        self._draw(0, logits, self._sampling, version)

    @torch.inference_mode()
    def retire(self) -> None:
        """Remove the finished sequences; the last rows move into the gaps."""
        if any(s.finish_reason is not None for s in self.sequences):
            self._sampling = None
        self._rows = [[s for s in row if s.finish_reason is None] for row in self._rows]
        row = 0
        while row < len(self._rows):
            if self._rows[row]:
                row += 1
                continue
            last = self._rows.pop()
            if row < len(self._rows):
                if last:
                    self._runner.cache.move(len(self._rows), row, last[0].position)
                self._rows[row] = last
        if not self._rows:
            self._runner.cache.clear()

    def _prefill(self, prompts: Many[ReadPrompt], by_prompt: dict[ReadPrompt, list[Sequence]], version: int) -> None:
        first_row = len(self._rows)
        with span(f"prefill {len(prompts)} prompts"):
            logits = self._prefill_rows(prompts, [by_prompt[prompt] for prompt in prompts])
        self._rows.extend(by_prompt[prompt] for prompt in prompts)
        self._sampling = None
        sampling = self._sampling_of([s for prompt in prompts for s in by_prompt[prompt]])
        self._draw(first_row, logits, sampling, version)

    def _decode(
        self, last_tokens: list[int], positions: list[int], width: int, images: Many[PromptImages | None]
    ) -> torch.Tensor:
        """Return the logits that follow each row, and record the experts for the sequences that want them."""
        if not any(s.sampling.returns_experts for s in self.sequences):
            return self._runner.decode(last_tokens, positions, width, images)
        with self._runner.recording_experts() as take:
            logits = self._runner.decode(last_tokens, positions, width, images)
            for row, chosen in zip(self._rows, take(), strict=True):
                _record(row, chosen[None])
        return logits

    def _prefill_rows(self, prompts: Many[ReadPrompt], new: Many[list[Sequence]]) -> torch.Tensor:
        """Return the logits that follow each prompt, and record the experts for the sequences that want them."""
        ids = [token_ids for token_ids, _ in prompts]
        images = [images for _, images in prompts]
        if not any(s.sampling.returns_experts for row in new for s in row):
            return self._runner.prefill(ids, len(self._rows), images)
        with self._runner.recording_experts() as take:
            logits = self._runner.prefill(ids, len(self._rows), images)
            chosen = take()
        of_prompts = chosen.reshape(len(prompts), -1, *chosen.shape[1:])  # padded to the longest
        for row, prompt, experts in zip(new, ids, of_prompts, strict=True):
            _record(row, experts[: len(prompt)].copy())
        return logits

    def _sampling_of(self, sequences: Many[Sequence]) -> RowSampling:
        return RowSampling.of([s.sampling for s in sequences], self._runner.vocab_size, self._runner.device)

    @torch.inference_mode()
    def _draw(self, first_row: int, logits: torch.Tensor, sampling: RowSampling, version: int) -> None:
        """Draw the next token of the sequences of ``first_row`` and the rows after it, and divide their rows."""
        rows = self._rows[first_row:]
        sequences = [sequence for row in rows for sequence in row]
        uniforms = torch.tensor([s.uniforms[len(s.token_ids)] for s in sequences], dtype=torch.float64)
        with span("sample"):
            if len(sequences) > len(rows):
                row_of = [number for number, row in enumerate(rows) for _ in row]
                logits = logits[torch.tensor(row_of, device=logits.device)]
            drawn = sample(logits, sampling, uniforms.to(logits.device))
        log_probs = drawn.log_probs.tolist()
        if not math.isfinite(sum(log_probs)):
            raise FloatingPointError(
                f"--rollout-engine torch: the model's logits are not numbers, with weights of version {version}; check "
                "--hf-checkpoint in the first iteration; later, lower --lr and resume from a checkpoint with --load"
            )
        tokens = zip(sequences, drawn.tokens.tolist(), log_probs, strict=True)
        for place, (sequence, token, log_prob) in enumerate(tokens):
            sequence.append(token, log_prob, version, drawn.supports.get(place))
        self._divide(first_row)

    def _divide(self, first_row: int) -> None:
        """Give sequences with other last tokens rows of their own, from ``first_row`` on."""
        sources: list[int] = []
        end = len(self._rows)
        for number in range(first_row, end):
            row = self._rows[number]
            by_token: dict[int, list[Sequence]] = {}
            for sequence in row:
                if sequence.finish_reason is None:
                    by_token.setdefault(sequence.token_ids[-1], []).append(sequence)
            first, *others = by_token.values() or [[]]
            self._rows[number] = first + [s for s in row if s.finish_reason is not None]
            self._rows.extend(others)
            sources += [number] * len(others)
        if sources:
            self._sampling = None
            self._runner.cache.copy_rows(sources, end, max(self._rows[row][0].position for row in sources))


def _record(row: Many[Sequence], experts: np.ndarray) -> None:
    """Add the experts of further positions, [positions, layers, k], to the sequences of a row that want them."""
    for sequence in row:
        if sequence.sampling.returns_experts:
            sequence.experts.append(experts)
