"""infra/bucket.py makes the bucket, may do so again, and waits for a server that is starting."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

from pagemill.jobs.storage import open_storage

SCRIPT = Path(__file__).resolve().parents[2] / "infra" / "bucket.py"


def run(**settings: str) -> subprocess.CompletedProcess[str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith("PAGEMILL_")}
    return subprocess.run(
        [sys.executable, str(SCRIPT)], env=own | settings, capture_output=True, text=True, timeout=120
    )


def test_the_bucket_is_there_afterwards_and_once_more(s3: Any, monkeypatch: Any) -> None:
    bucket = f"made-{uuid.uuid4().hex[:10]}"
    settings = s3.variables() | {"PAGEMILL_STORE": f"s3://{bucket}/prefix"}
    for _ in range(2):
        ended = run(**settings)
        assert (ended.returncode, ended.stdout.strip()) == (0, bucket), ended.stderr
    open_storage(f"s3://{bucket}/prefix", s3.options).check()


def test_a_folder_has_no_bucket() -> None:
    ended = run(PAGEMILL_STORE="/tmp/store")
    assert ended.returncode == 1
    assert ended.stderr.startswith("pagemill: PAGEMILL_STORE is /tmp/store")
