"""The check of all rows, its remembered verdict, and prompts that are made when they are drawn."""

import json
import os
import re
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from miles.base.flags import FlagError
from miles.base.text import InputError
from miles.tasks.data import checked_rows
from miles.tasks.data.conversations import load_conversations
from miles.tasks.data.prompts import load_prompts
from miles.tasks.data.settings import DataArguments
from miles.tasks.data.sources import Rows, open_rows
from miles.tasks.data.stream import PromptStream
from miles.tasks.rewards.settings import RewardArguments

LABELLED = DataArguments(label_key="label", rollout_max_prompt_len=5)
ROWS = [{"input": "a" * (n % 7 + 1), "label": str(n), "metadata": {"n": n}} for n in range(700)]


@pytest.fixture
def saved(tmp_path, tokenizer):
    """Return a folder with a tokenizer: only with files is a verdict remembered."""
    tokenizer.save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


@pytest.fixture
def checked(monkeypatch):
    """Return the list of sources that were checked, and not remembered."""
    sources = []
    show = checked_rows._Progress.end
    monkeypatch.setattr(checked_rows._Progress, "end", lambda self: (sources.append(self._source), show(self)))
    return sources


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "miles" / "rows"


def write(path, rows=ROWS):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def facts(prompts):
    return [(p.text, p.token_ids, p.label, p.metadata, p.source, p.input) for p in prompts]


def test_a_verdict_is_remembered_until_something_that_decides_it_changes(tmp_path, saved, checked, caplog):
    source, tokenizer = write(tmp_path / "rows.jsonl"), AutoTokenizer.from_pretrained(saved)

    def load(data=LABELLED, **options):
        return load_prompts(source, data, tokenizer, **options)

    first, again = load(), load()
    assert len(checked) == 1 and facts(first) == facts(again) and first.verdict.dropped == again.verdict.dropped == 300
    assert caplog.messages[0] == caplog.messages[1] and "dropped 300 of 700 prompts" in caplog.messages[0]
    load(DataArguments(label_key="label", rollout_max_prompt_len=5, rollout_shuffle=True, rollout_seed=7))
    assert len(checked) == 1
    load(DataArguments(label_key="label", rollout_max_prompt_len=6))
    load(reward=RewardArguments(rm_type="math"))
    load(max_context_len=4)
    load(input_key="label")
    assert len(checked) == 5
    write(tmp_path / "rows.jsonl", ROWS[1:])
    assert len(load()) == 399 and len(checked) == 6
    (saved / "chat_template.jinja").write_text("{{ messages[0].content }}")
    load()
    assert len(checked) == 7


def test_the_tokenizer_is_not_loaded_for_a_verdict_that_is_remembered(tmp_path, saved, checked, monkeypatch):
    source = write(tmp_path / "rows.jsonl")
    first = load_prompts(source, LABELLED, AutoTokenizer.from_pretrained(saved))
    monkeypatch.setattr("miles.tasks.data.prompts.load_tokenizer", lambda path: pytest.fail("loaded"))
    assert len(load_prompts(source, LABELLED, str(saved))) == len(first) and len(checked) == 1


@pytest.mark.parametrize("damage", [lambda file: file.write_bytes(b"{"), lambda file: file.unlink()])
def test_a_verdict_that_cannot_be_read_is_made_again(tmp_path, saved, checked, cache, damage):
    source, tokenizer = write(tmp_path / "rows.jsonl"), AutoTokenizer.from_pretrained(saved)
    first = load_prompts(source, LABELLED, tokenizer)
    (file,) = cache.iterdir()
    damage(file)
    assert facts(load_prompts(source, LABELLED, tokenizer)) == facts(first) and len(checked) == 2


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path, saved, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert len(load_prompts(write(tmp_path / "rows.jsonl"), LABELLED, AutoTokenizer.from_pretrained(saved))) == 400


def test_faults_of_many_rows_are_told_together_and_remembered_nowhere(tmp_path, saved, cache):
    rows = [dict(row) for row in ROWS]
    rows[0]["label"], rows[3]["input"], rows[5] = None, "", []
    tokenizer = AutoTokenizer.from_pretrained(saved)
    for faulty, numbers in ((rows, [1, 4, 6]), ([{"input": "x"}] * 600, [1, 2, 3, 4, 5])):
        source = write(tmp_path / "rows.jsonl", faulty)
        with pytest.raises(FlagError) as caught:
            load_prompts(source, LABELLED, tokenizer)
        told = " ".join(caught.value.messages)
        assert re.findall(r"rows\.jsonl:(\d+)", told) == [str(n) for n in numbers], (
            "a fault of several rows is told once"
        )
        assert told.count("no column") <= 1
    assert not cache.exists()


