"""``--sglang-config``: SGLang's own file of flags is these flags, and another launcher's file is refused."""

import base64

import pytest

CONFIG = """
dtype: float32
mem-fraction-static: 0.7
disable_cuda_graph: true
enable-metrics: false
cuda-graph-bs-decode: [1, 2]
json-model-override-args: {num_hidden_layers: 2}
"""
AS_FLAGS = """--sglang-dtype float32 --sglang-mem-fraction-static 0.7 --sglang-disable-cuda-graph
--sglang-cuda-graph-bs-decode 1 2 --sglang-json-model-override-args {"num_hidden_layers":2}"""


def test_sglangs_own_file_is_the_flags_that_it_has(accepted, tmp_path):
    path = tmp_path / "sglang.yaml"
    path.write_text(CONFIG)
    # The command line comes after the file, and the last value counts.
    result = accepted(f"--rollout-engine sglang --sglang-config {path} --sglang-dtype half")
    expected = accepted(f"--rollout-engine sglang {AS_FLAGS} --sglang-dtype half")
    assert result.settings == expected.settings
    assert [note.why.split()[0] for note in result.accepted if "sglang.yaml" in note.written] == ["--sglang-dtype"]


GROUPS = "server_groups: [{worker_type: regular, num_gpus: 4}, {worker_type: placeholder, num_gpus: 4}]"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (GROUPS, "config {}: describes groups of servers (server_groups), and all engines of a run are equal; drop it"),
        (f"sglang: [{{name: actor, {GROUPS}}}]", "config {}: describes groups of servers (sglang), and all"),
        ("engine_groups: []\ndtype: half", "config {}: describes groups of servers (engine_groups), and all"),
        ("prefill_num_servers: 1", "config {}: describes groups of servers (prefill_num_servers), and all"),
        ("[1, 2]", "config {}: must be a mapping from SGLang's flags"),
        ("a: [", "config {}: is no YAML"),
        ("a: \udc80", "config {}: is no YAML"),
        (None, "config {}: no such file; check the path"),
        ("dtyp: half", "dtyp: the installed SGLang has no such flag; did you mean --sglang-dtype?"),
        ("mem-fraction-static: 2", "mem-fraction-static 2: must be in (0, 1]"),
        ("model-path: other", "model-path: the launcher sets it to --hf-checkpoint"),
        ("pp-size: 2", "pp-size 2: an engine here is tensor parallel"),
        ("port: 1", "port: the launcher sets it"),
    ],
)
@pytest.mark.parametrize("more", ["", "--ray-address 10.0.0.1:6379"])
def test_a_file_that_asks_for_something_else_is_refused(refusals, tmp_path, content, expected, more):
    path = tmp_path / "sglang.yaml"
    if content is not None:
        path.write_bytes(content.encode("utf-8", "surrogateescape"))
    messages = refusals(f"--rollout-engine sglang --sglang-config {path} {more}")
    assert len(messages) == 1 and messages[0].startswith("--sglang-" + expected.format(path)), messages


def test_groups_inside_the_command_and_two_files_are_refused(refusals, tmp_path):
    inline = f"base64:{base64.b64encode(GROUPS.encode()).decode()}"
    (message,) = refusals(f"--rollout-engine sglang --sglang-config {inline}")
    assert "describes groups of servers (server_groups)" in message
    (tmp_path / "a.yaml").write_text("dtype: half")
    files = f"--sglang-config {tmp_path / 'a.yaml'} " * 2
    assert all("is given twice" in message for message in refusals(f"--rollout-engine sglang {files}"))
