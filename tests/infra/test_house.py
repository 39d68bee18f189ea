"""The house itself: packaging lists every room, the floors hold, and the check of the floors can fail."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("jobs", "kernels", "engine", "worker")
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_every_folder_of_modules_is_packaged_under_its_own_name() -> None:
    on_disk = {
        "pagemill." + ".".join(folder.relative_to(ROOT).parts): folder.relative_to(ROOT).as_posix()
        for room in ROOMS
        for folder in [ROOT / room, *(p for p in (ROOT / room).rglob("*") if p.is_dir())]
        if (folder / "__init__.py").exists()
    }
    tools = PYPROJECT["tool"]["setuptools"]
    assert set(tools["packages"]) == set(on_disk)
    assert tools["package-dir"] == on_disk


def test_every_room_has_a_readme_that_names_its_files() -> None:
    for room in ROOMS:
        readme = (ROOT / room / "README.md").read_text()
        for module in sorted((ROOT / room).rglob("*.py")):
            if module.name == "__init__.py":
                continue
            # The files of a folder inside a room may be named by their folder.
            name = module.stem if module.parent == ROOT / room else f"{module.parent.name}/"
            assert name in readme, f"{room}/README.md does not mention {module.relative_to(ROOT)}"


def test_every_module_says_what_it_is_for() -> None:
    for room in ROOMS:
        for module in sorted((ROOT / room).rglob("*.py")):
            doc = ast.get_docstring(ast.parse(module.read_text()))
            assert doc and len(doc) > 40, f"{module.relative_to(ROOT)} has no module docstring to speak of"


def lint_imports(tree: Path) -> subprocess.CompletedProcess[str]:
    links = tree / ".check" / "pagemill"
    links.mkdir(parents=True, exist_ok=True)
    for room in ROOMS:
        if not (links / room).exists():
            (links / room).symlink_to(tree / room)
    tool = Path(sys.executable).parent / "lint-imports"
    return subprocess.run(
        [tool, "--no-cache", "--config", "pyproject.toml"],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree / ".check")},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("jobs/layout.py", "import torch"),
        ("jobs/layout.py", "import pagemill.engine.request"),
        ("engine/request.py", "import pagemill.jobs.layout"),
        ("engine/request.py", "import redis"),
        ("kernels/__init__.py", "import pagemill.engine.request"),
    ],
)
def test_an_import_that_climbs_a_floor_is_found_out(tmp_path: Path, module: str, line: str) -> None:
    for room in ROOMS:
        shutil.copytree(ROOT / room, tmp_path / room, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    with (tmp_path / module).open("a") as file:
        file.write(f"\n{line}\n")
    outcome = lint_imports(tmp_path)
    assert outcome.returncode != 0, outcome.stdout
    assert "BROKEN" in outcome.stdout


# What makes code of data: none of it may stand anywhere in a room.
RUNS_DATA = {
    "pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib",
    "eval", "exec", "compile", "torch.load", "yaml.load", "numpy.load", "np.load",
}  # fmt: skip
HARMLESS = {("kernels/compile.py", "compile")}  # it compiles kernels, by that name


def called(node: ast.AST) -> str:
    """The dotted name of a call's function, or of an imported module; "" for anything else."""
    if isinstance(node, ast.Call):
        return ast.unparse(node.func) if isinstance(node.func, ast.Name | ast.Attribute) else ""
    if isinstance(node, ast.ImportFrom):
        return (node.module or "").partition(".")[0]
    return node.name.partition(".")[0] if isinstance(node, ast.alias) else ""


def test_nothing_unpickles_and_no_model_brings_code() -> None:
    for room in ROOMS:
        for module in sorted((ROOT / room).rglob("*.py")):
            name = str(module.relative_to(ROOT))
            for node in ast.walk(ast.parse(module.read_text())):
                what = called(node)
                assert what not in RUNS_DATA or (name, what) in HARMLESS, f"{name} uses {what}"
                if isinstance(node, ast.keyword) and node.arg in ("trust_remote_code", "allow_pickle"):
                    assert isinstance(node.value, ast.Constant), f"{name}: {node.arg}"
                    assert node.value.value is False, f"{name}: {node.arg}"


def test_the_project_speaks_of_no_machine_of_its_makers() -> None:
    """No absolute path of a home or work folder may be committed."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    pattern = re.compile(r"(?<![\w.])/(?:work|home|root|Users)/\w+")
    for name in listed.split():
        path = ROOT / name
        if path.suffix in {".py", ".md", ".toml", ".sh", ".yaml", ".json", ".lua"} and path != Path(__file__):
            found = pattern.search(path.read_text(errors="replace"))
            assert not found, f"{name} names {found.group(0) if found else ''}"


def test_the_map_from_promises_to_tests_names_tests_that_are_there() -> None:
    text = (ROOT / "tests" / "README.md").read_text()
    path = ""
    rooms = "jobs|worker|engine|infra|kernels"
    for name in re.findall(rf"`((?:{rooms})/(?:\w+/)*test_\w+\.py(?:::\w+)?|::\w+)`", text):
        here, _, test = name.partition("::")
        path = here or path
        file = ROOT / "tests" / path
        assert file.is_file(), f"tests/README.md names {path}"
        assert not test or f"def {test}(" in file.read_text(), f"{path} has no {test}"
