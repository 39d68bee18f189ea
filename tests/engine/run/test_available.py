"""What is free: the machine's memory, or less where a control group at any height says so."""

from __future__ import annotations

from pathlib import Path

from pagemill.engine.run.available import available_memory

MEMINFO = "MemTotal: 99 kB\nMemAvailable:   {} kB\n"


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def machine(root: Path, kib: int, group: str | None = None) -> Path:
    write(root / "proc/meminfo", MEMINFO.format(kib))
    if group is not None:
        write(root / "proc/self/cgroup", group)
    return root


def second(folder: Path, limit: str, used: int, inactive: int = 0, high: str = "max") -> None:
    """A group of version 2."""
    write(folder / "memory.max", limit + "\n")
    write(folder / "memory.high", high + "\n")
    write(folder / "memory.current", f"{used}\n")
    write(folder / "memory.stat", f"anon 5\ninactive_file {inactive}\n")


def first(folder: Path, limit: int, used: int, inactive: int = 0) -> None:
    """A group of version 1."""
    write(folder / "memory.limit_in_bytes", f"{limit}\n")
    write(folder / "memory.usage_in_bytes", f"{used}\n")
    write(folder / "memory.stat", f"inactive_file 1\ntotal_inactive_file {inactive}\n")


def test_the_machines_memory_counts(tmp_path: Path) -> None:
    assert available_memory(machine(tmp_path, 2048)) == 2048 * 1024


def test_an_unknown_system_is_unknown(tmp_path: Path) -> None:
    assert available_memory(tmp_path) is None


def test_a_groups_limit_counts_where_it_is_lower(tmp_path: Path) -> None:
    machine(tmp_path, 2048)
    second(tmp_path / "sys/fs/cgroup", "1000000", 600_000, 100_000)
    assert available_memory(tmp_path) == 500_000


def test_a_group_without_a_limit_does_not_count(tmp_path: Path) -> None:
    machine(tmp_path, 2048)
    second(tmp_path / "sys/fs/cgroup", "max", 600_000)
    assert available_memory(tmp_path) == 2048 * 1024


def test_where_a_group_is_slowed_down_is_its_limit(tmp_path: Path) -> None:
    machine(tmp_path, 2048, "0::/\n")
    second(tmp_path / "sys/fs/cgroup", "1000000", 600_000, high="700000")
    assert available_memory(tmp_path) == 100_000


def test_the_fullest_group_above_a_process_counts(tmp_path: Path) -> None:
    """Its own has room for a million bytes, the one above for a tenth of that."""
    machine(tmp_path, 2048, "0::/outer/inner\n")
    second(tmp_path / "sys/fs/cgroup", "max", 9)
    second(tmp_path / "sys/fs/cgroup/outer", "3000000", 2_900_000)
    second(tmp_path / "sys/fs/cgroup/outer/inner", "1000000", 0)
    second(tmp_path / "sys/fs/cgroup/other", "1", 1)  # not above this process
    assert available_memory(tmp_path) == 100_000


def test_version_one_is_read_as_well(tmp_path: Path) -> None:
    machine(tmp_path, 2048, "12:cpu,cpuacct:/a\n5:memory:/outer/inner\n0::/\n")
    top = tmp_path / "sys/fs/cgroup/memory"
    first(top, 9223372036854771712, 10**9)
    first(top / "outer", 1_500_000, 1_400_000, 200_000)
    first(top / "outer/inner", 1_000_000, 100_000)
    assert available_memory(tmp_path) == 300_000


def test_in_a_container_the_top_is_its_own_group(tmp_path: Path) -> None:
    """The path is the host's, and nothing is mounted there."""
    machine(tmp_path, 2048, "5:memory:/docker/0123\n")
    first(tmp_path / "sys/fs/cgroup/memory", 1_000_000, 400_000)
    assert available_memory(tmp_path) == 600_000
    machine(tmp_path, 2048, "0::/../../kubepods\n")
    second(tmp_path / "sys/fs/cgroup", "500000", 400_000)
    assert available_memory(tmp_path) == 100_000


def test_a_group_over_its_limit_leaves_nothing(tmp_path: Path) -> None:
    machine(tmp_path, 2048)
    second(tmp_path / "sys/fs/cgroup", "1000", 5000)
    assert available_memory(tmp_path) == 0
