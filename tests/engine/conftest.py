"""Puts the fakes of tests/engine/support within reach of every test of the engine."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "support"))
