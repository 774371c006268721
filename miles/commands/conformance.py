"""Compare the loss of TRL, verl and OpenRLHF with the one that their settings are translated to.

Each package is installed in a separate folder, outside the checkout, on top of this environment. Its code builds a
loss from its own configuration object; the same batch goes through it, through our loss with the flags of ``miles
translate``, and through the papers' formulas in float64. The table states how far their gradients are apart.
"""

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles.base.text import InputError, one_line
from miles.compat.translate.launchers.base import all_launchers
from miles.compat.translate.translation import Document, Setting, Translation
from miles.config.command_parser import CommandParser

PACKAGES = {  # pinned; other packages come from this environment
    "trl": ("trl==1.16.0",),
    "verl": (
        *("verl==0.9.1", "tensordict==0.14.1", "omegaconf==2.3.0", "antlr4-python3-runtime==4.9.3"),
        *("hydra-core==1.3.2", "codetiming==1.4.0", "pyvers", "orjson", "importlib_metadata", "zipp", "torchdata"),
    ),
    "openrlhf": ("openrlhf==0.11.2", "pylatexenc"),
}
BASES: dict[str, dict[str, Any]] = {
    "trl": {"num_generations": 4, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
    "verl": {"algorithm.adv_estimator": "grpo", "actor_rollout_ref.rollout.n": 4},
    "openrlhf": {},
}
ACTOR = "actor_rollout_ref.actor."
EQUAL = 1e-4  # relative distance of our gradients, in fp32, from the trainers', in float64
SEED = 1


@dataclass(frozen=True)
class ComparedLoss:
    """Hold the comparison of one objective.

    Attributes:
        name: Its name among the cases.
        words: Our flags that change the loss.
        ratio: Their loss over ours.
        ours: The distance of our gradient from theirs, over the length of theirs.
        paper: The distance of the papers' gradient from theirs.
        why: The translation's report on the objective.
    """

    name: str
    words: str
    ratio: float
    ours: float
    paper: float
    why: str


def main(argv: Sequence[str]) -> int:
    """Print the table and return 0; 1 if a gradient differs and the translation names no difference."""
    parser = CommandParser(prog="miles conformance", description=__doc__, allow_abbrev=False)
    parser.add_argument("trainer", nargs="*", metavar="TRAINER", help=f"{', '.join(PACKAGES)}; default: all")
    parser.add_argument(
        "--cache", type=Path, default=Path.home() / ".cache/miles/conformance", help="the folder of the packages"
    )
    arguments = parser.parse_args(list(argv))
    unknown = [name for name in arguments.trainer if name not in PACKAGES]
    if unknown:
        parser.error(f"{unknown[0]}: no such trainer; give one of {', '.join(PACKAGES)}")
    silent = 0
    for name in arguments.trainer or PACKAGES:
        try:
            rows = compared(name, installed(name, arguments.cache))
        except InputError as error:
            print(f"miles conformance: {error}", file=sys.stderr)
            return 2
        print("\n".join(table(name, rows)))
        silent += sum(row.ours > EQUAL and not row.why for row in rows)
    return int(silent > 0)


def installed(name: str, cache: Path) -> Path:
    """Install the pinned package of a trainer, unless it is there, and return its folder.

    Raises:
        InputError: It cannot be installed; the message has pip's last line.
    """
    folder = cache / PACKAGES[name][0].replace("==", "-")
    done = folder / "installed"
    if not done.exists():
        words = [*("pip", "install", "-q", "--no-deps", "--upgrade", "--target"), str(folder), *PACKAGES[name]]
        _output_of(words, f"{PACKAGES[name][0]} cannot be installed in {folder}")
        done.touch()
    return folder


def _output_of(module: Sequence[str], fault: str, **options: Any) -> str:
    """Return what a module with its arguments prints. Raises ``InputError`` with ``fault`` and its last line."""
    words = [sys.executable, "-m", *module]
    ended: subprocess.CompletedProcess[str] = subprocess.run(words, capture_output=True, text=True, **options)
    if ended.returncode:
        last = (ended.stderr.strip().splitlines() or ["no message"])[-1]
        raise InputError(f"{fault}: {one_line(last, 300)}")
    return ended.stdout


def compared(name: str, folder: Path) -> list[ComparedLoss]:
    """Compute all objectives of a trainer: its own code, ours and the papers' formula.

    Raises:
        InputError: The trainer's process failed; the message has its last line.
    """
    from miles.commands.conformance_parts.batch import draw

    cases = tomllib.loads(Path(__file__).with_name("conformance_parts").joinpath("cases.toml").read_text())[name]
    drawn = draw(SEED)
    sent = [{**drawn, "settings": _for_trainer(name, settings)} for settings in cases.values()]
    package = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": f"{folder}:{package}", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    words, fault = ["miles.commands.conformance_parts.trainers", name], f"{PACKAGES[name][0]}: its process failed"
    output = _output_of(words, fault, input=json.dumps(sent), env=environment)
    results = json.loads(output.strip().splitlines()[-1])
    return [_row(name, case, cases[case], drawn, result) for case, result in zip(cases, results, strict=True)]


def _for_trainer(name: str, settings: Any) -> Any:
    if name == "openrlhf":
        return settings.split()
    return {**BASES[name], **settings} if name == "trl" else settings


def _row(name: str, case: str, settings: Any, drawn: dict[str, Any], result: dict[str, Any]) -> ComparedLoss:
    import torch

    from miles.commands.conformance_parts.batch import our_gradient, paper_gradient, settled
    from miles.config.parser import parse

    launcher = all_launchers()[name]
    translation = Translation(_document(name, settings), launcher.table())
    objective = launcher.translate(translation)
    loss = settled(parse(translation.words).loss)
    their_gradient = torch.tensor(result["gradient"], dtype=torch.float64)
    our_loss, gradient = our_gradient(loss, drawn)
    gradients = (gradient, paper_gradient(loss, drawn)[1])
    ours, paper = (float((each - their_gradient).norm() / their_gradient.norm()) for each in gradients)
    why = [] if objective is None or objective.exact else [f"depends on {objective.depends}"]
    why += [entry.why for entry in translation.differences if entry.worst < 2 and "process" not in entry.why]
    return ComparedLoss(case, translation.loss, result["loss"] / our_loss, ours, paper, "; ".join(why))


def _document(name: str, settings: Any) -> Document:
    if name == "openrlhf":
        from miles.compat.translate.reading import read_shell

        return read_shell("case.sh", f"python3 -m openrlhf.cli.train_ppo_ray {settings}\n")
    prefix = ACTOR if name == "verl" else ""
    values = BASES[name] | {f"{prefix}{key}": value for key, value in settings.items()}
    return Document("case", "yaml", {key: Setting(key, value, None) for key, value in values.items()})


def table(name: str, rows: Sequence[ComparedLoss]) -> Iterator[str]:
    """Yield a Markdown table."""
    yield f"\n{PACKAGES[name][0].replace('==', ' ')}: {sum(row.ours <= EQUAL for row in rows)} of {len(rows)} equal\n"
    yield "| objective | our flags | their loss / ours | gradient: ours | the paper's | explanation |"
    yield "|---|---|---|---|---|---|"
    for row in rows:
        yield f"| {row.name} | `{row.words}` | {row.ratio:.6f} | {row.ours:.1e} | {row.paper:.1e} | {row.why} |"
