"""A state of its own for each test on the shared Redis: the prefix of its keys is fresh."""

from __future__ import annotations

import sys
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from pagemill.jobs.state import State

sys.path.insert(0, str(Path(__file__).parent / "support"))


@pytest.fixture
async def state(redis_url: str) -> AsyncIterator[State]:
    opened = await State.connect(redis_url, prefix=f"test-{uuid.uuid4().hex[:12]}")
    yield opened
    await opened.close()
