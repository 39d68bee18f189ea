"""Flags over variables over defaults; a value that cannot be meant is named with the place it came from."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagemill.jobs.errors import UsageError
from pagemill.jobs.settings import ClientSettings


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("REDIS_URL", "STORE", "S3_ENDPOINT", "S3_REGION", "S3_ACCESS_KEY", "S3_SECRET_KEY"):
        monkeypatch.delenv(f"PAGEMILL_{name}", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


def test_the_defaults_are_one_redis_and_one_folder_a_user(tmp_path: Path) -> None:
    settings = ClientSettings.load()
    assert settings.redis_url == "redis://localhost:6379/0"
    assert settings.store == str(tmp_path / ".pagemill" / "store")


def test_a_flag_goes_over_a_variable_and_a_variable_over_a_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEMILL_STORE", "s3://from/variable")
    monkeypatch.setenv("PAGEMILL_REDIS_URL", "")  # empty is unset
    assert ClientSettings.load(store=None).store == "s3://from/variable"
    assert ClientSettings.load(store="/from/flag").store == "/from/flag"
    assert ClientSettings.load().redis_url == "redis://localhost:6379/0"


def test_the_store_gets_its_options_and_no_secret_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEMILL_S3_ENDPOINT", "http://minio:9000")
    monkeypatch.setenv("PAGEMILL_S3_ACCESS_KEY", "me")
    monkeypatch.setenv("PAGEMILL_S3_SECRET_KEY", "hush")
    monkeypatch.setenv("PAGEMILL_S3_PATH_STYLE", "true")
    settings = ClientSettings.load(s3_region="eu-x")
    options = settings.storage_options()
    assert (options.endpoint, options.region, options.path_style) == ("http://minio:9000", "eu-x", True)
    assert (options.access_key, options.secret_key) == ("me", "hush")
    assert "hush" not in repr(settings) + repr(options)


@pytest.mark.parametrize(
    ("variable", "value"),
    [("S3_PATH_STYLE", "perhaps"), ("S3_CHECKSUMS", "sometimes"), ("REDIS_URL", "localhost:6379")],
)
def test_a_variable_that_makes_no_sense_is_named(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(f"PAGEMILL_{variable}", value)
    with pytest.raises(UsageError, match=f"PAGEMILL_{variable}"):
        ClientSettings.load()


def test_a_flag_that_makes_no_sense_is_named_and_its_password_kept() -> None:
    with pytest.raises(UsageError, match="--redis-url") as caught:
        ClientSettings.load(redis_url="http://me:hush@host:1")
    assert "hush" not in str(caught.value)
