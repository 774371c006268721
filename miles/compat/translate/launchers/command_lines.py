"""Read the command lines of slime and miles, whose flags are ours or have a verdict in ``arguments/launch``."""

import dataclasses
from contextlib import suppress

from miles.base.flags import flag_name
from miles.compat.translate.launchers.base import Launcher
from miles.compat.translate.objective import Objective, sequence_mean, token_mean_counting_masked
from miles.compat.translate.translation import Expression, Table, Translation
from miles.compat.verdicts import FOREIGN_FLAGS
from miles.config.megatron.fields import MODEL_FLAGS, megatron_fields
from miles.config.megatron.settings import MegatronArguments
from miles.config.settings import SECTIONS

REDUCER = "--custom-pg-loss-reducer-function-path"


class CommandLine(Launcher):
    """A launcher with this command line."""

    reads = ("shell",)
    version: str
    source: str

    def table(self) -> Table:
        """Return a table without rows: their flags are ours, or have a verdict here."""
        return Table(self.version, self.source, (), {})

    def translate(self, translation: Translation) -> Objective:
        """Sort the flags by their verdict here."""
        own = _own_flags()
        for flag, setting in translation.document.settings.items():
            value = setting.value
            if isinstance(value, Expression):
                continue
            elif flag in FOREIGN_FLAGS:
                row = FOREIGN_FLAGS[flag]
                if row.heading is None:
                    translation.miss(flag, f"{row.why}; {row.instead}")
                else:
                    translation.carry(flag, *_words(flag, value))  # accepted, without effect
            elif flag in own or flag.startswith(("--sglang-", "--router-")):
                translation.carry(flag, *_words(flag, value))
        return self._objective(translation)

    def _objective(self, translation: Translation) -> Objective:
        if translation.has(REDUCER):
            translation.differ(REDUCER, "it replaces the aggregation of pg_loss, and is not evaluated here", worst=0)
        if translation.has("--calculate-per-token-loss"):
            return Objective(
                "--calculate-per-token-loss",
                "Σ m l / Σ_i max(M_i, 1)",
                self.source,
                token_mean_counting_masked,
                "token_mean",
                ("--loss-aggregation", "token_mean"),
                depends="fully masked samples: each adds one token to the divisor",
                exact=False,
            )
        return Objective(
            "default",
            "1/N Σ_r 1/max(M_r, 1) Σ m l",
            self.source,
            sequence_mean,
            "sample_mean",
            ("--loss-aggregation", "sample_mean"),
        )


def _words(flag: str, value: object) -> list[object]:
    if value is True:
        return [flag]
    return [flag, *(value if isinstance(value, list) else [value])]


def _own_flags() -> set[str]:
    names = {flag_name(field.name) for cls in SECTIONS.values() for field in dataclasses.fields(cls)}
    names |= {flag_name(field.name) for field in dataclasses.fields(MegatronArguments)}
    names |= {field.flag for field in MODEL_FLAGS}
    with suppress(ValueError):  # megatron-core is not installed
        names |= {field.flag for field in megatron_fields().values()}
    return names
