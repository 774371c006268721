"""Suggest a flag for one that does not exist: related to it, and never its opposite."""

from __future__ import annotations

import ast
import difflib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from miles.base import strict_json

_NEAR = 0.84  # similarity of a flag with a typing error to the right one
_JOINED = 0.95  # the same without hyphens, of flags that differ in the number of words
_OPPOSITES = (("no", ""), ("disable", "enable"), ("disable", ""), ("skip", ""), ("without", "with"))
_NEGATIVE = {negative for negative, _ in _OPPOSITES}
_EXTREMES = {"min", "max"}
# Words that flags here and elsewhere have for one thing: --tis-lower-bound is --tis-clip-low.
_SYNONYMS = {
    "lower": "low",
    "upper": "high",
    "bound": "clip",
    "bounds": "clip",
    "cap": "clip",
    "coeff": "coef",
    "length": "len",
    "epsilon": "eps",
}
_COMMON = {"num", "size", "path", "dir", "type", "max", "min", "use", "per", "custom", "id", "ids"}
_COMMON |= {"no", "enable", "disable"}
# What to give here, and the words for it in TRL, verl, OpenRLHF, transformers and other trainers.
_COUNTERPARTS = {
    "--hf-checkpoint": "model model-path model-name-or-path pretrain base-model",
    "--prompt-data": "dataset dataset-name train-data train-dataset train-files data prompt-dataset",
    "--eval-prompt-data NAME FILE": "eval-data eval-dataset val-data val-dataset val-files test-data",
    "--input-key": "prompt-key prompt-column input-column",
    "--label-key": "answer-key label-column answer-column ground-truth-key target-column",
    "--rollout-shuffle": "shuffle shuffle-dataset",
    "--rollout-max-prompt-len": "max-prompt-length prompt-max-len max-prompt-len max-input-length",
    "--rollout-max-response-len": "max-completion-length max-new-tokens generate-max-len max-response-length",
    "--rollout-max-context-len": "max-len max-length max-seq-len max-seq-length max-model-len vllm-max-model-length",
    "--n-samples-per-prompt": "num-generations group-size rollout-n num-samples num-return-sequences",
    "--rollout-temperature": "temperature gen-temperature",
    "--rollout-top-p": "top-p",
    "--rollout-top-k": "top-k",
    "--rollout-stop": "stop stop-sequences stop-strings",
    "--rollout-batch-size for the prompts of an iteration, and --global-batch-size for the samples of a step": (
        "batch-size generation-batch-size"
    ),
    "--global-batch-size": "train-batch-size ppo-mini-batch-size mini-batch-size effective-batch-size",
    "--micro-batch-size, and --global-batch-size for the samples of a step": (
        "per-device-train-batch-size per-device-batch-size micro-train-batch-size ppo-micro-batch-size-per-gpu"
    ),
    "--global-batch-size, the samples of a step; their gradients are summed however many fit in memory": (
        "gradient-accumulation-steps grad-accum grad-accum-steps accumulate-grad-batches"
    ),
    "--num-rollout for the iterations of a run, or --num-epoch": (
        "max-steps num-steps total-steps train-steps total-training-steps steps iterations num-iters"
    ),
    "--num-epoch": "epoch epochs num-train-epochs max-epochs total-epochs num-episodes",
    "--ppo-epochs": "num-iterations",
    "--lr": "learning-rate actor-learning-rate",
    "--lr-warmup-iters": "warmup-steps lr-warmup-steps num-warmup-steps",
    "--lr-warmup-fraction": "warmup-ratio lr-warmup-ratio lr-warmup-steps-ratio",
    "--lr-decay-style": "lr-scheduler lr-scheduler-type scheduler warmup-style",
    "--clip-grad": "max-grad-norm max-norm gradient-clipping grad-clip",
    "--adam-beta1 and --adam-beta2": "adam-betas betas",
    "--advantage-estimator": "algorithm algo adv-estimator trainer method",
    "--eps-clip": "epsilon cliprange clip-range clip-ratio clip-eps",
    "--eps-clip-high": "epsilon-high clip-ratio-high",
    "--use-kl-loss with --kl-loss-coef": "beta kl-beta init-kl-coef kl-penalty",
    "--advantage-estimator grpo, and --disable-grpo-std-normalization for unscaled rewards": "scale-rewards",
    "--custom-rm-path MODULE:FUNCTION, or a built-in reward with --rm-type": (
        "reward reward-fn reward-func reward-funcs reward-function reward-path custom-reward-function remote-rm-url"
    ),
    "--bf16 or --fp32": "dtype torch-dtype precision mixed-precision param-dtype",
    "--target-modules": "lora-target lora-target-modules lora-modules",
    "--lora-rank": "lora lora-r use-peft peft r",
    "--load DIR, and the same folder in --save": "resume resume-from resume-from-checkpoint load-checkpoint",
    "--save": "checkpoint-dir checkpoint-path ckpt-path save-path save-dir default-local-dir",
    "--save-interval": "save-steps save-freq save-every",
    "--save-keep-last": "save-total-limit max-ckpt-num max-actor-ckpt-to-keep",
    "--eval-interval": "eval-steps eval-every test-freq eval-freq val-interval",
    "--output-dir": "output out log-dir logging-dir run-dir",
    "--use-wandb, --use-mlflow, or what miles train --help lists under tracking": "report-to logger log-with tracker",
    "--wandb-project": "project project-name wandb-project-name",
    "--actor-num-gpus-per-node": "gpus num-gpus n-gpus n-gpus-per-node num-processes nproc-per-node",
    "--actor-num-nodes": "nodes nnodes num-nodes num-machines",
    "--rollout-engine": "engine backend inference-backend use-vllm vllm",
    "--sglang-mem-fraction-static": "vllm-gpu-memory-utilization gpu-memory-utilization",
    "--gradient-checkpointing": "activation-checkpointing enable-gradient-checkpointing gradient-checkpointing-enable",
    "--seed for the run, and --rollout-seed for the order of prompts": "random-seed data-seed",
    "--config": "config-file config-path recipe",
}
COUNTERPARTS = {f"--{word}": here for here, words in _COUNTERPARTS.items() for word in words.split()}


