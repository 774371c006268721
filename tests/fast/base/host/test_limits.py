"""Limits of a container or a job, as control groups of both versions state them."""

from pathlib import Path

from miles.base.host import available_bytes, cpu_quota, memory_bytes


def write(root: Path, **files: str) -> None:
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_OF", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


def test_the_tightest_group_of_version_2_counts(tmp_path):
    write(tmp_path, a__cpu_OFmax="400000 100000", a__memory_OFmax="4096")
    write(tmp_path, a__b__cpu_OFmax="max 100000", a__b__memory_OFmax="max", own="0::/a/b")
    assert cpu_quota(str(tmp_path), str(tmp_path / "own")) == 4.0
    assert memory_bytes(str(tmp_path), str(tmp_path / "own")) == 4096
    write(tmp_path, a__memory_OFcurrent="3000", a__memory_OFstat="anon 100\ninactive_file 900\nactive_file 50")
    assert available_bytes(str(tmp_path), str(tmp_path / "own")) == 4096 - 3000 + 900


def test_version_1(tmp_path):
    write(tmp_path, cpu__cpu_OFcfs_quota_us="-1", cpu__job__cpu_OFcfs_quota_us="150000")
    write(tmp_path, cpu__job__cpu_OFcfs_period_us="100000", memory__memory_OFlimit_in_bytes="8192")
    write(tmp_path, own="4:cpu,cpuacct:/job\n3:memory:/")
    assert cpu_quota(str(tmp_path), str(tmp_path / "own")) == 1.5
    write(tmp_path, memory__memory_OFusage_in_bytes="9000")
    assert memory_bytes(str(tmp_path), str(tmp_path / "own")) == 8192
    assert available_bytes(str(tmp_path), str(tmp_path / "own")) == 0, "more than the limit, for a moment"


def test_without_limits(tmp_path):
    assert cpu_quota(str(tmp_path), str(tmp_path / "none")) is None
    assert memory_bytes(str(tmp_path), str(tmp_path / "none")) > 2**28
    assert 0 < available_bytes(str(tmp_path), str(tmp_path / "none")) <= memory_bytes(str(tmp_path), "none")
