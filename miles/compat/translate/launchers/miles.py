"""miles: a shell script around ``train.py``."""

from miles.compat.translate.launchers.base import CommandLine
from miles.compat.translate.translation import Document


class Miles(CommandLine):
    """The command line of the launcher of the same name."""

    name = "miles"
    version = "radixark/miles 0b3ae66"
    source = "radixark/miles 0b3ae66, miles/backends/training_utils/loss/objective.py"

    def recognizes(self, document: Document) -> bool:
        """By ``train.py``, without slime's name in the command."""
        return self.runs_train(document) and not any("slime" in word for word in document.words)


MILES = Miles()
