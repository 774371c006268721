"""Read how related launchers distil a teacher: an estimator of that name, and the teacher's address as ``--rm-url``.

Their estimator's advantage is log p_teacher - log p_old of each token (slime's ``backends/megatron_utils/loss.py``,
``on_policy_distillation``), whatever the rewards are. That is ``--use-opd`` beside rewards of 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from miles.base.flags import Errors
from miles.compat.launch.paths import ZERO_REWARD, our_function
from miles.config.notes import READ_AS, Note, note_on, written
from miles.config.settings import Settings
from miles.config.spelling import group_words, without_flags

ESTIMATOR = ("--advantage-estimator", "on_policy_distillation")


def read_estimator(words: Sequence[str]) -> tuple[list[str], list[Note]]:
    """Read their estimator as ``--use-opd``, if the command's rewards are 0; return the words, and a note.

    With other rewards it stays, and the parser says what to do: here their advantages would be trained on too.
    """
    given = dict(group_words(words))  # the last value of a flag counts
    flag, name = ESTIMATOR
    if given.get(flag) != (name,) or not _rewards_are_zero(given) or not _weighs_one(given):
        return list(words), []
    why = "--use-opd: advantages are those of the teacher alone, since the rewards are 0"
    return [*without_flags(words, {flag}), "--use-opd"], [Note(READ_AS, written(flag, name), why)]


def _rewards_are_zero(given: dict[str, tuple[str, ...]]) -> bool:
    if "--rm-type" in given:
        return given["--rm-type"] == ("zero",)
    path = given.get("--custom-rm-path", ("",))[0]
    return _is_their_reward(path)


def _weighs_one(given: dict[str, tuple[str, ...]]) -> bool:
    """Return whether the weight of the teacher is the one that their estimator gives it."""
    return given.get("--opd-kl-coef", ("1",)) in (("1",), ("1.0",))


def _is_their_reward(path: str) -> bool:
    """Return whether ``path`` names their function that asks the teacher, and rewards nothing."""
    return our_function("custom_rm_path", path) == (True, ZERO_REWARD)


def normalize_teacher(settings: Settings, errors: Errors) -> tuple[Settings, list[Note]]:
    """Read ``--rm-url`` as the address of the teacher if one is distilled from a server and no reward asks a server.

    Args:
        settings: The settings, as they were given.
        errors: Collects an address that their reward function would ask, if no teacher is distilled.

    Returns:
        The settings, and a note if the address was read as the teacher's.
    """
    loss, reward = settings.loss, settings.reward
    url, path = reward.rm_url, reward.custom_rm_path
    if url is None or loss.opd_teacher_urls is not None or reward.names("remote_rm"):
        return settings, []
    without_url: dict[str, Any] = {"rm_url": None}  # a flag of a reward's own file, which types do not see
    unread = replace(settings, reward=replace(reward, **without_url))
    if not loss.use_opd:
        if path is None or not _is_their_reward(path):
            return settings, []
        rule = f"--custom-rm-path {path} asks a teacher there, and the command distils none"
        errors.refuse("rm_url", url, rule, "add --use-opd, or drop both and give --rm-type")
        return unread, []
    if loss.opd_type == "trainer" or settings.model.opd_teacher_load is not None:
        return settings, []
    note = note_on(READ_AS, "rm_url", url, f"--opd-teacher-urls {url}: with --use-opd it is the teacher's")
    return replace(unread, loss=replace(loss, opd_teacher_urls=(url,))), [note]
