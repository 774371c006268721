"""transformers is imported without reading the files of its models once more, and has the same names."""

import json
import os
import subprocess
import sys

import pytest

from miles.base.cache import store
from miles.base.quick_import import StoredResults

IMPORT = """
import json, sys
opened = []
sys.addaudithook(lambda event, arguments: event == "open" and opened.append(str(arguments[0])))
from miles.base.quick_import import import_transformers_quickly
import_transformers_quickly()
import transformers
from transformers.utils.import_utils import PACKAGE_DISTRIBUTION_MAPPING as packages
read = [file for file in opened if "transformers/models/" in file and file.endswith(".py")]
print(json.dumps([len(read), sorted(dir(transformers)), sorted(dir(transformers.models)), packages]))
"""


def imported(cache):
    """Import transformers in a new process; return how many files of models it read, and the names that it has."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    done = subprocess.run([sys.executable, "-c", IMPORT], env=environment, capture_output=True, check=True)
    read, *names = json.loads(done.stdout)
    return read, names


def test_only_the_first_process_reads_the_files(tmp_path):
    read, names = imported(tmp_path)
    assert read > 1000
    assert len(names[0]) > 1000
    assert imported(tmp_path) == (pytest.approx(0, abs=20), names)


@pytest.mark.parametrize("damage", [b"", b"\xff no result", b"("])
def test_a_damaged_file_counts_as_none(damage, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert StoredResults().get("names", lambda: {"a", "b"}) == {"a", "b"}
    assert StoredResults().get("names", lambda: "computed again") == {"a", "b"}
    (file,) = (tmp_path / "miles").iterdir()
    store(file.name, damage)
    assert StoredResults().get("names", lambda: "computed again") == "computed again"


def test_results_of_other_packages_do_not_count(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    packages = tmp_path / "site-packages"
    packages.mkdir()
    monkeypatch.syspath_prepend(str(packages))
    assert StoredResults().get("names", lambda: "old") == "old"
    os.utime(packages, (0, 0))  # as an installation changes it
    assert StoredResults().get("names", lambda: "new") == "new"


def test_a_cache_that_cannot_be_written_changes_nothing(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert StoredResults().get("names", lambda: 1) == 1
    assert StoredResults().get("names", lambda: 2) == 2
