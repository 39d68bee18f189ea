"""A real browser for tests of pages, where this machine has one: its pixels and its layout."""

from __future__ import annotations

import json
import re
import shutil
import struct
import subprocess
import zlib
from collections import Counter
from html import escape, unescape
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
    _run(folder, _scheme(dark), f"--window-size={width},{height}", f"--screenshot={picture}", page.as_uri())
    return pixels(picture)


def document(page: Path, folder: Path) -> str:
    """The page as the browser understood it."""
    return _run(folder, "--dump-dom", page.as_uri())


def layout_faults(page: Path, folder: Path, *, width: int) -> list[str]:
    """What sticks out, lies over something, is too small to read or is lost in print; [] is fine.

    width: of the window, in pixels. The page forbids scripts of its own, so it is measured from without, in a
    frame; and a frame can be narrower than the 500 pixels that a browser's window has at least.
    """
    frame = folder / f"{page.stem}-{width}.html"
    measure = Path(__file__).with_name("layout_faults.js").read_text()
    frame.write_text(
        f'<!doctype html><meta charset="utf-8"><script>{measure}</script>'
        f'<iframe style="width:{width}px;height:900px;border:0" srcdoc="{escape(page.read_text())}"></iframe>'
        '<script>onload = () => {document.body.innerHTML = "<pre></pre>"; '
        "document.body.firstChild.textContent = JSON.stringify(found)};"
        "document.querySelector('iframe').onload = e => {found = faults(e.target.contentDocument)}</script>"
    )
    drawn = _run(folder, f"--window-size={max(500, width)},900", "--dump-dom", frame.as_uri())
    told = re.search(r"<pre>(.*)</pre>", drawn, re.DOTALL)
    assert told is not None, drawn
    found: list[str] = json.loads(unescape(told[1]))
    return found


def _scheme(dark: bool) -> str:
    return f"--blink-settings=preferredColorScheme={0 if dark else 1}"


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
