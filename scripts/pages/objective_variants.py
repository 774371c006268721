"""The tables of the page of objectives for settings: aggregation, corrections, estimators of the KL."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from miles.base.flags import flag_name
from miles.objective.aggregation import MODES
from miles.objective.kl import KL_FORMS, KlEstimator, kl_formula
from miles.objective.registry import Term
from miles.objective.settings import LossArguments
from miles.objective.token_weights import TOKEN_WEIGHTS, TokenWeight

TESTS = Path(__file__).parents[2] / "tests" / "fast" / "objective"
CONFORMANCE = TESTS.parent / "conformance"
PAPER = re.compile(r"\b\d{4}\.\d{5}\b")
_DEFAULTS = {field.name: field.default for field in dataclasses.fields(LossArguments)}
_DIVISOR = 1024.0  # of the modes that have one; it has no default


@dataclass(frozen=True)
class Variant:
    """A setting of a token weight that has a name and its own source: a row of the table.

    Attributes:
        name: The name.
        settings: The flags that choose it, with their values.
        sources: Its origin: arXiv numbers, addresses, or a few words.
    """

    name: str
    settings: Mapping[str, Any]
    sources: tuple[str, ...]


# "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (Yao et al. 2025), and "When Speed Kills
# Stability: Demystifying RL Collapse from the Training-Inference Mismatch" (Liu et al. 2025).
_OFF_POLICY = "https://fengyao.notion.site/off-policy-rl"
_SPEED = "https://yingru.notion.site/When-Speed-Kills-Stability-271211a558b7808d8b12d403fd15edda"
# The variants of each token weight, by the flag that turns it on; the first has the defaults.
VARIANTS: dict[str, tuple[Variant, ...]] = {
    "use_tis": (
        Variant("TIS", {"use_tis": True}, (_OFF_POLICY,)),
        Variant("TIS by sequence", {"use_tis": True, "tis_level": "sequence"}, (_SPEED,)),
        Variant(
            "TIS by geometric mean", {"use_tis": True, "tis_level": "geometric"}, ("miles' and slime's `mis.yaml`",)
        ),
        Variant(
            "batch-normalized TIS",
            {"use_tis": True, "tis_batch_normalize": True},
            ("verl's `rollout_is_batch_normalize`",),
        ),
        Variant("IcePop", {"use_tis": True, "tis_mode": "icepop"}, ("2510.18855",)),
    ),
    "use_rs": (
        Variant("rejection", {"use_rs": True}, (_SPEED,)),
        Variant("rejection by sequence", {"use_rs": True, "rs_level": "sequence"}, (_SPEED,)),
        Variant("rejection by geometric mean", {"use_rs": True, "rs_level": "geometric"}, (_SPEED,)),
        Variant("veto", {"use_rs": True, "rs_veto_threshold": 1e-4}, ("verl's `rollout_token_veto_threshold`",)),
    ),
    "use_opsm": (Variant("OPSM", {"use_opsm": True}, ("2512.02556",)),),
    "top_entropy_quantile": (Variant("top-entropy mask", {"top_entropy_quantile": 0.2}, ("2506.01939",)),),
}


@dataclass(frozen=True)
class KlGradient:
    """An estimator of the KL on the page.

    Attributes:
        gradient: Its expected gradient in the loss, on-policy.
        weighted: The same with ``--use-unbiased-kl``, on- and off-policy; None if that is refused.
        sources: Its origin, as in ``Variant``.
    """

    gradient: str
    weighted: str | None
    sources: tuple[str, ...]


_SCHULMAN = "http://joschu.net/blog/kl-approx.html"
_OF_KL, _OF_REVERSE = "of KL(policy, reference)", "of KL(reference, policy)"
_UNCLAMPED = "if nothing is clamped"
KL_GRADIENTS: dict[KlEstimator, KlGradient] = {
    "k1": KlGradient("0", _OF_KL, (_SCHULMAN, "2506.09477")),
    "k2": KlGradient(_OF_KL, "of the mean of d² / 2", (_SCHULMAN, "2506.09477")),
    "k3": KlGradient(_OF_REVERSE, _OF_KL, (_SCHULMAN, "2506.09477")),
    "low_var_kl": KlGradient(f"{_OF_REVERSE}, {_UNCLAMPED}", f"{_OF_KL}, {_UNCLAMPED}", (_SCHULMAN, "verl's name")),
    "k1+": KlGradient(_OF_KL, None, ("2506.09477", "verl's name")),
    "k3+": KlGradient(_OF_KL, None, ("2506.09477", "verl's name")),
}
UNBIASED_KL_SOURCES = ("2512.02556",)  # of --use-unbiased-kl


def markdown_row(cells: Iterable[str]) -> str:
    """Return a row of a markdown table."""
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def in_code(names: Iterable[str]) -> str:
    """Return names as code, separated by commas."""
    return ", ".join(f"`{name}`" for name in names)


def linked(sources: Iterable[str]) -> str:
    """Return arXiv numbers and addresses as links, and other sources unchanged."""
    return ", ".join(_linked(source) for source in sources)


def equation(terms: Iterable[Term]) -> str:
    """Return a formula as a cell of a table."""
    return "<br>".join(f"`{term.text.strip()}`" for term in terms)


def flag_with_default(name: str) -> str:
    """Return a flag as a user types it, with its default if there is one."""
    default = _DEFAULTS[name]
    return f"`{flag_name(name)}`" if default is None or default is False else f"`{flag_name(name)} {default}`"


def files_of_mode(mode: str) -> list[str]:
    """Return the test files of the denominators that name an aggregation mode."""
    return _tests_with("step_denominators(", f'"{mode}"')


def files_of_kl(estimator: str, is_weighted: bool) -> list[str]:
    """Return the test files that name an estimator of the KL, with ``--use-unbiased-kl`` if it ``is_weighted``."""
    return _tests_with("approximate_kl(", f'"{estimator}"', *(["use_unbiased_kl"] if is_weighted else []))


def files_of_variant(weight: TokenWeight, variant: Variant) -> list[str]:
    """Return the test files with a call that gives exactly the settings of a variant, whatever its numbers are."""
    read = {name: _kind(variant.settings.get(name, _DEFAULTS[name])) for name in (weight.switch, *weight.reads)}

    def is_given(given: Mapping[str, Any]) -> bool:
        return weight.switch in given and all(_kind(given.get(f, _DEFAULTS[f])) == kind for f, kind in read.items())

    return [_name(path) for path in _test_files() if any(map(is_given, _calls(path)))]


def aggregation_table() -> Iterator[str]:
    """Yield the section on ``--loss-aggregation``."""
    yield from ("", "## Aggregation", "", f"Flag: `{flag_name('loss_aggregation')}`.", "")
    yield from ("| name | used by | paper | equation | flags | steps | tested in |", "|---|---|---|---|---|---|---|")
    for name, mode in MODES.items():
        symbols = mode.symbols.format(divisor=_DIVISOR, alpha=mode.default_alpha or 0.0)
        yield markdown_row(
            [
                f"`{name}`",
                mode.used_by,
                linked(mode.sources),
                f"`{mode.formula}`<br>`{symbols}`",
                ", ".join(flag_with_default(flag) for flag in mode.reads),
                "whole groups" if mode.whole_groups else "any",
                in_code(files_of_mode(name)),
            ]
        )
    yield ""
    yield "These are pg_loss of a step of N trajectories of P prompts; `l_it` is the loss of token t of sample i, and"
    yield f"`m_it` its mask. `L` has no default; {_DIVISOR:g} is an example. The tests in `tests/fast/conformance/`"
    yield "compare the gradient of each mode with a float64 oracle, however a step is split."
    yield "[Loss aggregation](loss-aggregation.md) has a worked example, the variance by length, and other frameworks'"
    yield "names."


def corrections_table() -> Iterator[str]:
    """Yield the section on the weights of tokens."""
    yield from ("", "## Corrections, and the choice of tokens", "")
    yield from ("| name | flags that choose it | paper | weight w of a token's loss | bounds | tested in |",)
    yield "|---|---|---|---|---|---|"
    for weight in TOKEN_WEIGHTS:
        for variant in VARIANTS[weight.switch]:
            flags = [_typed(name, value) for name, value in variant.settings.items()]
            numbers = [name for name in weight.reads if _kind(_DEFAULTS[name]) is float]
            yield markdown_row(
                [
                    variant.name,
                    f"`{' '.join(flags)}`",
                    linked(variant.sources),
                    equation(weight.formula(LossArguments(**variant.settings))),
                    ", ".join(flag_with_default(name) for name in numbers),
                    in_code(files_of_variant(weight, variant)),
                ]
            )
    yield ""
    yield "Weights multiply, so rows can be combined, and they never change a denominator. `--tis-level` works with"
    yield "`--tis-mode icepop` and `--tis-batch-normalize` too, and the veto with every `--rs-level`."
    yield "`--custom-tis-function-path` replaces the weights of `--use-tis` by yours. The tests in"
    yield "`tests/fast/conformance/` compare gradients with a float64 oracle, however a step is split."
    yield "[Off-policy corrections](off-policy.md) lists the metrics."


def kl_table() -> Iterator[str]:
    """Yield the section on the estimators of the KL."""
    yield from ("", "## KL to the reference model", "", f"Flag: `{flag_name('kl_loss_type')}`.", "")
    yield from ("| name | paper | equation | expected gradient | tested in |", "|---|---|---|---|---|")
    for name in KL_FORMS:
        form = KL_GRADIENTS[name]
        for is_weighted, gradient in ((False, form.gradient), (True, form.weighted)):
            if gradient is None:
                continue
            loss = LossArguments(use_kl_loss=True, kl_loss_coef=1.0, kl_loss_type=name, use_unbiased_kl=is_weighted)
            yield markdown_row(
                [
                    f"`{name}`" + (" with `--use-unbiased-kl`" if is_weighted else ""),
                    linked(UNBIASED_KL_SOURCES if is_weighted else form.sources),
                    equation(kl_formula(loss)),
                    gradient,
                    in_code(files_of_kl(name, is_weighted)),
                ]
            )
    yield ""
    yield "`--use-kl-loss --kl-loss-coef` puts the KL into the loss. The column *expected gradient* is about samples of"
    yield "the current policy; with `--use-unbiased-kl`, where `ρ = exp(log p - log p_old)`, it holds off-policy too."
    yield "`--kl-coef` subtracts the KL from each token's reward, which has no gradient, so `k1+`, `k3+` and"
    yield "`--use-unbiased-kl` are refused there."


def _linked(source: str) -> str:
    if PAPER.fullmatch(source):
        return f"[{source}](https://arxiv.org/abs/{source})"
    if re.match(r"https?://", source):
        return f"[{source.split('/')[2]}]({source})"
    return source


def _typed(name: str, value: Any) -> str:
    return flag_name(name) if value is True else f"{flag_name(name)} {value}"


def _kind(value: Any) -> Any:
    """Return the choice of a setting: itself, or ``float`` for a number, which is a bound."""
    return float if isinstance(value, int | float) and not isinstance(value, bool) else value


def _test_files() -> list[Path]:
    return sorted(TESTS.rglob("test_*.py"), key=lambda path: path.name) + sorted(CONFORMANCE.glob("test_*.py"))


def _name(path: Path) -> str:
    """Return the name of a test file, with the folder if that is not the one of the objective."""
    return f"{CONFORMANCE.name}/{path.name}" if path.parent == CONFORMANCE else path.name


def _tests_with(*words: str) -> list[str]:
    texts = ((_name(path), path.read_text(encoding="utf-8")) for path in _test_files())
    return [name for name, text in texts if all(word in text for word in words)]


@cache
def _calls(path: Path) -> Sequence[Mapping[str, Any]]:
    """Return the constants that each call in a file gives by keyword; any other expression is None."""
    calls = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]
    return [
        {word.arg: getattr(word.value, "value", None) for word in call.keywords if word.arg is not None}
        for call in calls
    ]
