"""A store of a test's own as seen through a server that fails on demand."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from faults.s3_proxy import FaultyS3

from pagemill.jobs.storage_s3 import S3Storage

if TYPE_CHECKING:
    from conftest import S3

PART = 5 << 20
QUICK = (0.01,) * 4


def through(faulty: FaultyS3, s3: S3, **options: Any) -> S3Storage:
    """The test's prefix as seen through the faulty server."""
    changed = replace(s3.options, endpoint=faulty.endpoint, **options)
    return S3Storage(s3.bucket, s3.prefix, changed, part_bytes=PART, delays=QUICK)
