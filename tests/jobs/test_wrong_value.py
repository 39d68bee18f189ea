"""What is said about a value that a setting or a field of a job cannot have."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, field_validator

from pagemill.jobs.errors import UsageError
from pagemill.jobs.settings import ClientSettings
from pagemill.jobs.spec import JobSpec
from pagemill.jobs.wrong_value import wrong_value
from pagemill.worker.settings import WorkerSettings


class Sample(BaseModel):
    model_config = ConfigDict(extra="forbid")

    kind: Literal["auto", "one", "two"] = "auto"
    only: Literal["int8"] | None = None
    share: float = Field(1.0, gt=0)
    limited: float = Field(1.0, gt=0, le=8)
    slots: int = Field(1, ge=1, le=64)
    many: Annotated[int, Field(ge=0)] | None = None
    few: int = Field(0, le=5000)
    free: int = 0
    quick: bool = False
    name: str = Field("x", min_length=1)
    short: str = Field("x", min_length=1, max_length=4)
    names: tuple[str, ...] = ()
    key: SecretStr | None = None
    place: str = "here"
    own: str = ""

    @field_validator("own")
    @classmethod
    def _own(cls, value: str) -> str:
        if value == "bad":
            raise ValueError("says what it wants")
        return value


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("kind", "three", 'kind must be auto, one or two, not "three"'),
        ("only", "int4", 'only must be int8 or left out, not "int4"'),
        ("share", -1, "share must be a number above 0, not -1"),
        ("share", "much", 'share must be a number above 0, not "much"'),
        ("limited", 9, "limited must be a number above 0 and up to 8, not 9"),
        ("slots", 65, "slots must be a whole number from 1 to 64, not 65"),
        ("slots", "1.5", 'slots must be a whole number from 1 to 64, not "1.5"'),
        ("many", -1, "many must be a whole number, 0 or more, not -1"),
        ("few", 6000, "few must be a whole number, 5,000 or less, not 6000"),
        ("free", None, "free must be a whole number, not null"),
        ("quick", "perhaps", 'quick must be true or false, not "perhaps"'),
        ("name", "", 'name must be a text that is not empty, not ""'),
        ("short", "x" * 99, f'short must be a text of 1 to 4 characters, not "{"x" * 36}..."'),
        ("names", 5, "names must be a list of texts, not 5"),
        ("key", 5, "key must be a text"),
        ("place", 5, "place must be a text"),
        ("own", "bad", "own: says what it wants"),
        ("what", 1, "what is not known here"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_allowed(field: str, value: Any, said: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Sample(**{field: value})
    assert wrong_value(caught.value, Sample, hidden=frozenset({"place"})) == said


def test_what_is_missing_is_named() -> None:
    with pytest.raises(ValidationError) as caught:
        JobSpec.model_validate({"job": "job-1"})
    assert wrong_value(caught.value, JobSpec, str.upper) == "MODEL is missing"


JOB = {
    "job": "job-1",
    "model": "m",
    "created_at": 1.0,
    "seed": 1,
    "input": {"key": "k", "size": 1, "etag": "e"},
}


@pytest.mark.parametrize(("settings", "others"), [(ClientSettings, {}), (WorkerSettings, {}), (JobSpec, JOB)])
def test_no_field_of_ours_is_spoken_of_in_the_words_of_a_library(
    settings: type[BaseModel], others: dict[str, Any]
) -> None:
    """A new field whose kind has no words yet is found by this."""
    looked_at = 0
    for name in settings.model_fields.keys() - {"input"}:
        with pytest.raises((ValidationError, UsageError)) as caught:
            settings(**{**others, name: object()})
        if isinstance(caught.value, ValidationError):
            said = wrong_value(caught.value, settings)
            assert re.match(rf"{name} must be an? |{name} must be [a-z]|{name}: must be ", said), said
            assert "Input" not in said
            looked_at += 1
    assert looked_at > len(settings.model_fields) / 2
