"""Links inside the project lead somewhere, and what tests/README.md and the promises name are tests."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted(
    path
    for path in [*ROOT.glob("*.md"), *ROOT.glob("*/*.md"), *ROOT.glob("*/*/*.md"), *ROOT.glob(".github/*.md")]
    if not {".venv", "out", "models"} & set(path.relative_to(ROOT).parts)
)


def anchors(text: str) -> set[str]:
    """What GitHub makes of headings."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files_and_headings_that_are_there(document: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, heading = link.partition("#")
        target = (document.parent / name).resolve() if name else document
        assert target.exists(), f"{link} in {document.name}"
        if heading:
            assert heading in anchors(target.read_text()), f"{link} in {document.name}"


def test_every_promise_names_tests() -> None:
    text = (ROOT / "README.md").read_text()
    promises = re.split(r"^- \*\*(P\d+)\*\*", text[text.index("## Promises") :], flags=re.MULTILINE)
    named = {
        name: re.findall(r"\((tests/[\w/]+\.py)\)", said)
        for name, said in zip(promises[1::2], promises[2::2], strict=True)
    }
    assert list(named) == [f"P{n}" for n in range(1, 11)]
    assert all(named.values()), named


def test_tests_that_are_named_exist() -> None:
    page = ROOT / "tests" / "README.md"
    folder = ""
    for path, name in re.findall(r"`([\w/]*\.py)?(?:::(\w+))?`", page.read_text()):
        folder = path or folder
        if not folder or (not path and not name):
            continue
        where = ROOT / "tests" / folder
        if not where.name.startswith("test_"):
            continue  # a file of the project, not of the tests
        if name:
            assert f"def {name}(" in where.read_text(), f"{folder}::{name}"
