"""From a line to a row: the two shapes of input lines, and everything that shows from text alone.

This room knows lines, rows and a job's rules for them. It may not know other lines (duplicate ids are the
planner's) nor the model (lengths and templates are the worker's).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from pagemill.jobs.errors import RowFault
from pagemill.jobs.json_strict import InvalidJson, check_numbers, parse_json
from pagemill.jobs.lines import Line
from pagemill.jobs.parameters import Refusal, check_together, invalid, read_parameters, shown, unsupported
from pagemill.jobs.prompt import read_messages, read_prompt
from pagemill.jobs.row import Kind, Row, filled_id, row_seed

if TYPE_CHECKING:
    from pagemill.jobs.spec import JobSpec

URLS: Final[dict[str, Kind]] = {"/v1/chat/completions": "chat", "/v1/completions": "completion"}
MAX_ID_BYTES: Final = 1024
UNREADABLE: Final = "unreadable"
"""The field of a line that stands for a table's row which is no prompt, and says why (columns.py)."""
_ENVELOPE: Final = frozenset({"custom_id", "id", "method", "url", "body"})


def parse_row(line: Line, spec: JobSpec) -> Row | RowFault:
    """The row of a line, or what is wrong with it. Never raises for any content of the line."""
    if line.fault is not None:
        return line.fault
    given: str | None = None
    try:
        doc = parse_json(line.data)
        if not isinstance(doc, dict):
            raise invalid(f"the line must be a JSON object, not {_kind(doc)}")
        given = _custom_id(doc)
        if isinstance(why := doc.get(UNREADABLE), str):
            raise invalid(why)
        return _row(doc, given, line, spec)
    except (InvalidJson, Refusal) as error:
        return RowFault(error.code, f"line {line.number}: {error.message}", line.number, given)


def _kind(doc: Any) -> str:
    if isinstance(doc, list):
        return "a list (one request a line)"
    return "a string" if isinstance(doc, str) else shown(doc)


def _custom_id(doc: dict[str, Any]) -> str | None:
    """`custom_id` or `id`: two names of one thing."""
    given, short = doc.get("custom_id"), doc.get("id")
    name = "custom_id" if given is not None else "id"
    if given is None:
        given = short
    elif short is not None and short != given:
        raise invalid("`custom_id` and `id` are one thing and differ here: give one of them")
    if given is None:
        return None
    if not isinstance(given, str):
        raise invalid(f"`{name}` must be a string, not {shown(given)}: put it in quotes")
    if not given:
        raise invalid(f"`{name}` is empty: give it a value or leave it out")
    if len(given.encode()) > MAX_ID_BYTES:
        raise invalid(f"`{name}` is longer than {MAX_ID_BYTES:,} bytes: shorten it")
    return given


def _row(doc: dict[str, Any], given: str | None, line: Line, spec: JobSpec) -> Row:
    body, kind = _opened(doc)
    fields = {name: value for name, value in body.items() if name not in _NOT_PARAMETERS}
    try:
        params = read_parameters(fields)
    except Refusal as refused:
        if body.get("messages") is None and body.get("prompt") is None:
            # Whoever called the prompt by another name would mend one fault and meet the next.
            raise Refusal(refused.code, f"{refused.message}; and {_missing(kind)}") from None
        raise
    if spec.defaults:
        params = {**spec.defaults, **params}
        check_together(params)
    requested = _model(body.get("model"), spec)
    metadata = _metadata(body.get("metadata"))
    messages, prompt, ids = _asked(body, kind)
    seed = params.pop("seed", None)
    return Row(
        row_index=line.row_index,
        line=line.number,
        custom_id=filled_id(line.row_index) if given is None else given,
        kind="chat" if messages is not None else "completion",
        messages=messages,
        prompt=prompt,
        prompt_token_ids=ids,
        params=params,
        seed=row_seed(spec.seed, line.row_index) if seed is None else seed,
        requested_model=requested,
        metadata=metadata,
        filled_id=given is None,
    )


_NOT_PARAMETERS: Final = frozenset({"custom_id", "id", "model", "metadata", "messages", "prompt"})


def _opened(doc: dict[str, Any]) -> tuple[dict[str, Any], Kind | None]:
    """The parameters of either shape, and the kind that the url asks for (None: the bare shape)."""
    if "body" not in doc and not ("method" in doc and "url" in doc):
        return doc, None
    for name in doc:
        if name not in _ENVELOPE:
            raise unsupported(f"`{name}` stands beside `body`: move it into `body`")
    method, url, body = doc.get("method"), doc.get("url"), doc.get("body")
    if method != "POST":
        raise invalid(f'`method` must be "POST", not {shown(method)}')
    if not isinstance(url, str):
        raise invalid(f"`url` must be one of {_urls()}, not {shown(url)}")
    kind = URLS.get(url)
    if kind is None:
        raise Refusal("url_mismatch", f"`url` {shown(url)} is not served: use {_urls()}")
    if not isinstance(body, dict):
        raise invalid(f"`body` must be an object, not {shown(body)}")
    for name in ("custom_id", "id"):
        if name in body:
            raise unsupported(f"`body.{name}` is in the wrong place: move it beside `body`")
    return body, kind


def _urls() -> str:
    return " or ".join(URLS)


def _model(value: Any, spec: JobSpec) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or not value:
        raise invalid(f"`model` must be the name of a model, not {shown(value)}")
    if spec.model_policy == "match" and value != spec.model:
        raise Refusal(
            "model_mismatch",
            f"`model` is {shown(value)} and the job runs {shown(spec.model)}: change it, leave it out, "
            "or send the job with model_policy override",
        )
    return value


def _metadata(value: Any) -> dict[str, Any] | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise invalid(f"`metadata` must be an object, not {shown(value)}")
    check_numbers(value, "metadata")
    return value


def _missing(kind: Kind | None) -> str:
    wanted = {"chat": "`messages`", "completion": "`prompt`", None: "`prompt` or `messages`"}[kind]
    return f"{wanted} is missing: a row needs something to answer"


def _asked(
    body: dict[str, Any], kind: Kind | None
) -> tuple[list[dict[str, str]] | None, str | None, list[int] | None]:
    messages, prompt = body.get("messages"), body.get("prompt")
    if messages is not None and prompt is not None:
        raise invalid("`messages` and `prompt` are both given: keep one of them")
    if messages is None and prompt is None:
        raise invalid(_missing(kind))
    if kind == "chat" and prompt is not None:
        raise Refusal(
            "url_mismatch", "`prompt` goes with `url` /v1/completions, not with /v1/chat/completions"
        )
    if kind == "completion" and messages is not None:
        raise Refusal(
            "url_mismatch", "`messages` go with `url` /v1/chat/completions, not with /v1/completions"
        )
    if messages is not None:
        return read_messages(messages), None, None
    return None, *read_prompt(prompt)
