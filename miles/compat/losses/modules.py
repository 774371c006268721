"""The module names under which related launchers keep what their losses import, so that such a file loads unchanged."""

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

_LOSS = {
    f"{package}.{module}"
    for package in ("slime", "miles")
    for module in (
        *("backends.megatron_utils.loss", "backends.training_utils.loss"),
        *("utils.ppo_utils", "utils.types"),
    )
}
_PACKAGES = {name.rsplit(".", depth)[0] for name in _LOSS for depth in (1, 2, 3)} - _LOSS - {"miles"}


class _RelatedModules(MetaPathFinder, Loader):
    """Finds these modules after all other finders: one that is installed comes first."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return our module for a name of theirs."""
        if fullname in _LOSS or fullname in _PACKAGES:
            return ModuleSpec(fullname, self, is_package=fullname in _PACKAGES)
        return None

    def exec_module(self, module: ModuleType) -> None:
        """Fill the module with what call.py has."""
        from miles.compat.losses import call

        offered: dict[str, Any] = {
            "get_log_probs_and_entropy": call.get_log_probs_and_entropy,
            "compute_approx_kl": call.compute_approx_kl,
            "compute_policy_loss": call.compute_policy_loss,
            "RolloutBatch": dict[str, Any],
        }
        if module.__name__ in _LOSS:
            vars(module).update(offered)

        def missing(name: str) -> NoReturn:
            if name.startswith("__"):
                raise AttributeError(name)
            raise ImportError(
                f"{module.__name__}.{name} is part of another launcher, and is not here; a loss can import "
                f"{', '.join(offered)}"
            )

        vars(module)["__getattr__"] = missing


_FINDER = _RelatedModules()


def offer_related_modules() -> None:
    """Let later imports in this process find these modules, if none are installed."""
    if _FINDER not in sys.meta_path:
        sys.meta_path.append(_FINDER)
