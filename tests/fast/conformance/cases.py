"""Cases for the ranks: a step's samples, the objective, and the layout. Plain data that can be pickled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from miles.config.parallel import ParallelArguments
from miles.config.training import TrainingArguments
from miles.objective.estimators.base import SampleRewards, less_group_mean
from miles.objective.settings import LossArguments
from miles.types.images import ImageTensors, PromptImages
from miles.types.replay import TokenSets
from miles.types.sample import Prompt, PromptGroup, Sample
from miles.types.train_batch import TokenColumns

VOCABULARY = 64
DIVISOR = 8.0  # L of ``constant``
TEMPERATURE = 0.8
MODES = ("sample_mean", "prompt_mean", "token_mean", "constant")
IMAGE_START, IMAGE, IMAGE_END = 60, 61, 62  # tokens of the model with a vision tower
PATCH = 4  # width and height in pixels; an image token is two by two patches of two frames
GRIDS = (((1, 2),), ((1, 1), (2, 1), (1, 3)), ())  # tokens of the images of each prompt, in turn
VALUE_HEAD = np.random.default_rng(11).normal(0, 0.3, (1, 32)).astype(np.float32)  # a critic that predicts something

Mask = tuple[int, ...]
Spec = tuple[tuple[tuple[Mask, ...], ...], ...]  # groups of trajectories of samples, each given by its loss mask


def ones(*lengths: int) -> tuple[Mask, ...]:
    return tuple((1,) * n for n in lengths)


def without_loss_tokens(spec: Spec) -> Spec:
    return tuple(tuple(tuple((0,) * len(mask) for mask in rollout) for rollout in group) for group in spec)


EVEN: Spec = ((ones(6), ones(6)), (ones(6), ones(6)))
UNEVEN: Spec = ((ones(4), ones(11), ones(6)), (ones(1), ones(14)), (ones(5), ones(5), ones(2)))
MASKED: Spec = (
    (
        ((0, 0, 0, 0),),
        ((1, 1, 0, 1, 1, 0, 0, 1, 1),),
    ),  # a trajectory without loss tokens, one with masked tokens inside
    (((1, 0, 0),), ((0, 1, 1, 1, 1, 0),), ((1, 1),)),
    (((0, 0),), ((0,),)),  # a prompt without a loss token
)
COMPACTED: Spec = ((ones(4, 9, 2), ones(6)), (ones(1), (ones(12)[0], (0, 1, 1, 0))), (ones(5), ones(5)))
ONE_SAMPLE: Spec = ((ones(7),),)
BATCHES = {"even": EVEN, "uneven": UNEVEN, "masked": MASKED, "compacted": COMPACTED, "one sample": ONE_SAMPLE}


@dataclass(frozen=True)
class Layout:
    """How a step is split over ``ranks`` ranks of a backend."""

    name: str
    ranks: int
    parallel: ParallelArguments = ParallelArguments()
    training: TrainingArguments = TrainingArguments(micro_batch_size=2)
    backend: str = "fsdp"


ANYWHERE = Layout("any", 1)  # for cases that something else splits
FIXED = TrainingArguments(micro_batch_size=2)
BUDGET = TrainingArguments(use_dynamic_batch_size=True, max_tokens_per_gpu=24, balance_data=True)


def context(size: int) -> ParallelArguments:
    return ParallelArguments(context_parallel_size=size)


PADDED = ParallelArguments(qkv_format="bshd")


def dynamic(budget: int) -> ParallelArguments:
    return ParallelArguments(dynamic_context_parallel=True, max_seqlen_per_dp_cp_rank=budget)


LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout("alone", 1),
        Layout("alone, packed", 1, training=BUDGET),
        Layout("dp2", 2),
        Layout("dp2, packed", 2, training=BUDGET),
        Layout("dp3", 3),
        Layout("dp3, packed", 3, training=BUDGET),
        Layout("dp3, padded by budget", 3, PADDED, BUDGET),
        Layout("alone, padded", 1, PADDED),
        Layout("dp2, padded by budget", 2, PADDED, BUDGET),
        Layout("dp4", 4),
        Layout("cp2", 2, context(2), TrainingArguments(micro_batch_size=4)),  # half as many, for each is of both ranks
        Layout("cp2, packed", 2, context(2), BUDGET),
        Layout("cp3", 3, context(3)),
        Layout("cp3, packed", 3, context(3), BUDGET),
        Layout("cp4, packed", 4, context(4), BUDGET),
        Layout("dp2 x cp2", 4, context(2)),
        Layout("dp2 x cp2, packed", 4, context(2), BUDGET),
        Layout("dynamic cp, 2 ranks", 2, dynamic(10), TrainingArguments()),
        Layout("dynamic cp, 3 ranks", 3, dynamic(32), TrainingArguments()),  # sizes are powers of two that divide 3: 1
        Layout("dynamic cp, 4 ranks", 4, dynamic(8), TrainingArguments()),
    )
}


@dataclass(frozen=True)
class Case:
    """The data of one iteration, which has several steps if it exceeds ``trajectories_per_step``."""

    spec: Spec
    loss: LossArguments
    layout: Layout
    seed: int = 0
    off_policy: bool = False  # old and reference log-probs differ from the current ones
    trajectories_per_step: int | None = None
    passes: int = 1  # over the steps of the iteration
    shuffled: bool = False  # groups, and trajectories within them, in another order
    mutation: str | None = None
    equal_rewards: bool = False  # in ``equal_group``: its samples have no advantage, and are only scored
    equal_group: int = 0
    long_rows: bool = False  # attention as for rows whose scores do not fit in memory
    model: str = "untied"
    images: bool = False  # prompts have one image, three or none
    restricted: bool = False  # tokens were drawn from sets, and every log-prob is over these
    routing: tuple[int, int, int] | None = None  # layers, experts and k: the experts of every token are given
    records_routing: bool = False  # experts are those that scored the old log-probs
    watch: bool = False  # the loss-mass canary may stop the run
    notes_canary: bool = False  # its message is in the result, and the run continues
    records_tokens: bool = False  # for the report
    scores: dict[str, list[list[float]]] = field(default_factory=dict)  # old and ref, by the sample's index in the spec


@dataclass(frozen=True)
class StepResult:
    """The result of one step by parameter: gradients, and weights before it if these move; metrics, recorded tokens."""

    gradients: dict[str, np.ndarray]
    weights: dict[str, np.ndarray]
    metrics: dict[str, float]
    critic_gradients: dict[str, np.ndarray] = field(default_factory=dict)
    tokens: dict[int, TokenColumns] = field(default_factory=dict)  # recorded for the report, by position in the step
    canary: str = ""  # its message, if the case notes it


def loss_of(mode: Any, **fields: Any) -> LossArguments:
    return LossArguments(
        loss_aggregation=mode,
        loss_aggregation_divisor=DIVISOR if mode in ("constant", "delta_l") else None,
        loss_aggregation_alpha=0.75 if mode == "delta_l" else None,
        calculate_per_token_loss=mode == "token_mean",
        **fields,
    )


FULL: dict[str, Any] = dict(
    eps_clip_high=0.28, use_kl_loss=True, kl_loss_coef=0.05, kl_loss_type="k3", entropy_coef=0.01
)


@dataclass(frozen=True)
class Row:
    """A sample with its position in the spec and its advantage."""

    place: int
    sample: Sample
    advantage: float


def rows_of(case: Case) -> list[Row]:
    """Return every sample of the case in the order of its spec."""
    rng = np.random.default_rng(case.seed)
    samples: list[Sample] = []
    rollout = 0
    for number, group in enumerate(case.spec):
        prompt = Prompt("", tuple(rng.integers(0, VOCABULARY, 3).tolist()))
        if case.images:
            prompt = _with_images(rng, GRIDS[number % len(GRIDS)])
        for masks in group:
            reward = 1.0 if case.equal_rewards and number == case.equal_group else float(rng.normal())
            samples += [_sample(rng, prompt, number, rollout, mask, reward) for mask in masks]
            rollout += 1
    if case.restricted:
        samples = [replace(sample, support=_support(sample, (case.seed, i))) for i, sample in enumerate(samples)]
    if case.routing is not None:
        samples = [replace(s, experts=_experts(s, case.routing, case.seed)) for s in samples]
    rewards = [s.reward or 0.0 for s in samples]
    std = not case.loss.disable_grpo_std_normalization
    of_step = SampleRewards(rewards, [s.group_index for s in samples], [s.trajectory_id or 0 for s in samples])
    advantages = less_group_mean(of_step, std=std)
    return [Row(i, s, a) for i, (s, a) in enumerate(zip(samples, advantages, strict=True))]


def _sample(rng: np.random.Generator, prompt: Prompt, group: int, rollout: int, mask: Mask, reward: float) -> Sample:
    n = len(mask)
    return Sample(
        prompt,
        group,
        rollout,
        response_ids=rng.integers(0, IMAGE_START if prompt.images else VOCABULARY, n).tolist(),
        loss_mask=list(mask),
        rollout_log_probs=rng.normal(-4, 0.3, n).tolist(),
        reward=reward,
    )


def _with_images(rng: np.random.Generator, grids: tuple[tuple[int, int], ...]) -> Prompt:
    ids = rng.integers(0, IMAGE_START, 3).tolist()
    counts, starts = tuple(height * width for height, width in grids), []
    for count in counts:
        starts.append(len(ids) + 1)
        ids += [IMAGE_START, *[IMAGE] * count, IMAGE_END]
    if not grids:
        return Prompt("", tuple(ids))
    pixels = rng.normal(0, 1, (4 * sum(counts), 3 * 2 * PATCH * PATCH)).astype(np.float32)
    patches = np.array([(1, 2 * height, 2 * width) for height, width in grids])
    tensors = {"pixel_values": pixels, "image_grid_thw": patches}
    image_layout = counts, tuple(starts), IMAGE
    made = ImageTensors(tensors, *image_layout, np.array([(1, *grid) for grid in grids]))
    return Prompt("", tuple(ids), images=PromptImages((), (), *image_layout, "", cache={"tensors": made}))


def _experts(sample: Sample, routing: tuple[int, int, int], seed: int) -> np.ndarray:
    """Return experts [tokens - 1, layers, k]. The prompt's are the same in every second group, so it can be shared."""
    layers, experts, k = routing
    own = sum(sample.response_ids) + 1000 * (sample.trajectory_id or 0)

    def drawn(count: int, *parts: int) -> np.ndarray:
        order = np.random.default_rng((seed, *parts)).random((count, layers, experts)).argsort(-1)
        chosen: np.ndarray = order[..., :k].astype(np.uint8)
        return chosen

    prompt = len(sample.prompt.token_ids)
    of_prompt = drawn(prompt, sample.group_index, 0 if sample.group_index % 2 else own)
    return np.concatenate([of_prompt, drawn(len(sample.response_ids) - 1, own, 1)])


