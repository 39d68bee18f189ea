"""What an S3 server or boto3 says, turned into one sentence that tells how to mend it.

Codes and status numbers come from Amazon's list of errors and from what other servers were seen to send.
This room may not know how requests are made. It never repeats a server's own words, which can hold parts
of the request; the code is enough to look them up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectTimeoutError,
    CredentialRetrievalError,
    EndpointConnectionError,
    FlexibleChecksumError,
    HTTPClientError,
    IncompleteReadError,
    NoCredentialsError,
    ParamValidationError,
    PartialCredentialsError,
    ProfileNotFound,
    ProxyConnectionError,
    SSLError,
    TokenRetrievalError,
)

from pagemill.jobs.errors import DiskFull, ObjectNotFound, PreconditionFailed, StorageError


class Unreachable(StorageError):
    """Nobody answers at the endpoint."""


class UploadLost(StorageError):
    """The server no longer knows a multi-part upload, and no object came of it."""


class NotConditional(StorageError):
    """The server knows no put-if-absent."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where it went wrong. server: for people, "the S3 server at http://…" or "Amazon S3"."""

    server: str
    bucket: str
    url: str


_KEYS = "check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or PAGEMILL_S3_ACCESS_KEY and _SECRET_KEY)"
_WRONG_KEYS: Final = {
    "InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "ExpiredToken", "TokenRefreshRequired",
    "InvalidSecurity", "NotSignedUp", "UnrecognizedClientException", "Unauthorized", "401",
}  # fmt: skip
_DENIED: Final = {"AccessDenied", "AllAccessDisabled", "AccountProblem", "403", "Forbidden"}
_ELSEWHERE: Final = {
    "PermanentRedirect", "TemporaryRedirect", "AuthorizationHeaderMalformed", "InvalidRegion",
    "IllegalLocationConstraintException", "301", "307",
}  # fmt: skip
_FULL: Final = {
    "XMinioStorageFull", "InsufficientStorage", "QuotaExceeded", "XMinioAdminBucketQuotaExceeded", "507",
    "EntityTooLargeForQuota", "StorageFull", "NoSpaceLeft",
}  # fmt: skip
_AGAIN: Final = {
    "ConditionalRequestConflict", "OperationAborted", "SlowDown", "ServiceUnavailable", "InternalError",
    "RequestTimeout", "RequestTimeoutException", "Throttling", "ThrottlingException", "TooManyRequests",
    "RequestLimitExceeded", "BandwidthLimitExceeded", "BadDigest", "InvalidDigest",
    "XAmzContentSHA256Mismatch", "IncompleteBody", "429", "409",
}  # fmt: skip


def explain(error: ClientError | BotoCoreError, action: str, place: Place) -> StorageError:
    """The error to raise for this one. action: what was tried, as in "write jobs/x/plan.json"."""
    if isinstance(error, ClientError):
        answer = error.response.get("Error", {})
        status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        return _of_answer(str(answer.get("Code", "")), status, str(answer.get("Region", "")), action, place)
    return _of_client(error, action, place)


def no_s3(action: str, answer: str, place: Place) -> StorageError:
    """What answers there is something else. answer: for people, as in "status 405"."""
    return StorageError(
        f"Could not {action} in {place.url}: {place.server} gave {answer}, as no S3 server does: check that"
        " PAGEMILL_S3_ENDPOINT is the address and port of one."
    )


def _the(place: Place) -> str:
    """The server at the start of a sentence."""
    return place.server[0].upper() + place.server[1:]


def _of_answer(code: str, status: int, region: str, action: str, place: Place) -> StorageError:
    could_not = f"Could not {action} in {place.url}"
    if code in ("PreconditionFailed", "412") or status == 412:
        return PreconditionFailed(f"{could_not}: the object there is not as expected.")
    if code == "NoSuchBucket":
        return StorageError(
            f"There is no bucket {place.bucket!r} on {place.server}: create it, or correct the storage URL."
        )
    if code == "NoSuchUpload":
        return UploadLost(f"{could_not}: the server dropped the upload; try again.", transient=True)
    # An S3 server puts a code into what it refuses; a HEAD, which has no body, is given its status as one.
    if (not code or code == str(status)) and action.startswith("write") and status in (400, 404, 405):
        return no_s3(action, f"status {status} and no code", place)
    if code in ("NoSuchKey", "404") or status == 404:
        return ObjectNotFound(f"{could_not}: there is no such object.")
    if code in _WRONG_KEYS:
        return StorageError(
            f"{_the(place)} refused the credentials for bucket {place.bucket!r} ({code}): {_KEYS}."
        )
    if code == "RequestTimeTooSkewed":
        return StorageError(f"{_the(place)} has another time than this machine: set the clock right.")
    if code in _DENIED or status == 403:
        return StorageError(
            f"{_the(place)} denied access: could not {action} in {place.url}; {_KEYS}, and what they may do"
            " (get, put, list and delete objects of this bucket)."
        )
    if code in _ELSEWHERE or status in (301, 307):
        hint = f"it is in {region!r}" if region else "it is in another one"
        return StorageError(
            f"{_the(place)} does not serve bucket {place.bucket!r} in this region: {hint}; set"
            " PAGEMILL_S3_REGION (and PAGEMILL_S3_ENDPOINT where the server is not Amazon's)."
        )
    return _of_status(code, status, could_not, place)


def _of_status(code: str, status: int, could_not: str, place: Place) -> StorageError:
    if code in _FULL or status == 507:
        return DiskFull(
            f"{could_not}: {place.server} is full ({code}); make room there, and the job goes on."
        )
    if code == "NotImplemented" or status == 501:
        return NotConditional(f"{could_not}: {place.server} does not know this kind of request.")
    again = code in _AGAIN or status >= 500 or status in (408, 409, 425, 429)
    said = f"{code or 'no code'}, status {status}"
    return StorageError(
        f"{could_not}: {place.server} answered {said}{'' if again else '; look the code up in its manual'}.",
        transient=again,
    )


def _of_client(error: BotoCoreError, action: str, place: Place) -> StorageError:
    if isinstance(error, PartialCredentialsError):
        return StorageError(f"Only one half of the credentials for {place.server} was found: {_KEYS}.")
    if isinstance(error, (NoCredentialsError, CredentialRetrievalError, TokenRetrievalError)):
        return StorageError(
            f"No credentials for {place.server} were found: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY."
        )
    if isinstance(error, ProfileNotFound):
        return StorageError(
            "AWS_PROFILE names a profile that ~/.aws/config does not have: correct or unset it."
        )
    if isinstance(error, SSLError):
        return StorageError(
            f"{_the(place)} does not speak TLS as expected: write http:// in the endpoint where it speaks"
            " none, or point AWS_CA_BUNDLE at its certificate authority."
        )
    if isinstance(error, ParamValidationError):
        return StorageError(f"Could not {action} in {place.url}: the bucket's name cannot be one.")
    if isinstance(error, (EndpointConnectionError, ConnectTimeoutError, ProxyConnectionError)):
        return Unreachable(
            f"Nobody answers at {place.server}: check that it runs, the endpoint and the network.",
            transient=True,
        )
    if not isinstance(error, (HTTPClientError, FlexibleChecksumError, IncompleteReadError)):
        return StorageError(f"Could not {action} in {place.url}: boto3 failed with {type(error).__name__}.")
    what = (
        "arrived damaged"
        if isinstance(error, FlexibleChecksumError)
        else "broke off; where it always does, no S3 server listens there: check PAGEMILL_S3_ENDPOINT"
    )
    return StorageError(
        f"Could not {action} in {place.url}: the exchange with {place.server} {what}.", transient=True
    )
