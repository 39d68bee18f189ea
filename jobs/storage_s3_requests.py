"""Requests to one bucket: the boto3 client, how long to be patient, and errors as sentences.

boto3's own retries are off, because whoever writes must know whether an earlier try may have arrived
(storage_s3_write.py). This room may not know what the objects are for.
"""

from __future__ import annotations

import copy
import random
import re
import time
from collections.abc import Callable
from functools import cache
from typing import Any, BinaryIO, Final, Self
from urllib.parse import urlsplit

import boto3
import botocore.session
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from botocore.loaders import Loader, create_loader

from pagemill.jobs.errors import StorageError
from pagemill.jobs.storage import Checksums, StorageOptions
from pagemill.jobs.storage_s3_faults import Place, Unreachable, UploadLost, explain, no_s3

RETRY_DELAYS: Final = (0.1, 0.3, 0.8, 1.5, 3.0, 5.0, 8.0)
"""About twenty seconds in all; a store that is away for longer blocks the job and does not end it."""
CHECK_TRIES: Final = 3
_TAGGED: Final = {"put_object", "get_object", "head_object", "upload_part", "complete_multipart_upload"}
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,62}")


class Requests:
    """Safe for threads, as boto3's clients are. Nothing is contacted before the first request."""

    def __init__(
        self, bucket: str, options: StorageOptions, delays: tuple[float, ...] = RETRY_DELAYS
    ) -> None:
        if not _BUCKET.fullmatch(bucket):
            raise StorageError(
                f"{bucket!r} cannot be the name of a bucket: write s3://bucket/prefix, and give the server's"
                " address as PAGEMILL_S3_ENDPOINT."
            )
        if options.endpoint is not None:
            _check_endpoint(options.endpoint)
        server = f"the S3 server at {options.endpoint}" if options.endpoint else "Amazon S3"
        self.bucket = bucket
        self.place = Place(server, bucket, f"s3://{bucket}")
        self.delays = delays
        self.checksums: Checksums = options.checksums or (
            "when_required" if options.endpoint else "when_supported"
        )
        self._answered = False
        # Any: the types of boto3's S3 client are a package of their own.
        self._client: Any = _client(options, self.checksums, self.place)

    def hurried(self) -> Self:
        """The same with little patience, for when a person waits."""
        other = copy.copy(self)
        other.delays = self.delays[: CHECK_TRIES - 1]
        return other

    def once(
        self, action: str, operation: str, body: Callable[[], BinaryIO] | None = None, **parameters: Any
    ) -> dict[str, Any]:
        """One request, without a second try. action: for people, as in "write jobs/x/plan.json"."""
        send = getattr(self._client, operation)
        try:
            if body is None:
                answer: dict[str, Any] = send(Bucket=self.bucket, **parameters)
            else:
                with body() as stream:
                    answer = send(Bucket=self.bucket, Body=stream, **parameters)
        except ClientError as error:
            self._answered = True
            raise explain(error, action, self.place) from error
        except BotoCoreError as error:
            raise explain(error, action, self.place) from error
        if operation in _TAGGED and "ETag" not in answer:
            raise no_s3(action, "an answer without an ETag", self.place)
        self._answered = True
        return answer

    def call(
        self, action: str, operation: str, body: Callable[[], BinaryIO] | None = None, **parameters: Any
    ) -> dict[str, Any]:
        """One request, repeated while that can help; `body` opens what is sent, anew for each try."""
        for attempt, delay in enumerate(self.delays):
            try:
                return self.once(action, operation, body, **parameters)
            except UploadLost:
                raise
            except StorageError as fault:
                # An endpoint that never answered is more likely mistyped than away: say so soon.
                hopeless = isinstance(fault, Unreachable) and not self._answered and attempt >= 2
                if not fault.transient or hopeless:
                    raise
            time.sleep(delay * random.uniform(0.6, 1.0))
        return self.once(action, operation, body, **parameters)


def _check_endpoint(endpoint: str) -> None:
    parts = urlsplit(endpoint)
    if "@" in endpoint:
        raise StorageError(
            "The S3 endpoint holds credentials: leave them out, and use AWS_ACCESS_KEY_ID and"
            " AWS_SECRET_ACCESS_KEY."
        )
    if "://" not in endpoint:
        raise StorageError(
            f"The S3 endpoint {endpoint!r} has no scheme: write http://{endpoint}, or"
            f" https://{endpoint} where the server speaks TLS."
        )
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise StorageError(f"The S3 endpoint {endpoint!r} is no http:// or https:// address.")


@cache
def _loader() -> Loader:
    """boto3's description of S3, which takes longer to read than all else here; the rest is per client."""
    return create_loader()


def _client(options: StorageOptions, checksums: Checksums, place: Place) -> Any:
    if bool(options.access_key) != bool(options.secret_key):
        raise StorageError("Only one half of the S3 credentials was given: give access key and secret key.")
    custom = options.endpoint is not None
    path_style = custom if options.path_style is None else options.path_style
    try:
        core = botocore.session.get_session()
        core.register_component("data_loader", _loader())
        session = boto3.session.Session(botocore_session=core)
        return session.client(
            "s3",
            endpoint_url=options.endpoint,
            region_name=options.region or session.region_name or "us-east-1",
            aws_access_key_id=options.access_key,
            aws_secret_access_key=options.secret_key,
            config=Config(
                signature_version="s3v4",
                s3={"addressing_style": "path" if path_style else "virtual" if custom else "auto"},
                request_checksum_calculation=checksums,
                response_checksum_validation=checksums,
                retries={"total_max_attempts": 1, "mode": "standard"},
                connect_timeout=5,
                read_timeout=60,
                tcp_keepalive=True,
                max_pool_connections=32,
            ),
        )
    except BotoCoreError as error:
        raise explain(error, "connect", place) from error
    except ValueError as error:  # boto3's word for an endpoint or a region that cannot be one
        where = f"{options.endpoint or 'Amazon'}, {options.region or 'no region'}"
        raise StorageError(f"boto3 refuses this S3 endpoint or region: {where}.") from error