def suggestion(flag: str, known: Iterable[str]) -> str:
    """Return what to do about ``flag``, which does not exist.

    Args:
        flag: The flag, as written.
        known: All flags that exist.
    """
    hyphened = flag.replace("_", "-")
    of_section = "--" + hyphened.rpartition(".")[2]  # data.train_batch_size of verl, train.batch_size of OpenRLHF
    counterpart = COUNTERPARTS.get(hyphened) or COUNTERPARTS.get(of_section)
    if counterpart is not None:
        return f"give {counterpart}; miles translate FILE translates a whole script of TRL, verl or OpenRLHF"
    near = nearest_flag(flag, known)
    return f"did you mean {near}?" if near else "--help lists all flags"


def nearest_flag(flag: str, known: Iterable[str]) -> str | None:
    """Return the flag that ``flag`` was meant to be, which is never its opposite; None if none is related."""
    flags = [name for name in known if name.startswith("--")]
    hyphened = flag.replace("_", "-")  # as Megatron spells some
    if flag != hyphened and hyphened in flags:
        return hyphened
    flag = hyphened
    candidates = [name for name in flags if not _are_opposite(flag, name)]
    near = _with_a_typing_error(flag, candidates) or _with_same_words(flag, candidates, flags)
    return near[0] if near else None


def near_choice(value: str, choices: Iterable[str]) -> str | None:
    """Return the choice that a wrong ``value`` was meant to be: the one that it is a part of, or spelled almost like.

    >>> near_choice("sft", ["policy_loss", "sft_loss"])
    'sft_loss'
    """
    names = list(choices)
    parts = [name for name in names if value and value in name.split("_")]
    near = parts if len(parts) == 1 else difflib.get_close_matches(value, names, n=1, cutoff=_NEAR)
    return near[0] if near else None


def _with_a_typing_error(flag: str, candidates: Sequence[str]) -> list[str]:
    """Return the flag that is spelled almost like ``flag``, unless the words that differ are words of other flags.

    A word that other flags have is no typing error: ``--tis-lower-bound`` is not a misspelled ``--rs-lower-bound``.
    Nor is a word too many: ``--rollout-n`` is not ``--rollout-min-p``.
    """
    vocabulary = {word for name in candidates for word in _words(name)}

    def is_another(name: str) -> bool:
        ours, theirs = _words(flag), _words(name)
        if len(ours) != len(theirs):
            return difflib.SequenceMatcher(None, "".join(ours), "".join(theirs)).ratio() < _JOINED
        pairs = zip(ours, theirs, strict=True)
        return any(one.rstrip("s") != other.rstrip("s") and one in vocabulary for one, other in pairs)

    near = difflib.get_close_matches(flag, candidates, n=5, cutoff=_NEAR)
    return [name for name in near if not is_another(name)][:1]


