"""Distil a teacher on the policy's own samples (``--use-opd``): a reverse KL per token, added to any advantage.

For each sampled token, ``d = log p_old - log p_teacher`` estimates KL(policy || teacher) without bias, and
``A - opd_kl_coef d`` replaces its advantage A. The policy gradient of that is the gradient of the KL, as each token is
credited with its own term only (a discount of 0). Agarwal et al., "On-Policy Distillation of Language Models",
arXiv 2306.13649; the per-token policy gradient is from Thinking Machines' "On-Policy Distillation" (2025).
"""

from dataclasses import dataclass
from typing import Optional

from miles.base.flags import Errors, flag
from miles.objective.registry import Needs, Term


@dataclass(frozen=True)
class DistillationFlags:
    """loss: the teacher of on-policy distillation."""

    use_opd: bool = flag(False, "distil a teacher: subtract the KL to it, token by token, from the advantages")
    opd_kl_coef: float = flag(1.0, "weight of the KL to the teacher; 0 only measures it", at_least=0, needs="--use-opd")
    opd_type: Optional[str] = flag(
        None,
        "who computes the teacher's log-probs: a frozen model alongside the policy (--opd-teacher-load), or "
        "servers of SGLang or vLLM (--opd-teacher-urls); default: as the other two flags say",
        needs="--use-opd",
        choices=("trainer", "server"),
        type=str,
    )
    opd_teacher_urls: Optional[tuple[str, ...]] = flag(
        None,
        "the teacher's server, as URL (vLLM's ends with /v1); or several, as NAME=URL, chosen for each prompt by "
        "--opd-teacher-key",
        needs="--use-opd, served teachers",
        nargs="+",
        type=str,
        metavar="URL",
    )
    opd_teacher_key: str = flag(
        "opd_teacher",
        "metadata key of a prompt that names its teacher, if there are several",
        needs="--use-opd, served teachers, several teachers",
    )

    @property
    def teacher_is_served(self) -> bool:
        """Whether servers compute the teacher's log-probs, after generation, and not the trainer."""
        kind = self.opd_type or ("trainer" if self.opd_teacher_urls is None else "server")
        return self.use_opd and kind == "server"

    @property
    def teacher_is_loaded(self) -> bool:
        """Whether the trainer holds the teacher."""
        return self.use_opd and not self.teacher_is_served

    @property
    def teachers(self) -> dict[str, str]:
        """The servers' addresses by the names of the teachers; a single teacher may have the name ``""``."""
        return dict(_teacher(word) for word in self.opd_teacher_urls or ())


def _teacher(word: str) -> tuple[str, str]:
    """Read ``URL`` or ``NAME=URL``; an address may end with the path of a server's call, as scripts write it."""
    name, equals, url = word.partition("=")
    if not equals or "://" in name:
        name, url = "", word
    return name, url.rstrip("/").removesuffix("/generate").removesuffix("/completions").rstrip("/")


def distillation_needs(flags: DistillationFlags) -> Needs:
    """Return the quantities that the trainer scores for the KL to the teacher."""
    return Needs(old_log_probs=flags.use_opd, teacher_log_probs=flags.use_opd)


def distillation_formula(flags: DistillationFlags) -> list[Term]:
    """Return the change of an advantage by the teacher."""
    if not flags.use_opd:
        return []
    text = f"A_t is then A_t - {flags.opd_kl_coef:g} d_t, d = log p_old - log p_teacher of each token"
    return [Term(text, __name__)]


def check_distillation(flags: DistillationFlags, errors: Errors) -> None:
    """Report servers of a teacher that are missing, or lack an address or name; config/rules.py checks the model."""
    if not flags.teacher_is_served:
        return
    words = flags.opd_teacher_urls or ()
    if not words:
        errors.refuse("opd_type", "server", "needs the teacher's address", "add --opd-teacher-urls URL")
    for place, (_, url) in enumerate(map(_teacher, words), 1):
        if not url.startswith(("http://", "https://")):
            rule = f"address {place} of {len(words)} begins with neither http:// nor https://"
            errors.refuse("opd_teacher_urls", words, rule, "write http://HOST:PORT, or NAME=http://HOST:PORT")
    if len(words) > 1 and (len(flags.teachers) < len(words) or "" in flags.teachers):
        rule = "several teachers need a name each"
        errors.refuse("opd_teacher_urls", words, rule, "write NAME=http://HOST:PORT, every NAME once")
