"""How many cores a process may use: of the machine, of its affinity, and of the control groups that it is in."""

from __future__ import annotations

from pathlib import Path

import pytest

from serve.backends.cores import fewer_cores
from serve.engine import resource_limits


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands in for /sys/fs/cgroup, on a machine of eight cores."""
    (tmp_path / "membership").write_text("5:cpu,cpuacct:/pod/main\n0::/pod/main\n")
    monkeypatch.setattr(resource_limits, "MEMBERSHIP", tmp_path / "membership")
    monkeypatch.setattr(resource_limits, "CGROUP", tmp_path)
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)), raising=False)
    return tmp_path


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("cpu_", "cpu.", 1)).write_text(text)


def test_a_process_without_limits_may_use_all(groups: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert fewer_cores() == 0
    write(groups / "pod", cpu_max="max 100000\n")
    write(groups / "cpu", cpu_cfs_quota_us="-1\n", cpu_cfs_period_us="100000\n")
    assert fewer_cores() == 0
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {1, 5}, raising=False)
    assert fewer_cores() == 2


@pytest.mark.parametrize(
    ("limit", "expected"), [("150000 100000\n", 2), ("20000 100000\n", 1), ("800000 100000\n", 0), ("1000000 100000\n", 0)]
)
def test_a_limit_of_a_group_counts_in_whole_cores(groups: Path, limit: str, expected: int) -> None:
    write(groups / "pod" / "main", cpu_max=limit)
    assert fewer_cores() == expected


def test_the_lowest_limit_of_the_groups_around_counts(groups: Path) -> None:
    write(groups / "pod" / "main", cpu_max="600000 100000\n")
    write(groups / "pod", cpu_max="300000 100000\n")
    assert fewer_cores() == 3


def test_groups_of_version_1_have_limits_too(groups: Path) -> None:
    write(groups / "cpu" / "pod" / "main", cpu_cfs_quota_us="250000\n", cpu_cfs_period_us="100000\n")
    assert fewer_cores() == 3
