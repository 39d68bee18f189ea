"""Make the bucket of PAGEMILL_STORE where it is not there yet; waits for the S3 server while it starts.

    python infra/bucket.py

It reads the same settings as every worker, so it needs no client of the server's own. Amazon's S3 is told the
region too.
"""

from __future__ import annotations

import sys
import time
from urllib.parse import urlsplit

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from pagemill.jobs.errors import PagemillError
from pagemill.jobs.settings import ClientSettings

PATIENCE_S = 60.0
PAUSE_S = 1.0


def make_bucket(settings: ClientSettings, patience_s: float = PATIENCE_S) -> str:
    """The bucket's name. Raises the server's refusal when it is not there after `patience_s`."""
    parts = urlsplit(settings.store)
    if parts.scheme != "s3":
        raise PagemillError(
            f"PAGEMILL_STORE is {settings.store}, which has no bucket; write s3://bucket/prefix."
        )
    options = settings.storage_options()
    client = boto3.client(
        "s3",
        endpoint_url=options.endpoint,
        region_name=options.region,
        aws_access_key_id=options.access_key,
        aws_secret_access_key=options.secret_key,
        config=Config(connect_timeout=5, read_timeout=10, retries={"total_max_attempts": 1}),
    )
    place = {}
    if options.endpoint is None and options.region not in (None, "us-east-1"):
        place = {"CreateBucketConfiguration": {"LocationConstraint": options.region}}
    deadline = time.monotonic() + patience_s
    try:
        while True:
            try:
                client.create_bucket(Bucket=parts.netloc, **place)
                return parts.netloc
            except (ClientError, BotoCoreError) as error:
                code = error.response["Error"].get("Code") if isinstance(error, ClientError) else ""
                if code in ("BucketAlreadyOwnedByYou", "BucketAlreadyExists"):
                    return parts.netloc
                if time.monotonic() > deadline:
                    raise
            time.sleep(PAUSE_S)
    finally:
        client.close()


if __name__ == "__main__":
    try:
        print(make_bucket(ClientSettings.load()))
    except (PagemillError, ClientError, BotoCoreError) as error:
        sys.exit(f"pagemill: {error}")