@lru_cache(maxsize=8192)  # the known flags, for each flag that does not exist
def _words(flag: str) -> tuple[str, ...]:
    return tuple(flag.removeprefix("--").split("-"))


def _are_opposite(one: str, other: str) -> bool:
    """Return whether two flags differ by a word that turns one into the opposite of the other."""
    ours, theirs = _words(one), _words(other)
    if {*ours}.symmetric_difference(theirs) >= _EXTREMES:
        return True
    is_negative = ours[0] in _NEGATIVE, theirs[0] in _NEGATIVE
    if not any(is_negative):
        return False
    for words, opposite in ((ours, theirs), (theirs, ours)):
        for negative, positive in _OPPOSITES:
            if words[0] == negative and ((positive,) if positive else ()) + words[1:] == opposite:
                return True
    return is_negative[0] != is_negative[1]


@lru_cache(maxsize=8192)
def _meanings(flag: str) -> frozenset[str]:
    """Return the words of a flag, with one word for one thing."""
    words = "-".join(_words(flag)).replace("learning-rate", "lr").split("-")
    return frozenset(_SYNONYMS.get(word, word) for word in words)


def _with_same_words(flag: str, candidates: Iterable[str], known: Iterable[str]) -> list[str]:
    """Return the flag that shares more than half of the words of both with ``flag``, if no other shares as many.

    A word that one flag alone has counts twice. So ``--max-staleness`` is ``--max-weight-staleness``, and
    ``--num-gpus`` is none of the flags that count GPUs.
    """
    wanted, flags_with = _meanings(flag), Counter(word for name in known for word in _meanings(name))

    def size(words: frozenset[str]) -> int:
        return sum(2 if flags_with[word] == 1 else 1 for word in words - _COMMON)

    def share(name: str) -> float:
        words = _meanings(name)
        shared = size(wanted & words)
        return shared / max(1, size(wanted | words)) if shared else 0.0

    def likeness(name: str) -> tuple[int, float]:
        return -len(wanted ^ _meanings(name)), difflib.SequenceMatcher(None, flag, name).ratio()

    shares = {name: share(name) for name in candidates}
    most = max(shares.values(), default=0)
    best = [name for name in shares if shares[name] == most]
    if most <= 0.5 or (len(best) > 1 and most < 1):
        return []
    return [max(best, key=likeness)]


# Read values in the spellings that launch scripts use.


def whole_numbers(text: str) -> list[int]:
    """Read whole numbers from JSON (``[1,1]``), a comma list (``1,1``), or a Python sum (``[0]*3+[1]*75``).

    Raises:
        ValueError: It is none of these.
    """
    try:
        value = _evaluate(ast.parse(text.strip(), mode="eval").body)
        if value == []:
            raise ValueError("an empty list")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError(f"{text!r} is not a list of whole numbers, such as 1,1 or [0]*3+[1]*5") from None
    return [value] if isinstance(value, int) else value


def _evaluate(node: ast.expr) -> Any:
    """Evaluate lists of integers, ``+`` and ``*``. Nothing else is Python here."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = _evaluate(node.operand)
        if isinstance(value, int):
            return -value
    if isinstance(node, ast.List | ast.Tuple):
        values = [_evaluate(element) for element in node.elts]
        if all(isinstance(value, int) for value in values):
            return values
    if isinstance(node, ast.BinOp):
        left, right = _evaluate(node.left), _evaluate(node.right)
        if isinstance(node.op, ast.Add) and isinstance(left, list) and isinstance(right, list):
            return left + right
        if isinstance(node.op, ast.Mult) and isinstance(left, list) and isinstance(right, int) and 0 <= right <= 10_000:
            return left * right
    raise ValueError(ast.unparse(node))


def set_name(source: str) -> str:
    """Return a name for an evaluation set that was given without one: ``aime-2024`` for ``data/aime-2024.jsonl``."""
    return Path(source).stem or source


def is_object(text: str | None) -> bool:
    """Return whether ``text`` is a JSON object, or no text: what cannot be read is reported, and not left out."""
    try:
        return text is None or isinstance(strict_json.loads(text), dict)
    except ValueError:
        return False


def environment_strings(text: str) -> str | None:
    """Return a JSON object of environment variables with every value as a string; None if it is so already.

    Raises:
        ValueError: It is no JSON object.
    """
    values = strict_json.loads(text)
    if not isinstance(values, dict):
        raise ValueError("not an object")
    strings = {name: value if isinstance(value, str) else json.dumps(value) for name, value in values.items()}
    return None if strings == values else json.dumps(strings)
