"""Make the page of launch scripts of the built docs; ``python -m scripts.pages.launch_scripts`` prints it."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterator

from miles.base.flags import flag_name
from miles.compat.spellings import (
    BECOME_FLAGS,
    CISPO,
    CKPT_STEP,
    CONSTANT_OF_REDUCER,
    ESTIMATOR,
    FLAGS_INSTEAD,
    FULLY_ASYNC,
    KNOWN,
    MISMATCH_FUNCTIONS,
    MULTI_TURN,
    OTHER_VALUES,
)
from miles.compat.verdicts import FOREIGN_FLAGS, Foreign
from miles.config.functions import HOOKS
from miles.config.megatron.fields import MODEL_FLAGS, MegatronField, megatron_fields
from miles.config.megatron.rules import (
    FIXED,
    FREE_FIELDS,
    NEUTRAL_VALUES,
    NOT_LATENT,
    OF_LATENT_ROPE,
    OF_OTHER_MODELS,
    SHAPE_FIELDS,
    TRIED,
    refusal_of,
)
from miles.config.needs import conditions
from miles.config.notes import SAME
from miles.config.parser import declared
from miles.config.settings import SECTIONS
from miles.config.sglang.installed import router_flags, server_flags
from miles.config.sglang.rules import (
    CHANGES_RESULTS,
    DATA_PARALLEL,
    NOT_ALONE,
    NOT_QUANTIZED,
    OF_ADAPTERS,
    OF_ADAPTERS_WHY,
    OTHER_PARALLEL,
    OWNED_BY_LAUNCHER,
    RENAMED,
    REPLACED,
    TENSOR_PARALLEL,
    WITHOUT_KEYS,
)
from miles.models.base import LAYER_FIELDS

INTRODUCTION = """\
# Launch scripts

