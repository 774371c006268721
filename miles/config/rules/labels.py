"""Check that rewards which compare with a reference answer are given one."""

from __future__ import annotations

from miles.base.flags import Errors, changed
from miles.config.settings import Settings

OWN_LABELS = ("reasoning_gym:", "verifiers:")  # of sources whose rows have their labels in fixed columns
# Code of the user that may give samples labels or rewards.
OF_USER = ("custom_generate_function_path", "rollout_function_path", "agent_command", "environment")


def check_labels(settings: Settings, errors: Errors) -> None:
    """Refuse a reward that needs the label of each row, if no flag names the labels' column: it could score nothing."""
    reward, data = settings.reward, settings.data
    scores_rows = settings.generates and not settings.is_given_samples and not changed(settings.rollout, OF_USER)
    if not scores_rows or reward.on_error in ("value", "drop") or data.label_key is not None:
        return
    if data.prompt_data is None or data.prompt_data.startswith(OWN_LABELS):
        return
    if needing := reward.needing_labels:
        rule = f"{', '.join(needing)} compares answers with a reference answer, and no flag says which column has it"
        errors.refuse("rm_type", reward.rm_type, rule, "add --label-key COLUMN")
