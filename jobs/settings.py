"""Where the client finds Redis and the store: flags, then PAGEMILL_* variables, then a file, then defaults.

    PAGEMILL_REDIS_URL           redis://localhost:6379/0 (rediss:// for TLS, unix:///path for a socket)
    PAGEMILL_STORE               ~/.pagemill/store (s3://bucket/prefix, file:///folder or a folder)
    PAGEMILL_S3_ENDPOINT         for anything but Amazon's S3, with its scheme: http://minio:9000
    PAGEMILL_S3_REGION           the bucket's region
    PAGEMILL_S3_ACCESS_KEY       unset: whatever boto3 finds (AWS_* variables, ~/.aws, instance roles)
    PAGEMILL_S3_SECRET_KEY
    PAGEMILL_S3_PATH_STYLE       true: bucket in the path, false: in the host name, unset: by the endpoint
    PAGEMILL_S3_CHECKSUMS        when_required or when_supported
    PAGEMILL_S3_ACCEPT_NO_CONDITIONAL_WRITES
                                 true: take a store without put-if-absent, with Redis as the only guard
    PAGEMILL_CONFIG              the file (settings_file.py); else ~/.pagemill/config.toml

The default store is one folder per user rather than one per working directory, so that a client and a worker
started from different directories of one machine meet. Machines that share work must name a store that all of
them reach. This room may not know how either address is spoken to.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, SecretStr, ValidationError, field_validator
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from pagemill.jobs.errors import UsageError
from pagemill.jobs.redaction import secrets_of, without_password
from pagemill.jobs.settings_file import config_path, read_config
from pagemill.jobs.storage import StorageOptions
from pagemill.jobs.wrong_value import wrong_value

REDIS_SCHEMES = ("redis://", "rediss://", "unix://")
ADDRESSES = frozenset({"redis_url", "store", "s3_endpoint"})  # a password may be in them
DEFAULT_REDIS_URL = "redis://localhost:6379/0"


def default_store() -> str:
    """The folder used when nobody names a store."""
    try:
        return str(Path.home() / ".pagemill" / "store")
    except RuntimeError as error:  # a container's user that no passwd file knows
        raise UsageError(
            "This user has no home folder; name a store with --store or PAGEMILL_STORE."
        ) from error


class ClientSettings(BaseSettings):
    """Addresses and credentials. The worker's settings extend these, so both sides read the same names."""

    model_config = SettingsConfigDict(
        env_prefix="PAGEMILL_", env_ignore_empty=True, extra="ignore", frozen=True
    )

    redis_url: str = DEFAULT_REDIS_URL
    store: str = Field(default_factory=default_store)
    s3_endpoint: str | None = None
    s3_region: str | None = None
    s3_access_key: SecretStr | None = None
    s3_secret_key: SecretStr | None = None
    s3_path_style: bool | None = None
    s3_checksums: Literal["when_required", "when_supported"] | None = None
    s3_accept_no_conditional_writes: bool = False

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """The order, once and for everybody: flags, variables, file; then the defaults."""
        return init_settings, env_settings, InitSettingsSource(settings_cls, cls.from_file())

    @classmethod
    def from_file(cls) -> dict[str, Any]:
        """What the file says to this kind of settings."""
        return read_config(set(cls.model_fields), None)

    @field_validator("redis_url")
    @classmethod
    def _speaks_redis(cls, url: str) -> str:
        if not url.startswith(REDIS_SCHEMES):
            raise ValueError(
                f"{without_password(url)!r} is not a Redis address; write redis://host:6379/0, rediss://… or unix:///path"
            )
        return url

    @classmethod
    def load(cls, **overrides: Any) -> Self:
        """Settings with flags on top: an override of None means "not given".

        Raises UsageError, naming the variable or the flag, for a value that cannot be meant.
        """
        given = {name: value for name, value in overrides.items() if value is not None}
        try:
            return cls(**given)
        except ValidationError as error:
            label = partial(_label, given=set(given), in_file=set(cls.from_file()))
            raise UsageError(wrong_value(error, cls, label, hidden=ADDRESSES) + ".") from None

    def secrets(self) -> set[str]:
        """What no log may hold."""
        keys = {key.get_secret_value() for key in (self.s3_secret_key,) if key}
        return keys | secrets_of(self.redis_url, self.store, self.s3_endpoint)

    def storage_options(self) -> StorageOptions:
        """What `open_storage` needs besides the address."""
        return StorageOptions(
            endpoint=self.s3_endpoint,
            region=self.s3_region,
            access_key=self.s3_access_key.get_secret_value() if self.s3_access_key else None,
            secret_key=self.s3_secret_key.get_secret_value() if self.s3_secret_key else None,
            path_style=self.s3_path_style,
            checksums=self.s3_checksums,
            accept_no_conditional_writes=self.s3_accept_no_conditional_writes,
        )


def _label(name: str, given: set[str], in_file: set[str]) -> str:
    """Where a setting came from, as whoever gave it wrote it."""
    variable = f"PAGEMILL_{name.upper()}"
    if name in given:
        return f"--{name.replace('_', '-')}"
    if name in in_file and not os.environ.get(variable):
        return f"{config_path()}: {name}"
    return variable
