"""run.json has everything that a report needs, and no secret."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from miles.config.cluster import ClusterArguments
from miles.config.servers.passed_on import ServerFlags
from miles.config.settings import Settings
from miles.config.tracking import TrackingArguments
from miles.observe.run_files import FILE_NAME, RunHeader
from miles.tasks.data.settings import DataArguments


@dataclass(frozen=True)
class Sections:
    tracking: TrackingArguments = field(default_factory=TrackingArguments)
    given: tuple[tuple[str, object], ...] = ()


def header(tracking: TrackingArguments) -> RunHeader:
    return RunHeader.from_sections("title", Sections(tracking), "words", "Σ formula", 7)


def test_round_trip(tmp_path: Path) -> None:
    written = header(TrackingArguments(report_samples=9))
    written.save(tmp_path)
    assert RunHeader.load(tmp_path) == written


def test_changed_settings_are_still_known_after_reading(tmp_path: Path) -> None:
    header(TrackingArguments(report_samples=9)).save(tmp_path)
    read = RunHeader.load(tmp_path)
    assert [name for name in read.settings["tracking"] if not read.is_default("tracking", name)] == ["report_samples"]


def test_pairs_of_names_and_values_are_a_section_without_defaults(tmp_path: Path) -> None:
    sections = Sections(given=(("recompute_granularity", "full"), ("moe_router_dtype", "fp32")))
    RunHeader.from_sections("title", sections, "words", "formula", 7).save(tmp_path)
    read = RunHeader.load(tmp_path)
    assert read.settings["given"] == {"recompute_granularity": "full", "moe_router_dtype": "fp32"}
    assert not any(read.is_default("given", name) for name in read.settings["given"])


def test_secrets_stay_in_the_process(tmp_path: Path) -> None:
    secret = header(TrackingArguments(wandb_key="sesame", wandb_host="https://me:sesame@host"))
    secret.save(tmp_path)
    assert "sesame" not in (tmp_path / FILE_NAME).read_text()
    assert secret.public_settings()["tracking"]["wandb_host"] == "https://(hidden)@host"
    assert secret.public_settings()["tracking"]["wandb_key"] == "(hidden)"
    assert secret.settings["tracking"]["wandb_key"] == "sesame"


def test_keys_of_data_rows_are_shown_and_flags_of_servers_without_their_keys(tmp_path: Path) -> None:
    settings = Settings(
        data=DataArguments(label_key="gold"),
        cluster=ClusterArguments(train_env_vars='{"HF_TOKEN": "sesame", "NCCL_DEBUG": "INFO"}'),
        server_flags=ServerFlags(("--dtype", "float32", "--api-key", "sesame"), ("--api-key=sesame",)),
    )
    RunHeader.from_sections("title", settings, "words", "formula", 7).save(tmp_path)
    read = RunHeader.load(tmp_path).settings
    assert read["data"]["label_key"] == "gold"
    assert read["cluster"]["train_env_vars"] == '{"HF_TOKEN": "(hidden)", "NCCL_DEBUG": "(hidden)"}'
    assert read["server_flags"]["server"] == ["--dtype", "float32", "--api-key", "(hidden)"]
    assert read["server_flags"]["router"] == ["--api-key=(hidden)"]


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ("", ".*"),
        ("[" * 100_000, ".*"),
        ("[1]", "it has other fields"),
        ("9" * 6000, ".*"),
        ("{}", "it has other fields"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, content: str, fault: str) -> None:
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(ValueError, match=rf"run\.json: cannot be read \({fault}\); read it with the version"):
        RunHeader.load(tmp_path)


@pytest.mark.parametrize(
    ("wrong", "fault"),
    [
        ({"settings": []}, "settings are not sections"),
        ({"settings": {"loss": 3}}, "settings are not sections"),
        ({"defaults": {"loss": None}}, "defaults are not sections"),
        ({"total_steps": None}, "title or total_steps"),
        ({"title": 1}, "title or total_steps"),
    ],
)
def test_values_of_another_kind_are_refused(tmp_path: Path, wrong: dict[str, object], fault: str) -> None:
    header(TrackingArguments()).save(tmp_path)
    path = tmp_path / FILE_NAME
    path.write_text(json.dumps(json.loads(path.read_text()) | wrong))
    with pytest.raises(ValueError, match=rf"run\.json: cannot be read \({fault}.*; read it with the version"):
        RunHeader.load(tmp_path)


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--output-dir"):
        RunHeader.load(tmp_path)