A shell script for `train.py` of a related launcher (slime, radixark's miles) starts here unchanged, or its first run
lists everything that is missing:

```
bash your_script.sh --explain      # if it ends with "$@"; else add --explain to its call of train.py
bash your_script.sh
```

Run it in the root of the checkout, where `train.py` is, with the environment active. A run starts its own Ray; as a
job of `ray job submit`, or with `RAY_ADDRESS` set, it joins that cluster
([How scripts start a run](#how-scripts-start-a-run)).
`examples/from_scripts` has three complete scripts, and what each needs to run on a CPU. `miles translate` reads
[configurations of other trainers](translate.md).

Every flag is **obeyed**, **noted** or **refused**. A noted flag is accepted and has no effect on results; one grouped
note gives the reasons, and `--strict-flags` makes it an error. A refused flag would change the result and cannot be
obeyed. All refusals are reported together, before torch or Ray start, each with the flag, its value, the rule and the
remedy. `--explain` prints all of this, with the layout of the ranks, and needs neither a GPU nor the weights of the
model.

## Backend and engine

Without `--train-backend`, Megatron trains if the command has a flag of Megatron, else FSDP. FSDP also trains families
that only FSDP has (Qwen3-Next, Qwen3.5, Nemotron-H, GLM-4, …): flags of Megatron's layout and layers are then noted,
and sizes that contradict the model refused. The model's `config.json` names the family; for a name on the hub it is
fetched if the cache does not have it (not with `HF_HUB_OFFLINE=1`). Without `--rollout-engine`, SGLang generates if
the command has a flag of SGLang, with `--device cuda`, or if the host has a GPU; else the torch engine does.
`--explain --device cuda` on a laptop shows the choices on a host with GPUs.

With `--ray-address` or `RAY_ADDRESS`, and neither `--device` nor a GPU on this host, the cluster is asked: GPUs there
choose SGLang and `--device cuda`. If its head does not answer within 2 s, the run is planned for CPU, with a note.

## How scripts start a run

`python train_async.py …` is `python train.py … --async-steps 1`; another `--async-steps` in the command wins.

`RAY_ADDRESS` in the environment counts as `--ray-address`, so a run joins the cluster of `ray start --head`, also as a
job:

```
ray start --head
ray job submit --address http://127.0.0.1:8265 --working-dir . \\
    --runtime-env-json '{"env_vars": {"PYTHONPATH": "…"}}' -- python train.py …
```

The job's log is the run's. Its status is `FAILED` if the run's exit code is not 0, and then `ray job submit` exits
with 1. `ray job stop` ends the run; Ray leaves it a few seconds (`RAY_JOB_STOP_WAIT_TIME_S`) to save a checkpoint.
The runtime environment of the job stays, with the launcher's variables added. Without `--ray-address` or
`RAY_ADDRESS` a run starts a local Ray.

## Spellings

`--flag value`, `--flag=value` and `'--flag value'` as one word are the same. A flag that is given twice with different
values has the last one, with a note. Lists of numbers are written `1 2 4`, `1,2,4`, `[1,2,4]` or `[0]*3+[1]*5`. A file
that defines a shell array (`MODEL_ARGS=( … )`) can be sourced by the script as usual, or read as `@FILE`; then `$NAME`
and `${NAME:-default}` are variables of the file or of the environment. No shell runs: a file with loops
or commands is refused, and has to be sourced.
"""

MEASURED = """\
## Measured on public scripts

On 24 November 2026, 107 command lines for `train.py` were tried with `--explain --device cuda`: 66 of radixark/miles,
39 of THUDM/slime, and 2 of forks of slime (SeeleAI/seele-slime, RLVE). Each was transcribed from its launch script, or
from the Python file that builds it, with the variables at their defaults (four lines of tests without their fp16
optimizer state). Model sizes come from the script or from the model's configuration. The model
folder had the model's `config.json` and no weights. The scripts are not part of this repository.

**70 start unchanged.** Two lines train Gemma 4, whose published configuration was not at hand, and count as stopped.
Each of the other 35 gets one message with all that stops it. 7 of these messages ask for another model, which was not
tried. Of the other 28 lines, 27 start after the change that the message asks for; the last needs an estimator that
compares no answers of a group, or more answers. Responses that leave no room for a prompt in the model's context are
refused since 27 November, because engines refuse such requests. The lines were not tried again with this rule. What
stops a line first:
"""
# what stops lines, and how many
STOPS = (
    ("a model that neither backend trains as the line asks: gpt-oss through Megatron-Bridge, Gemma 4, Kimi-K2.5, MiMo, "
     "MiniMax-M2, Qwen3-VL", 9),
    ("`--hf-checkpoint` with quantized weights (FP8, INT4): give the bf16 folder", 8),
    ("functions inside the examples and packages of the other launcher", 6),
    ("objectives of the other launcher: FIPO, FlashREINFORCE, several teachers", 3),
    ("`--enable-mtp-training` of GLM-4.7-Flash", 3),
    ("flags of a fork alone", 2),
    ("a reference converted by the other launcher, and a flag that the installed SGLang does not have", 1),
    ("optimizer state in fp16", 1),
    ("adapters on experts", 1),
    ("`--true-on-policy-mode`", 1),
    ("`--rollout-top-p` below 1 with SGLang and no `--rollout-top-k`", 1),
    ("a reward that the generating function sets", 1),
)  # fmt: skip

# flag, default or meaning elsewhere, and here
DEFAULTS = (
    ("`--train-backend`, `--rollout-engine`", "Megatron, SGLang", "chosen, see above"),
    ("`--bf16`", "on with Megatron", "on with both backends; `--fp32` is the opposite"),
    (
        "`--actor-num-gpus-per-node`",
        "8",
        "8 on CUDA; on CPU one rank for two cores",
    ),
    ("`--use-distributed-optimizer`", "on", "off; the switch divides the state as there"),
    ("`--log-probs-chunk-size`", "-1, whole logits", "1024 tokens: whole logits never exist"),
    (
        "`--weight-decay`, `--adam-beta2`, `--lr-decay-style` with FSDP",
        "0, 0.95, constant",
        "0.01, 0.999, linear, with both backends",
    ),
    (
        "`--ref-load`",
        "names the initial weights too, with Megatron and no checkpoint in `--load`",
        "the reference only; `--hf-checkpoint` has the initial weights. `MODEL_torch_dist` together with "
        "`--hf-checkpoint MODEL` is read as that model; another one is noted",
    ),
    (
        "`--moe-router-bias-update-rate` with `--moe-router-enable-expert-bias`",
        "0.001",
        "0: biases of experts stay as in the checkpoint",
    ),
    ("`--save-hf`", "at each save", "at each save, and at the end of the run"),
    (
        "`--over-sampling-batch-size`",
        "prompts that are sampled together",
        "the same, with a filter or an early stop; else no effect",
    ),
    ("`--fully-async`", "needs no `--async-steps`", "`--async-steps 1` if it is not given"),
)


def launch_page() -> str:
    """Return the page: how scripts are read, and the verdict on every flag."""
    return "\n".join([INTRODUCTION, *_lines()]).rstrip("\n") + "\n"


def _lines() -> Iterator[str]:
    yield from (MEASURED, "| what stops it | lines |", "|---|---|")
    yield from (f"| {what} | {lines} |" for what, lines in STOPS)
    yield ""
    yield from ("## Same flag, other default or meaning", "", "| flag | elsewhere | here |", "|---|---|---|")
    yield from (f"| {' | '.join(row)} |" for row in DEFAULTS)
    yield ""
    yield from _read_otherwise()
    yield from _functions()
    yield from _idle()
    yield from _own()
    yield from _table("Flags of related launchers", (_foreign_row(row) for row in FOREIGN_FLAGS.values()))
    yield from _table("Flags of Megatron", (_megatron_row(field) for field in _fields()))
    yield from _sglang()


def _table(title: str, rows: Iterator[tuple[str, str, str]]) -> Iterator[str]:
    yield from (f"## {title}", "", "| flag | verdict | what happens |", "|---|---|---|")
    yield from (f"| `{flag}` | {verdict} | {_cell(text)} |" for flag, verdict, text in sorted(rows))
    yield ""


def _cell(text: str) -> str:
    return text.replace("|", chr(92) + "|")


def _read_otherwise() -> Iterator[str]:
    yield from ("## Values with another name", "", "| written | read as | because |", "|---|---|---|")
    yield from (
        f"| `{flag} {value}` | `{flag} {here}` | {why} |" for (flag, value), (here, why) in OTHER_VALUES.items()
    )
    why = "with rewards of 0 the advantages come from the teacher alone; refused with other rewards"
    yield f"| `{' '.join(ESTIMATOR)}` | `--use-opd` | {why} |"
    bounds = f"`--advantage-estimator grpo --policy-loss {CISPO} --ratio-min … --ratio-max …`"
    yield f"| `{ESTIMATOR[0]} {CISPO}` | {bounds} | 1 - `--eps-clip` and 1 + `--eps-clip-high`, as absolute bounds |"
    yield ""


def _functions() -> Iterator[str]:
    yield from ("## Functions inside the packages of other launchers", "")
    yield from ("| flag | function there | here |", "|---|---|---|")
    for (flag, path), ours in KNOWN.items():
        yield f"| `{flag}` | `{path}` | {f'`{ours}`' if ours else 'as without the flag'} |"
    for (flag, path), words in BECOME_FLAGS.items():
        yield f"| `{flag}` | `{path}` | `{words}` |"
    ahead = ", ".join(f"`{name}`" for name in FULLY_ASYNC)
    yield f"| `--rollout-function-path` | {ahead} | `--fully-async --async-steps 1` |"
    constant = f"`--loss-aggregation constant --loss-aggregation-divisor {CONSTANT_OF_REDUCER:g}`"
    yield f"| `--custom-pg-loss-reducer-function-path` | `DrGRPO.custom_reducer.…` | {constant} |"
    turns = "`--environment tool_calls:…`, of its `--generate-…` flags ([Environments](agents.md#tools-of-a-list))"
    yield f"| `--custom-generate-function-path` | `{MULTI_TURN}` | {turns} |"
    weights = "`--use-tis …` and `--use-rs …`, of its settings in `--custom-config-path` ([Off-policy](off-policy.md))"
    yield f"| `--custom-tis-function-path` | {', '.join(f'`{name}`' for name in MISMATCH_FUNCTIONS)} | {weights} |"
    for (flag, path), instead in FLAGS_INSTEAD.items():
        if path in MISMATCH_FUNCTIONS:
            continue
        yield f"| `{flag}` | `{path}` | refused: {instead} |"
    yield from ("", "Any other function of theirs is refused with the signature to write:", "")
    yield from (functions_table(), "")


def functions_table() -> str:
    """Return the table of the functions that users can write: signature, where it runs, and what data it may change."""
    rows = (
        f"| `{flag_name(field)}` | `{_cell(hook.signature)}` | {hook.runs} | {hook.changes} |"
        for field, hook in HOOKS.items()
    )
    return "\n".join(["| flag | signature | runs in | may change |", "|---|---|---|---|", *rows])


def _idle() -> Iterator[str]:
    yield from ("## Obeyed, unless another setting makes them idle", "")
    yield "These flags are noted if they have no effect."
    yield from ("", "| flags | no effect if |", "|---|---|")
    reasons = dict[str, list[str]]()
    for name, of_flag in conditions():
        why = "; ".join(dict.fromkeys(condition.why for condition in of_flag))
        reasons.setdefault(why, []).append(f"`{flag_name(name)}`")
    yield from (f"| {', '.join(flags)} | {why} |" for why, flags in reasons.items())
    yield ""


def _own() -> Iterator[str]:
    names = [flag_name(field.name) for section in SECTIONS.values() for field in dataclasses.fields(section)]
    yield from ("## Flags of this launcher", "", "Obeyed; [Flags](flags.md) explains each:", "")
    yield from _listed(names)


def _listed(names: list[str]) -> list[str]:
    return [*textwrap.wrap(", ".join(f"`{name}`" for name in names), 118, break_on_hyphens=False), ""]


def _foreign_row(row: Foreign) -> tuple[str, str, str]:
    if row.flag == CKPT_STEP:
        return row.flag, "obeyed", "read as the checkpoint of that number in --load; refused if it is not there"
    text = f"{row.heading}: {row.why}" if row.heading is not None else f"{row.why}; {row.instead}"
    if row.neutral:
        text += f". Noted with {' or '.join(f'`{value}`' for value in row.neutral)}"
    if row.unless is not None:
        text += f". Noted {row.unless_why if row.unless_why.startswith('without') else 'if ' + row.unless_why}"
    return row.flag, row.verdict, text


def _fields() -> list[MegatronField]:
    taken = {*declared()}
    fields = dict[str, MegatronField]()
    for field in (*MODEL_FLAGS, *megatron_fields().values()):
        if field.name not in taken and field.flag not in {flag_name(name) for name in taken}:
            fields.setdefault(field.flag, field)
    return list(fields.values())


def _megatron_row(field: MegatronField) -> tuple[str, str, str]:
    name = field.name
    neutral = [str(value) for value in NEUTRAL_VALUES.get(name, ())]
    if name in OF_OTHER_MODELS:
        text = (
            "no model that Megatron trains has it, so it contradicts --hf-checkpoint. Noted with "
            "`--train-backend fsdp` for other models, which --hf-checkpoint determines"
        )
        return field.flag, "noted or refused", text
    if name in SHAPE_FIELDS:
        text = "checked: --hf-checkpoint determines it, and another value is refused"
        if name not in LAYER_FIELDS and field.kind != "bool" and field.default is not None:
            neutral.append(str(field.default))
        without = f". Noted with {_either(neutral)} for a model without it" if neutral else ""
        if name in OF_LATENT_ROPE:
            without = ". Noted for a model without latent attention"
        elif name in NOT_LATENT:
            without = ". Noted for a model with latent attention"
        return field.flag, "obeyed", text + without
    if name in TRIED:
        return field.flag, "obeyed", field.help or "passed on"
    if name in FREE_FIELDS and name in FIXED:
        value, why = FIXED[name]
        return field.flag, "obeyed or noted", f"always {value}: {why}. Another value is noted"
    if name in FREE_FIELDS:
        return field.flag, "noted", ": ".join(FREE_FIELDS[name])
    if name in FIXED:
        value, why = FIXED[name]
        return field.flag, "obeyed", f"always {value}: {why}; another value is refused"
    if field.kind != "bool" and field.default is not None:
        neutral.append(str(field.default))
    accepted = f". Noted with {_either(neutral)}" if neutral else ""
    return field.flag, "noted or refused" if neutral else "refused", refusal_of(name) + accepted


def _either(values: list[str]) -> str:
    return " or ".join(f"`{value}`" for value in dict.fromkeys(values))


def _sglang() -> Iterator[str]:
    owned = ((flag, "refused", f"{why}; drop it") for flag, why in OWNED_BY_LAUNCHER.items())
    keyless = ((flag, "refused", "SGLang checks no keys under it, and would answer everybody") for flag in WITHOUT_KEYS)
    parallel = (
        (flag, "noted or refused", f"1 is passed on; for more give {use}")
        for flag, use in OTHER_PARALLEL.items()
        if flag not in DATA_PARALLEL
    )
    replicas = (
        "passed on with --sglang-enable-dp-attention; else N replicas are read as N engines behind the router, with "
        "--rollout-num-gpus N times --rollout-num-gpus-per-engine by default. Refused if the devices cannot be divided "
        "so"
    )
    adapters = f"{SAME}: {OF_ADAPTERS_WHY}; with --sglang-lora-paths it is passed on"
    size = "equal to --rollout-num-gpus-per-engine; another value is noted"
    loader = f"{SAME}: every engine receives its weights from the trainer"
    kinds = (
        (
            "--quantization",
            "refused",
            f"{NOT_QUANTIZED}; with --debug-rollout-only or --sglang-load-format flash_rl it is passed on",
        ),
        ("--disaggregation-mode", "noted or refused", f"null is passed on; else {NOT_ALONE}"),
        ("--context-length", "obeyed", "passed on; refused if the longest response leaves no room for a prompt"),
    )
    rows = [
        *owned,
        *keyless,
        *kinds,
        *parallel,
        *((flag, "obeyed", replicas) for flag in DATA_PARALLEL),
        *((flag, "obeyed", size) for flag in TENSOR_PARALLEL),
        *((flag, "obeyed or noted", adapters) for flag in OF_ADAPTERS),
        *((old, "obeyed", f"read as --sglang-{new[2:]}") for old, new in RENAMED.items()),
        *((old, "obeyed", f"read as --sglang-{new[2:]}; noted together with it") for old, new in REPLACED.items()),
        ("--remote-instance-weight-loader-ib-device", "noted", loader),
        ("--router-policy", "obeyed", "read as --router-policy, as is every --sglang-router-NAME"),
    ]
    rows = [(f"--sglang-{flag[2:]}", verdict, text) for flag, verdict, text in rows]
    known = {f"--sglang-{flag[2:]}" for flag in server_flags()}
    yield from _table("Flags of SGLang", iter(rows))
    yield "Every other flag of the installed SGLang is obeyed: it is passed on to the servers, and to the router. One"
    yield "engine needs no router, so its flags are noted then. With `--rollout-engine torch` all are noted, but for"
    yield "flags that change the responses, which are refused:"
    yield from (", ".join(f"`--sglang-{flag[2:]}`" for flag in sorted(CHANGES_RESULTS)) + ".", "")
    yield from _listed(sorted(known - {flag for flag, _, _ in rows}))
    yield from _listed(sorted(f"--router-{flag[2:]}" for flag in router_flags().keys() - {*OWNED_BY_LAUNCHER}))


if __name__ == "__main__":
    print(launch_page(), end="")