def test_a_long_check_shows_how_far_it_is(tmp_path, tokenizer, capsys, monkeypatch):
    monkeypatch.setattr(checked_rows, "_PROGRESS_SECONDS", 0.0)
    source = write(tmp_path / "rows.jsonl")
    load_prompts(source, LABELLED, tokenizer)
    assert capsys.readouterr().err.endswith(f"checking {source}: 700 of 700 rows\n")


def test_a_stream_of_rows_resumes_with_the_same_bits(tmp_path, tokenizer):
    """Also from a position of a version that kept all prompts in memory."""
    prompts = load_prompts(write(tmp_path / "rows.jsonl"), LABELLED, tokenizer)
    stream, in_memory = (PromptStream(each, shuffle=True, seed=3) for each in (prompts, list(prompts)))
    stream.draw(333)
    in_memory.draw(333)
    assert stream.state() == in_memory.state()
    resumed = PromptStream(load_prompts(str(tmp_path / "rows.jsonl"), LABELLED, tokenizer), shuffle=True, seed=3)
    resumed.restore(json.loads(json.dumps(in_memory.state())))
    drawn = [each.draw(500) for each in (stream, in_memory, resumed)]
    assert drawn[0] == drawn[1] == drawn[2]
    assert facts(g.prompt for g in drawn[0]) == facts(g.prompt for g in drawn[2])


def test_conversations_are_remembered_too(tmp_path, saved, checked):
    chat = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    source = write(tmp_path / "chats.jsonl", [{"input": chat}, {"input": chat * 9}])
    loaded = [
        load_conversations(source, DataArguments(), AutoTokenizer.from_pretrained(saved), max_context_len=40)
        for _ in range(2)
    ]
    assert len(checked) == 1 and [each.verdict.dropped for each in loaded] == [1, 1]
    assert list(loaded[0]) == list(loaded[1])


def test_a_line_that_changes_during_the_run_is_refused_and_a_file_that_is_replaced_changes_nothing(tmp_path, tokenizer):
    source = tmp_path / "rows.jsonl"
    prompts = load_prompts(write(source), LABELLED, tokenizer)
    before = facts(prompts)
    (tmp_path / "new.jsonl").write_text("other\n")
    os.replace(tmp_path / "new.jsonl", source)
    assert facts(prompts) == before
    prompts = load_prompts(write(source), LABELLED, tokenizer)
    with source.open("a") as file:
        file.write("appended\n")
    assert facts(prompts) == before
    write(source, [ROWS[0] | {"label": "7"}, *ROWS[1:]])
    assert facts(prompts[1:]) == before[1:]
    with pytest.raises(InputError, match=r"rows\.jsonl:1: the line was changed after the run had read it"):
        prompts[0]


@pytest.mark.parametrize("form", ["jsonl", "parquet", "datasets", "reasoning_gym"])
def test_any_range_of_rows_is_read_as_all_of_them_are(tmp_path, form, monkeypatch):
    monkeypatch.setattr("miles.tasks.data.sources._BATCH", 50)  # of an Arrow file
    path = tmp_path / f"rows.{form}"
    if form == "jsonl":
        write(path)
    elif form == "parquet":
        pq.write_table(pa.Table.from_pylist(ROWS), path, row_group_size=70)
    elif form == "datasets":
        import datasets

        datasets.Dataset.from_list(ROWS).save_to_disk(str(path))
    rows: Rows = open_rows("reasoning_gym:gcd:size=160,seed=1" if form == "reasoning_gym" else str(path))
    assert rows.content and rows.content == open_rows(rows[0].where.rpartition(":")[0]).content
    every = list(rows.read(0, len(rows)))
    assert len(every) == len(rows) and (form == "reasoning_gym" or [dict(row.columns) for row in every] == ROWS)
    for start, stop in ((0, 1), (49, 51), (69, 141), (len(rows) - 1, len(rows)), (3, 3)):
        assert list(rows.read(start, stop)) == every[start:stop]
    assert [rows[n] for n in (150, 0, 70)] == [every[n] for n in (150, 0, 70)]


