"""slime: a shell script around ``train.py``."""

from miles.compat.translate.launchers.base import CommandLine
from miles.compat.translate.translation import Document


class Slime(CommandLine):
    """slime's command line."""

    name = "slime"
    version = "THUDM/slime 00c2d6d"
    source = "THUDM/slime 00c2d6d, slime/backends/megatron_utils/loss.py"

    def recognizes(self, document: Document) -> bool:
        """By ``train.py`` and its own name in the command."""
        return self.runs_train(document) and any("slime" in word for word in document.words)


SLIME = Slime()
