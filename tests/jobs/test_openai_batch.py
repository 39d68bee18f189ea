"""What we say in OpenAI's words is validated by OpenAI's own package; a file made for their API runs
unchanged."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from fake_worker import say_alive, take, unique, work
from openai.types import Batch, BatchError, Completion
from openai.types.chat import ChatCompletion
from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming
from pydantic import TypeAdapter
from result_rows import done

from pagemill.jobs import layout
from pagemill.jobs.client import Client, Job
from pagemill.jobs.results import to_openai
from pagemill.jobs.storage import read_json


def request(custom_id: str, url: str = "/v1/chat/completions", **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"model": "gpt-4o-mini", **body}}


CHAT = [
    request(
        "request-1",
        messages=[
            {"role": "system", "content": "You are a helpful assistant."},
            {"role": "user", "content": [{"type": "text", "text": "Hello world!"}]},
        ],
        max_tokens=1000,
    ),
    request(
        "request-2",
        messages=[{"role": "developer", "content": "Be short."}, {"role": "user", "content": "Hi"}],
        max_completion_tokens=50,
        temperature=0.2,
        top_p=0.9,
        n=1,
        seed=7,
        stop=["\n"],
        logprobs=True,
        top_logprobs=2,
        user="somebody",
        response_format={"type": "text"},
        metadata={"source": "atlas"},
    ),
    request("request-3", messages=[{"role": "user", "content": "x"}], tools=[{"type": "function"}]),
    request("request-1", messages=[{"role": "user", "content": "again"}]),
]
RAW = [request("c-1", "/v1/completions", prompt="Say", max_tokens=7, echo=False, logprobs=1)]


def validated(document: dict[str, Any]) -> Batch:
    batch = Batch.model_validate(document, strict=True)
    assert not batch.model_extra, f"the package does not know {batch.model_extra}"
    return batch


async def outcome(client: Client, job: Job) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    output, errors = io.BytesIO(), io.BytesIO()
    job.results().sync.write_openai(output, errors)
    found = [[json.loads(line) for line in file.getvalue().splitlines()] for file in (output, errors)]
    return found[0], found[1]


async def test_a_file_made_for_their_batch_api_runs_unchanged(client: Client, tmp_path: Path) -> None:
    good = TypeAdapter(CompletionCreateParamsNonStreaming)
    for line in CHAT[:2]:
        good.validate_python(line["body"])  # it is what their package would send
    model, file = unique("model"), tmp_path / "batch.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in CHAT))
    job = await client.submit(file, model=model)
    before = validated(await client.openai_batch(job))
    assert (before.status, before.endpoint, before.output_file_id) == ("validating", CHAT[0]["url"], None)
    await work(await client.state(), client.storage, model)
    output, errors = await outcome(client, job)
    assert [line["custom_id"] for line in output] == ["request-1", "request-2"]
    for line in output:
        assert line["error"] is None
        assert line["response"]["status_code"] == 200
        said = ChatCompletion.model_validate(line["response"]["body"], strict=True)
        assert said.choices[0].message.content
        assert said.usage is not None
        assert said.usage.total_tokens == 5
    assert [line["custom_id"] for line in errors] == ["request-3", "request-1"]
    codes = [BatchError.model_validate(line["error"], strict=True).code for line in errors]
    assert codes == ["unsupported_parameter", "duplicate_custom_id"]
    after = validated(await client.openai_batch(job))
    assert after.request_counts is not None
    assert after.request_counts.to_dict() == {"total": 4, "completed": 2, "failed": 2}
    assert after.status == "completed"
    assert after.completed_at and after.in_progress_at and after.in_progress_at <= after.completed_at
    assert after.output_file_id and after.error_file_id
    assert after.usage is not None
    assert after.usage.total_tokens == 10
    assert after.completion_window == "unlimited"


async def test_raw_completions_and_a_deadline(client: Client) -> None:
    model = unique("model")
    job = await client.submit(RAW, model=model, deadline=24 * 3600.0)
    await work(await client.state(), client.storage, model)
    batch = validated(await client.openai_batch(job))
    assert (batch.endpoint, batch.completion_window) == ("/v1/completions", "24h")
    output, _ = await outcome(client, job)
    assert Completion.model_validate(output[0]["response"]["body"], strict=True).choices[0].text


async def test_every_state_is_one_of_theirs(client: Client) -> None:
    model = unique("model")
    cancelled = await client.submit(["a"], model=model)
    await cancelled.cancel()
    batch = validated(await client.openai_batch(cancelled))
    assert batch.status == "cancelled"
    assert batch.cancelling_at and batch.cancelled_at and batch.cancelling_at <= batch.cancelled_at
    failed = await client.submit([{"prompt": 5}], model=model, strict=True)
    await work(await client.state(), client.storage, model)
    batch = validated(await client.openai_batch(failed))
    assert batch.status == "failed"
    assert batch.errors is not None and batch.errors.data
    assert batch.errors.data[0].code == "invalid_request"
    empty = await client.submit(b"", model=model)
    await work(await client.state(), client.storage, model)
    assert validated(await client.openai_batch(empty)).status == "failed"
    running = await client.submit(["a", "b"], model=model)
    await work(await client.state(), client.storage, model, tasks=1)
    await take(await client.state(), model)
    assert validated(await client.openai_batch(running)).status == "in_progress"
    state = await client.state()
    await say_alive(state, model)  # so that cancelling leaves the shard to who holds it
    await running.cancel()
    batch = validated(await client.openai_batch(running))
    assert (batch.status, batch.cancelled_at) == ("cancelling", None)
    stop = read_json(client.storage, layout.stop(running.id))
    assert stop is not None
    assert batch.cancelling_at == int(stop["at"])


def test_log_probabilities_have_their_shapes() -> None:
    top = [{"token": "b", "token_id": 2, "logprob": -2.5}]
    told = [
        {"token": "é", "token_id": 1, "logprob": -0.5, "top_logprobs": top},
        {"token": "\N{REPLACEMENT CHARACTER}", "token_id": 9, "logprob": -1.5, "top_logprobs": []},
    ]
    rows = [
        done(0, "é?", logprobs=json.dumps(told)),
        done(1, "é?", kind="completion", logprobs=json.dumps(told)),
        done(2, "a", choices=[{"index": i, "text": "ab"[i], "finish_reason": "stop",
                               "logprobs": json.dumps(told)} for i in (0, 1)]),
    ]  # fmt: skip
    output = io.BytesIO()
    to_openai(rows, output, io.BytesIO(), created=0)
    bodies = [json.loads(line)["response"]["body"] for line in output.getvalue().splitlines()]
    chat, several = (ChatCompletion.model_validate(bodies[i], strict=True) for i in (0, 2))
    for choice in [*chat.choices, *several.choices]:
        assert choice.logprobs is not None and choice.logprobs.content is not None
        first, second = choice.logprobs.content
        assert (first.bytes, first.top_logprobs[0].logprob) == ([0xC3, 0xA9], -2.5)
        assert second.bytes is None
    raw = Completion.model_validate(bodies[1], strict=True).choices[0].logprobs
    assert raw is not None
    assert (raw.tokens, raw.text_offset) == (["é", "\N{REPLACEMENT CHARACTER}"], [0, 1])
    assert raw.top_logprobs == [{"b": -2.5}, {}]