IN_PROCESSES = """
import json, os, sys
sys.modules["torch"] = None  # a process with its threads is not forked
from miles.tasks.data import checked_rows, prompts
from miles.tasks.data.settings import DataArguments
source, tokenizer, *changes = sys.argv[1:]
made = checked_rows._Check.__call__
def noted(self, start):
    found = made(self, start)
    found.notes.add(f"in {os.getpid()}", "x")
    return found
checked_rows._Check.__call__ = noted
checked_rows._MANY = int(changes[0])
data = DataArguments(label_key="label", rollout_max_prompt_len=int(changes[1]))
verdicts = []
check = prompts.check_rows
prompts.check_rows = lambda *arguments: verdicts.append(check(*arguments)) or verdicts[-1]
try:
    prompts.load_prompts(source, data, tokenizer)
    assert not [name for name in sys.modules if "miles" in name and ("image" in name or "vision" in name)]
    notes = dict(verdicts[0].notes.counts)
    processes = [kind for kind in notes if kind.startswith("in ")]
    kept = {kind: n for kind, n in notes.items() if kind not in processes}
    print(json.dumps([verdicts[0].usable.tolist(), kept, verdicts[0].first_long, len(processes)]))
except ValueError as error:
    print(json.dumps(error.messages))
"""


def test_processes_that_share_the_check_find_what_one_alone_does(tmp_path, saved):
    """And the tokens that are not counted, as they are certainly few, change nothing. Text needs no code of images."""
    rows = [{"input": "a" * (n % 40 + 1), "label": " " if n % 300 == 7 else n} for n in range(9000)]
    source = write(tmp_path / "rows.jsonl", rows)

    def outcome(many, limit, source=source):
        command = [sys.executable, "-c", IN_PROCESSES, source, str(saved), str(many), str(limit)]
        environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / str(many))}
        return json.loads(subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True).stdout)

    *facts, processes = outcome(0, 30)
    assert outcome(10**6, 30) == [*facts, 1] and processes > 1
    assert facts[0] == [n for n in range(9000) if n % 40 + 2 <= 30]
    assert facts[2] == f"{source}:30" and list(facts[1].values()) == [[30, f"{source}:8"]]
    rows[8500]["input"] = rows[8600]["input"] = ""
    (fault,) = outcome(0, 30, write(tmp_path / "bad.jsonl", rows))
    assert re.findall(r"bad\.jsonl:(\d+)", fault) == ["8501", "8601"]


MANY_ROWS = """
import os, signal, sys, time
from miles.base.text import InputError
from miles.tasks.data import checked_rows
from miles.tasks.data.row import Row, Rows
from miles.types.sample import Prompt
class Many(Rows):
    def __len__(self):
        return 10**5
    def read(self, start, stop):
        return (Row(f"x:{n}", {}) for n in range(start, stop))
def make(rows, notes, is_exact):
    is_slow, end = int(rows[0].where[2:]) > checked_rows._RANGE, time.process_time() + 0.05
    while is_slow and time.process_time() < end:
        if sys.argv[1] == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
    os.write(1, b".")
    is_wrong = sys.argv[1] == "wrong"
    return [InputError(f"{row.where}: wrong") if is_wrong else Prompt(row.where, (1,)) for row in rows]
checked_rows.MOST_PROCESSES = 2
try:
    checked_rows.check_rows("x", Many(), make, lambda prompt: False, "")
except ValueError as error:
    print(error)
"""


def test_processes_stop_when_there_are_enough_faults():
    """And not at the end of the thousands of rows that each is to check, which takes seconds."""
    printed = subprocess.check_output([sys.executable, "-c", MANY_ROWS, "wrong"], text=True)
    assert "x:0: wrong" in printed
    in_a_range = checked_rows._RANGE // checked_rows._BATCH
    assert printed.count(".") < 3 * in_a_range


def test_a_killed_process_of_the_check_is_an_error_that_names_the_source():
    printed = subprocess.check_output([sys.executable, "-c", MANY_ROWS, "killed"], text=True)
    assert "prompt source x: a process that checked its rows was killed" in printed
