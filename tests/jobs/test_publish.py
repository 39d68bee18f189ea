"""A file that appears whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagemill.jobs.errors import UsageError
from pagemill.jobs.publish import output_file


def test_it_takes_its_place_at_the_end(tmp_path: Path) -> None:
    place = tmp_path / "out.jsonl"
    place.write_text("before")
    with output_file(place) as file:
        file.write(b"after")
        assert place.read_text() == "before"
    assert place.read_text() == "after"
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]
    plain = tmp_path / "plain"
    plain.touch()
    assert place.stat().st_mode == plain.stat().st_mode


def test_a_failure_leaves_what_was_there(tmp_path: Path) -> None:
    place = tmp_path / "out.jsonl"
    place.write_text("before")
    with pytest.raises(ZeroDivisionError), output_file(place) as file:
        file.write(b"half")
        raise ZeroDivisionError
    assert place.read_text() == "before"
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    real.write_text("before")
    link.symlink_to(real)
    with output_file(link) as file:
        file.write(b"after")
    assert link.is_symlink()
    assert real.read_text() == "after"


def test_what_cannot_be_written_is_said(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "none" / "out"):
        with pytest.raises(UsageError), output_file(place):
            pass
    with output_file(Path("/dev/null")) as file:
        file.write(b"x")
    assert Path("/dev/null").is_char_device()
