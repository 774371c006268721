"""The command lines of launch_lines.yaml as words, with the model folders and files that they name."""

import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import yaml

FILE = Path(__file__).with_name("launch_lines.yaml")


@dataclass(frozen=True)
class Line:
    """A command line, and the flags whose errors are expected; none if it starts."""

    name: str
    model: str
    text: str
    refuses: tuple[str, ...]

    def words(self, folder: Path) -> list[str]:
        """Return the words of the command; ``folder`` is what ``write_files`` has filled."""
        names = {"MODEL": folder / self.model, "DATA": folder / "prompts.jsonl", "OUT": folder / "out"}
        return [re.sub(r"\{(MODEL|DATA|OUT)\}", lambda m: str(names[m[1]]), word) for word in shlex.split(self.text)]


def read_lines(**changed: str) -> list[Line]:
    """Return the lines; ``changed`` has other contents of some blocks, by name."""
    data = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    blocks = data["blocks"] | changed
    return [
        Line(
            entry["name"],
            entry["model"],
            re.sub(r"\$(\w+)", lambda match: blocks[match[1]], entry.get("starts") or entry["text"]),
            tuple(entry.get("refuses", ())),
        )
        for entry in data["lines"]
    ]


PROMPT = {"prompt": "1 + 1 =", "label": "2", "messages": [{"role": "user", "content": "1 + 1 ="}]}


def write_files(folder: Path) -> None:
    """Write the configs of the models, without weights, one prompt, and the samples of one iteration."""
    for name, config in yaml.safe_load(FILE.read_text(encoding="utf-8"))["models"].items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    (folder / "prompts.jsonl").write_text(json.dumps(PROMPT) + "\n")
    (folder / "out").mkdir()
    (folder / "out" / "samples_0.pt").touch()
