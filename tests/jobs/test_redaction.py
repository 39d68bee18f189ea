"""Passwords and keys do not reach what people read, whatever shape they come in."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagemill.jobs.cli import main
from pagemill.jobs.redaction import Redactor, secrets_of, without_password

PASSWORDS = st.text(
    st.characters(codec="ascii", categories=["L", "N", "P", "S"]), min_size=4, max_size=20
).filter(lambda text: not set(text) & set("\"'@/?#&%: "))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("redis://me:hush@host:6379/0", "redis://***@host:6379/0"),
        ("redis://:hu/sh@host:6379/0", "redis://***@host:6379/0"),
        ("at rediss://me:a@hush@host/0, and http://x:hush@y", "at rediss://***@host/0, and http://***@y"),
        ("unix:///run/redis.sock?db=1&password=hush", "unix:///run/redis.sock?db=1&password=***"),
        ("redis://host/0?ssl_password=hush&db=2", "redis://host/0?ssl_password=***&db=2"),
        ("s3://bucket/prefix and me@example.org", "s3://bucket/prefix and me@example.org"),
    ],
)
def test_a_url_is_shown_without_its_password(text: str, shown: str) -> None:
    assert without_password(text) == shown


@given(
    PASSWORDS, st.sampled_from(["redis://me:{}@host/0", "redis://host/0?password={}", "https://u:{}@s3:9000"])
)
def test_what_a_url_keeps_secret_is_found_wherever_it_turns_up(password: str, url: str) -> None:
    secrets = secrets_of(url.format(password), env={})
    assert password in secrets
    told = Redactor(secrets)(f"it said <{password}> and {url.format(password)}")
    assert told.startswith("it said <***> and ")


def test_the_values_of_well_known_variables_are_secret() -> None:
    env = {
        "AWS_SECRET_ACCESS_KEY": "wJalr/EXAMPLE+KEY",
        "HF_TOKEN": "hf_abc",
        "AWS_SESSION_TOKEN": "",
        "PATH": "/bin",
    }
    assert secrets_of(None, "redis://host", env=env) == {"wJalr/EXAMPLE+KEY", "hf_abc"}
    assert Redactor(["wJalr/EXAMPLE+KEY", "abc", ""])("key wJalr/EXAMPLE+KEY, abc") == "key ***, abc"


@pytest.mark.parametrize("debug", ["", "1"])
@pytest.mark.parametrize(
    "url",
    ["redis://me:hushhush@127.0.0.1:1/0", "redis://127.0.0.1:1/0?password=hushhush", "http://:hushhush@x:1"],
)
def test_a_command_that_fails_says_no_password(
    url: str, debug: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PAGEMILL_DEBUG", debug)
    monkeypatch.setattr("pagemill.jobs.options.PATIENCE_S", 0.1)
    assert main(["list", "--redis-url", url]) != 0
    said = capsys.readouterr()
    assert "hushhush" not in said.out + said.err
    assert "pagemill: " in said.err
