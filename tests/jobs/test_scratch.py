import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pagemill.jobs.scratch import PREFIX, scratch_folder


def test_a_scratch_folder_is_gone_afterwards_even_after_an_error(tmp_path: Path) -> None:
    with scratch_folder(tmp_path) as folder:
        (folder / "inner").mkdir()
        (folder / "inner" / "file").write_bytes(b"x")
    assert not folder.exists()
    with pytest.raises(ZeroDivisionError), scratch_folder(tmp_path) as folder:
        (folder / "file").write_bytes(b"x")
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


def test_its_place_is_made_where_it_is_missing(tmp_path: Path) -> None:
    with scratch_folder(tmp_path / "a" / "b") as folder:
        assert folder.parent == tmp_path / "a" / "b"


def test_folders_of_the_living_stay_and_those_of_the_dead_go(tmp_path: Path) -> None:
    code = (
        "import sys, os; from pathlib import Path; from pagemill.jobs.scratch import scratch_folder\n"
        "with scratch_folder(Path(sys.argv[1])) as f: (f / 'x').write_bytes(b'x'); os._exit(0)"
    )
    with scratch_folder(tmp_path) as alive:
        subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
        assert len(list(tmp_path.iterdir())) == 2
        with scratch_folder(tmp_path) as mine:
            assert sorted(tmp_path.iterdir()) == sorted([alive, mine])
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_just_being_made_is_left_alone(tmp_path: Path) -> None:
    young = tmp_path / f"{PREFIX}young"
    young.mkdir()
    descriptor = os.open(young / "lock.new", os.O_RDWR | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with scratch_folder(tmp_path):
        assert young.exists()
    os.close(descriptor)


def test_a_folder_whose_maker_died_before_the_lock_goes_when_it_is_old(tmp_path: Path) -> None:
    for name in ("old", "young"):
        (tmp_path / f"{PREFIX}{name}").mkdir()
        (tmp_path / f"{PREFIX}{name}" / "lock.new").touch()
    os.utime(tmp_path / f"{PREFIX}old", (0, 0))
    with scratch_folder(tmp_path) as mine:
        assert sorted(tmp_path.iterdir()) == sorted([mine, tmp_path / f"{PREFIX}young"])


def test_whoever_writes_reads_or_merges_temporary_files_is_swept_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them in a process that dies in the middle; the next one of any kind takes away what is left."""
    code = """
import os, sys
from contextlib import contextmanager
from pathlib import Path
from pagemill.jobs import commit, merge
from pagemill.jobs.merge import Source
def die(*_, **__):
    os._exit(0)
if sys.argv[1] == "segment":
    commit.write_rows = die
    commit.write_segment(None, "job", 0, "1", 0, [])
else:
    merge._spilled = die
    list(merge.merge([Source(0, 9, None)] * 3, fan_in=2))
"""
    for what in ("segment", "merge"):
        environment = {**os.environ, "TMPDIR": str(tmp_path)}
        subprocess.run([sys.executable, "-c", code, what], check=True, env=environment)
        assert len(list(tmp_path.iterdir())) == 1, what
        with scratch_folder(tmp_path):
            pass
        assert list(tmp_path.iterdir()) == [], what
