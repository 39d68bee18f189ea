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