def _support(sample: Sample, seed: tuple[int, int]) -> TokenSets:
    """Return sets of 1 to 20 tokens with the response's own; every fifth token was drawn from all."""
    rng = np.random.default_rng(seed)
    sets = [
        None if t % 5 == 4 else {token, *rng.choice(VOCABULARY, rng.choice([0, 1, 5, 19]), replace=False).tolist()}
        for t, token in enumerate(sample.response_ids)
    ]
    return TokenSets.of(VOCABULARY, [None if one is None else sorted(one) for one in sets])


def groups_of(case: Case, rows: Sequence[Row]) -> list[PromptGroup]:
    """Return the prompt groups as the rollout side would deliver them, in another order if the case is shuffled."""
    groups: dict[int, PromptGroup] = {}
    for row in rows:
        group = groups.setdefault(row.sample.group_index, PromptGroup(row.sample.group_index, row.sample.prompt))
        group.samples.append(row.sample)
    ordered = list(groups.values())
    if case.shuffled:
        ordered.reverse()
        for group in ordered:
            rollouts = sorted({s.trajectory_id or 0 for s in group.samples}, reverse=True)
            group.samples.sort(key=lambda s, order=rollouts: order.index(s.trajectory_id or 0))
    return ordered


def with_scores(
    case: Case, model_scores: Sequence[Sequence[float]], values: Sequence[Sequence[float]] | None = None
) -> Case:
    """Return ``case`` off-policy: old and reference log-probs near the current ones, ratios on both sides of the clip.

    If the critic's ``values`` are given, the case also gets old values near them.
    """
    rng = np.random.default_rng(case.seed + 1)
    scores = {
        name: [(np.asarray(p) + rng.normal(0, 0.4, len(p))).astype(np.float32).tolist() for p in model_scores]
        for name in ("old", "ref")
    }
    if values is not None:
        scores["values"] = [(np.asarray(v) + rng.normal(0, 0.3, len(v))).astype(np.float32).tolist() for v in values]
    return replace(case, off_policy=True, scores=scores)
