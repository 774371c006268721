"""The file of a sweep: scalars as written, a grid or variants, and one clear message per fault."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from miles.base.flags import FlagError
from miles.commands.sweeps.definition import KEYS, read_definition

REPO = Path(__file__).parents[4]

GRID = """
config: base.yaml
flags: --lr 1e-5 --bf16   # a comment
grid:
  eps_clip_high: [0.20, 0.28]
  use_kl_loss: [true, false]
seeds: 3
metrics: [rollout/reward]
"""


def written(folder: Path, text: str, name: str = "sweep.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_a_grid_has_every_combination_and_scalars_are_as_written(tmp_path: Path) -> None:
    definition = read_definition(written(tmp_path, GRID))
    assert [(variant.name, dict(variant.flags)) for variant in definition.variants] == [
        ("eps_clip_high=0.20,use_kl_loss=true", {"eps_clip_high": "0.20", "use_kl_loss": True}),
        ("eps_clip_high=0.20,use_kl_loss=false", {"eps_clip_high": "0.20", "use_kl_loss": False}),
        ("eps_clip_high=0.28,use_kl_loss=true", {"eps_clip_high": "0.28", "use_kl_loss": True}),
        ("eps_clip_high=0.28,use_kl_loss=false", {"eps_clip_high": "0.28", "use_kl_loss": False}),
    ]
    assert definition.words == ("--config=base.yaml", "--lr", "1e-5", "--bf16")
    assert (definition.seeds, definition.baseline, definition.metrics, definition.last) == (
        (1, 2, 3),
        "eps_clip_high=0.20,use_kl_loss=true",
        ("rollout/reward",),
        10,
    )
    assert definition.output == Path("outputs/sweep")


def test_toml_says_the_same_as_yaml(tmp_path: Path) -> None:
    toml = """
config = "base.yaml"
flags = "--lr 1e-5 --bf16"
seeds = 3
metrics = ["rollout/reward"]
[grid]
eps_clip_high = [0.20, 0.28]
use_kl_loss = [true, false]
"""
    from_toml, from_yaml = (
        read_definition(written(tmp_path, text, f"sweep.{kind}")) for kind, text in (("toml", toml), ("yaml", GRID))
    )
    assert from_toml.variants == from_yaml.variants
    assert (from_toml.words, from_toml.seeds) == (from_yaml.words, from_yaml.seeds)


def test_named_variants_keep_their_order_flags_and_offset(tmp_path: Path) -> None:
    variants = "variants:\n  b: {}\n  a: {--loss-aggregation: constant, lr: 1e-3}\n  b-again: {seed_offset: 1000}\n"
    definition = read_definition(written(tmp_path, variants + "seeds: [7, 3]\n"))
    assert [(variant.name, dict(variant.flags), variant.seed_offset) for variant in definition.variants] == [
        ("b", {}, 0),
        ("a", {"loss_aggregation": "constant", "lr": "1e-3"}, 0),
        ("b-again", {}, 1000),
    ]
    assert (definition.baseline, definition.seeds) == ("b", (7, 3))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seedz: 3", "seedz: no such key; give one of config, flags"),
        ("flags: {lr: 1}\ngrid: {lr: [1]}\nvariants: {a: {}}", "a sweep has one of the two"),
        ("grid: {lr: 1e-5}", "grid: lr: must be a list of values"),
        ("grid: {lr: []}", "grid: lr: must be a list of values"),
        ("grid: {seed: [1, 2]}", "--seed: the sweep sets it for each run; drop it, and use seeds"),
        ("flags: --output-dir x", "--output-dir: the sweep sets it for each run; drop it, and use output or --out"),
        ("flags: {config: x.yaml}", "write the key config alongside flags"),
        ("flags: --lr 'x", "flags: cannot be read as a command line"),
        ("flags: {lr: 1, --lr: 2}", "lr: is set twice"),
        ("flags: {lr: 1, lr: 2}", "sweep.yaml:1: lr is set twice; correct the line"),
        ("variants: {a/b: {}}", "variants: a/b: must be letters"),
        ("variants: {..: {}}", "variants: ..: must be letters"),
        ("variants: {table.json: {}}", "variants: table.json: is the name of a file that the sweep writes"),
        ("variants: [a, b]", "variants: must map names to flags"),
        ("variants: {a: {seed_offset: -1}}", "seed_offset: -1: must be a whole number of at least 0"),
        ("grid: {lr: [1 2, 1/2, 1*2]}", "grid: 3 combinations have the name lr=1-2"),
        ("seeds: 0", "seeds: 0: must be a whole number of at least 1"),
        ("seeds: []", "seeds: the list is empty"),
        ("seeds: [1, 1]", "one is given twice"),
        ("seeds: [1, true]", "seeds: True: must be a whole number"),
        ("seeds: 100000", "is more than 10000"),
        ("seeds: 10000\ngrid: {lr: [1, 2]}", "the sweep has 20000 runs, more than 10000"),
        ("variants: {a: {}}\nbaseline: b", "baseline: b: no such variant; give one of a"),
        ("output: [a, b]", "output: ['a', 'b']: must be a folder"),
        ("metrics: rollout/reward", "metrics: must be a list"),
        ("last: none", "last: none: must be a whole number of at least 1"),
        ("- 1", "holds no sweep"),
        ("a: [", "correct the line"),
    ],
)
def test_a_fault_is_one_message_that_says_what_to_do(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(FlagError) as refused:
        read_definition(written(tmp_path, text))
    (said,) = refused.value.messages
    assert message in said and "sweep.yaml" in said and ";" in said


def test_all_faults_are_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(FlagError) as refused:
        read_definition(written(tmp_path, "seeds: 0\nlast: 0\nbogus: 1\n"))
    assert len(refused.value.messages) == 3


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "latin.yaml").write_bytes(b"seeds: \xff")
    for path, reason in ((tmp_path / "missing.yaml", "No such file"), (tmp_path / "latin.yaml", "UTF-8")):
        with pytest.raises(FlagError, match=reason):
            read_definition(path)


def test_the_example_of_the_docs_is_a_sweep(tmp_path: Path) -> None:
    text = (REPO / "docs" / "report.md").read_text()
    (example,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    definition = read_definition(written(tmp_path, example))
    assert [variant.seed_offset for variant in definition.variants] == [0, 0, 1000] and len(definition.seeds) == 8
    table = text.partition("| key | meaning |")[2].partition("\n\n")[0]
    assert sorted(re.findall(r"^\| `(\w+)`", table, re.MULTILINE)) == sorted(KEYS)
