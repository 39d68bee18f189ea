"""What the engine's process is told about threads."""

from __future__ import annotations

import pytest

from pagemill.worker.threads import thread_variables


def test_the_engine_spins_briefly_for_work_unless_the_operator_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    assert thread_variables(None) == {"GOMP_SPINCOUNT": "30000"}
    assert thread_variables(3) == {"OMP_NUM_THREADS": "3", "GOMP_SPINCOUNT": "30000"}
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert thread_variables(None) == {}
