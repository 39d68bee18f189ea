"""A real browser for tests of pages, where this machine has one; and the pixels of what it drew."""

from __future__ import annotations

import shutil
import struct
import subprocess
import zlib
from collections import Counter
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip
Pixel = tuple[int, int, int]


def screenshot(page: Path, folder: Path, *, dark: bool, size: tuple[int, int]) -> list[list[Pixel]]:
    """What the browser draws of a page, as rows of pixels. Skips the test where there is no browser."""
    picture = folder / f"{page.stem}-{'dark' if dark else 'light'}.png"
    width, height = size
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    _run(folder, scheme, f"--window-size={width},{height}", f"--screenshot={picture}", page.as_uri())
    return pixels(picture)


def document(page: Path, folder: Path) -> str:
    """The page as the browser understood it."""
    return _run(folder, "--dump-dom", page.as_uri())


def _run(folder: Path, *words: str) -> str:
    browser = next(filter(None, map(shutil.which, NAMES)), None)
    if browser is None:
        pytest.skip("no Chromium here: apt-get install chromium")
    command = [browser, *FLAGS, f"--user-data-dir={folder / 'profile'}", *words]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def colours(rows: list[list[Pixel]]) -> Counter[Pixel]:
    return Counter(pixel for row in rows for pixel in row)


def pixels(path: Path) -> list[list[Pixel]]:
    """A PNG of 8-bit RGB or RGBA, not interlaced (PNG specification, sections 5 and 9)."""
    data, at, packed = path.read_bytes(), 8, b""
    width = height = depth = 0
    while at < len(data):
        (length,), kind = struct.unpack(">I", data[at : at + 4]), data[at + 4 : at + 8]
        body = data[at + 8 : at + 8 + length]
        if kind == b"IHDR":
            width, height, bits, colour, _, _, interlaced = struct.unpack(">IIBBBBB", body)
            assert (bits, interlaced) == (8, 0)
            depth = {2: 3, 6: 4}[colour]
        elif kind == b"IDAT":
            packed += body
        at += 12 + length
    raw, stride = zlib.decompress(packed), width * depth
    before, rows = bytearray(stride), []
    for number in range(height):
        start = number * (stride + 1)
        line = bytearray(raw[start + 1 : start + 1 + stride])
        _unfilter(raw[start], line, before, depth)
        rows.append([(line[i], line[i + 1], line[i + 2]) for i in range(0, stride, depth)])
        before = line
    return rows


def _unfilter(kind: int, line: bytearray, above: bytearray, depth: int) -> None:
    for i in range(len(line) if kind else 0):
        left = line[i - depth] if i >= depth else 0
        corner = above[i - depth] if i >= depth else 0
        guess = (0, left, above[i], (left + above[i]) // 2, _paeth(left, above[i], corner))[kind]
        line[i] = (line[i] + guess) & 255


def _paeth(left: int, up: int, corner: int) -> int:
    estimate = left + up - corner
    return min((left, up, corner), key=lambda value: abs(estimate - value))
