"""Options that several commands share, and how their values are read: the same words mean the same
everywhere.

This room knows what people type and may not know what is done with it.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Annotated, Any

import typer

from pagemill.jobs.client import Client
from pagemill.jobs.errors import UsageError
from pagemill.jobs.inputs import Prompts
from pagemill.jobs.settings import ClientSettings
from pagemill.jobs.terms import When

PATIENCE_S = 3.0  # for a Redis that does not answer; somebody sits and waits
TABLES = "Which column of a table is the prompt"
CONNECTION = "Where Redis and the store are"
SAMPLING = "Sampling, for rows that set none"


def _connection(flag: str, metavar: str, text: str) -> Any:
    return typer.Option(flag, metavar=metavar, help=text, rich_help_panel=CONNECTION, show_default=False)


RedisUrl = Annotated[
    str | None,
    _connection(
        "--redis-url", "URL", "redis://host:6379/0, rediss://… or unix:///path. Else PAGEMILL_REDIS_URL."
    ),
]
Store = Annotated[
    str | None,
    _connection(
        "--store", "URL", "s3://bucket/prefix or a folder. Else PAGEMILL_STORE, or ~/.pagemill/store."
    ),
]
Endpoint = Annotated[
    str | None,
    _connection(
        "--s3-endpoint", "URL", "http://host:port of an S3 that is not Amazon's. Else PAGEMILL_S3_ENDPOINT."
    ),
]
Region = Annotated[
    str | None, _connection("--s3-region", "NAME", "The bucket's region. Else PAGEMILL_S3_REGION.")
]

MaxTokens = Annotated[
    int | None, typer.Option(min=1, help="Most tokens to produce.", rich_help_panel=SAMPLING)
]
Temperature = Annotated[
    float | None, typer.Option(min=0, max=2, help="0 is greedy.", rich_help_panel=SAMPLING)
]
TopP = Annotated[float | None, typer.Option(min=0, max=1, rich_help_panel=SAMPLING)]
TopK = Annotated[int | None, typer.Option(min=-1, help="0 is off.", rich_help_panel=SAMPLING)]
Stop = Annotated[
    list[str] | None,
    typer.Option(metavar="TEXT", help="Text that ends an answer; may be repeated.", rich_help_panel=SAMPLING),
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", rich_help_panel=SAMPLING,
                 help="Any other parameter, its value as JSON: --set min_p=0.05 --set logprobs=2."),
]  # fmt: skip
Seed = Annotated[
    int | None,
    typer.Option(
        min=0, help="Rows without a seed get theirs from it and their index.", rich_help_panel=SAMPLING
    ),
]
PromptColumn = Annotated[
    str | None,
    typer.Option("--prompt-column", metavar="NAME", help="The column that holds the prompts.",
                 rich_help_panel=TABLES, show_default=False),
]  # fmt: skip
Template = Annotated[
    str | None,
    typer.Option("--template", metavar="TEXT", rich_help_panel=TABLES, show_default=False,
                 help="The prompt, with {column} where a cell goes: 'Translate: {title}'."),
]  # fmt: skip
IdColumn = Annotated[
    str | None,
    typer.Option("--id-column", metavar="NAME", help="The column that holds custom_ids.",
                 rich_help_panel=TABLES, show_default=False),
]  # fmt: skip
Chat = Annotated[
    bool,
    typer.Option("--chat", rich_help_panel=TABLES,
                 help="A prompt is a user's message, for the chat template, not a raw text."),
]  # fmt: skip
File = Annotated[
    str,
    typer.Argument(
        metavar="FILE",
        help="JSONL, Parquet, CSV or TSV, all but Parquet also .gz or .zst: a path, s3://…, or - for JSONL "
        "from standard input.",
        show_default=False,
    ),
]
Strict = Annotated[bool, typer.Option("--strict", help="Fail the job for the first bad line.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")]
JobId = Annotated[str, typer.Argument(metavar="JOB", help="The job's id.", show_default=False)]


def client(redis_url: str | None, store: str | None, endpoint: str | None, region: str | None) -> Client:
    """The client that these options mean."""
    settings = ClientSettings.load(redis_url=redis_url, store=store, s3_endpoint=endpoint, s3_region=region)
    return Client(
        settings.redis_url,
        settings.store,
        storage_options=settings.storage_options(),
        patience=PATIENCE_S,
    )


def sampling(
    max_tokens: int | None,
    temperature: float | None,
    top_p: float | None,
    top_k: int | None,
    stop: Sequence[str] | None,
    others: Sequence[str] | None,
) -> dict[str, Any]:
    """Job-level parameters; those that were not given are left out, and an explicit 0 is a value."""
    named = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "stop": stop or None,
    }
    given: dict[str, Any] = {name: value for name, value in named.items() if value is not None}
    for text in others or ():
        name, mark, value = text.partition("=")
        if not mark or not name:
            raise UsageError(f"--set {text} has no value; write --set name=value.")
        if name in given:
            raise UsageError(f"{name} is given twice.")
        given[name] = _json_or_text(value)
    return given


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def prompts(file: str) -> tuple[Prompts, str | None]:
    """The input that a command line names, and what to call it; "-" is standard input."""
    if file != "-":
        return file, None
    if sys.stdin is None or sys.stdin.closed:
        raise UsageError("Standard input is closed; name a file.")
    # Unbuffered: a thread that waits for input would hold a lock of the buffer, and the interpreter aborts
    # when it cannot have that at its end.
    return open(sys.stdin.fileno(), "rb", buffering=0, closefd=False), "stdin.jsonl"


def deadline(text: str | None) -> When | None:
    """90s, 30m, 2h, 1d, or a moment with its zone such as 2026-05-01T08:00+02:00."""
    if text is None:
        return None
    if found := re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhd]?)", text.strip()):
        unit = {"": "seconds", "s": "seconds", "m": "minutes", "h": "hours", "d": "days"}[found[2]]
        try:
            return timedelta(**{unit: float(found[1])})
        except OverflowError:
            raise UsageError(f"--deadline {text} is too far away.") from None
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        raise UsageError(
            f"--deadline {text} is no time; write 30m, 2h, 1d or 2026-05-01T08:00+02:00."
        ) from None


def existing_folder(path: Path) -> Path:
    """A folder that can be made or is there; UsageError when a file has the name."""
    if path.exists() and not path.is_dir():
        raise UsageError(f"{path} is a file; name a folder.")
    return path
