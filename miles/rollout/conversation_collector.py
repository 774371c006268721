"""Iterations of conversations, for ``--loss-type sft_loss``: nothing is generated or scored."""

from __future__ import annotations

from typing import Any

from miles.rollout.collect import PromptSource, ScoredGroups
from miles.tasks.data.conversations import Conversation
from miles.types.metrics import Metric
from miles.types.sample import PromptGroup, Sample, SampleStatus


class ConversationCollector:
    """A ``GroupCollector`` that draws conversations: each is a group of one sample."""

    def __init__(self, stream: PromptSource, batch_size: int) -> None:
        """``stream`` draws conversations, ``batch_size`` of them per iteration."""
        self._stream = stream
        self._batch_size = batch_size

    async def collect(self, iteration: int) -> ScoredGroups:
        """Return the next conversations, and their lengths as metrics."""
        groups = [self._group(drawn) for drawn in self._stream.draw(self._batch_size)]
        samples = [sample for group in groups for sample in group.samples]
        metrics = {
            "prompt_length": Metric.mean(len(s.prompt.token_ids) for s in samples),
            "response_length": Metric.mean(len(s.response_ids) for s in samples),
            "loss_tokens": Metric(sum(s.num_loss_tokens for s in samples), 1.0),
            "tokens": Metric(sum(len(s.response_ids) for s in samples), 1.0),
        }
        return ScoredGroups(groups, {f"rollout/{name}": metric for name, metric in metrics.items()})

    def _group(self, drawn: PromptGroup) -> PromptGroup:
        conversation = drawn.prompt
        assert isinstance(conversation, Conversation), "the stream is one of conversations"
        sample = Sample(
            conversation.prompt,
            drawn.group_index,
            trajectory_id=drawn.group_index,
            response_ids=list(conversation.response_ids),
            response=conversation.response,
            loss_mask=list(conversation.loss_mask),
            rollout_log_probs=[0.0] * len(conversation.response_ids),  # nothing sampled them, and the loss reads none
            status=SampleStatus.COMPLETED,
        )
        return PromptGroup(drawn.group_index, sample.prompt, [sample])

    def state(self) -> dict[str, Any]:
        """Return the stream's position."""
        return self._stream.state()

    def weights_changed(self, version: int) -> None:
        """Do nothing: no weights made the conversations."""
