"""The facts of a run: title, settings, objective, and what it ran with. Saved as run.json beside the metrics."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from miles.base.host.disk_faults import naming_disk
from miles.base.secret_values import public

FILE_NAME = "run.json"


@dataclass(frozen=True)
class RunHeader:
    """The facts of a run that do not change while it runs.

    ``settings`` and ``defaults`` map section to field to value (a field without an entry in ``defaults`` counts as
    default, so that a header without defaults highlights nothing). ``objective_words`` and ``objective_formula``
    describe the objective. ``total_steps`` counts optimizer steps, the length of the progress bar. ``provenance`` is
    what the run started with (provenance.py); empty in files of earlier versions. ``run`` is the identity of the run
    (identity.py); empty in files of earlier versions, and in a run that continues a checkpoint of one.
    """

    title: str
    settings: dict[str, dict[str, Any]]
    objective_words: str
    objective_formula: str
    total_steps: int
    defaults: dict[str, dict[str, Any]] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)
    run: dict[str, str] = field(default_factory=dict)

    @classmethod
    def from_sections(
        cls,
        title: str,
        sections: Any,
        objective_words: str,
        objective_formula: str,
        total_steps: int,
        provenance: dict[str, Any] | None = None,
    ) -> RunHeader:
        """Read settings and defaults from ``sections``, a dataclass whose fields are dataclasses (``Settings``).

        A field of name-value pairs (``megatron_overrides``) is a section in which nothing has its default value.
        """
        settings: dict[str, dict[str, Any]] = {}
        defaults: dict[str, dict[str, Any]] = {}
        for section in dataclasses.fields(sections):
            values = getattr(sections, section.name)
            if isinstance(values, tuple):
                settings[section.name] = dict(values)
                defaults[section.name] = dict.fromkeys(settings[section.name])
                continue
            settings[section.name] = dataclasses.asdict(values)
            defaults[section.name] = {
                f.name: f.default for f in dataclasses.fields(values) if f.default is not dataclasses.MISSING
            }
        return cls(title, settings, objective_words, objective_formula, total_steps, defaults, provenance or {})

    def is_default(self, section: str, name: str) -> bool:
        """Whether the setting has its default value, or has none to compare with."""
        known = self.defaults.get(section, {})
        return name not in known or self.settings[section][name] == known[name]

    def public_settings(self) -> dict[str, dict[str, Any]]:
        """Return the settings without secrets: the form in which they may leave the process."""
        shown: dict[str, dict[str, Any]] = public("settings", self.settings)
        return shown

    def save(self, output_dir: Path) -> None:
        """Write ``run.json``, without secrets. Raises ``WriteFailed`` if the disk is full."""
        shown = dataclasses.replace(
            self, settings=self.public_settings(), provenance=public("provenance", self.provenance)
        )
        text = json.dumps(dataclasses.asdict(shown), indent=1, ensure_ascii=False, default=str)
        path = output_dir / FILE_NAME
        with naming_disk(path):
            path.write_text(text + "\n", encoding="utf-8", errors="backslashreplace")

    def _check(self) -> None:
        """Raise ``ValueError`` if a value is not of its kind, as in a file that was edited."""
        for name in ("settings", "defaults"):
            sections = getattr(self, name)
            if not isinstance(sections, dict) or not all(isinstance(fields, dict) for fields in sections.values()):
                raise ValueError(f"{name} are not sections of names and values")
        if not isinstance(self.title, str) or type(self.total_steps) is not int:
            raise ValueError("title or total_steps is not a text or a whole number")

    @classmethod
    def load(cls, output_dir: Path) -> RunHeader:
        """Read ``run.json`` back. Raises ``ValueError`` when the folder holds no run, or one of another version."""
        path = output_dir / FILE_NAME
        if not path.is_file():
            raise ValueError(f"{output_dir}: no {FILE_NAME} there; give the --output-dir of a run that has started")
        try:
            header = cls(**json.loads(path.read_text(encoding="utf-8")))
            header._check()
            return header
        except (TypeError, ValueError, RecursionError) as error:
            what_to_do = "read it with the version of miles that wrote it, or copy the run's folder again"
            raise ValueError(f"{path}: cannot be read ({error}); {what_to_do}") from error
