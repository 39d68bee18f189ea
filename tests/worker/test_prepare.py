"""Rows of a job as requests of the engine: every parameter resolved, every fault a row's own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from pagemill.engine.chat import TemplateError
from pagemill.engine.request import Completion, Request, Timings, TokenLogprob, Usage
from pagemill.jobs.errors import ROW_CODES, RowFault
from pagemill.jobs.row import Row
from pagemill.worker.prepare import Limits, answer, failure, prepare


class Letters:
    """One token a character; a chat has a frame of one token around it."""

    def encode_prompt(self, text: str) -> list[int]:
        if "panic" in text:
            raise RuntimeError("index out of bounds")
        return [ord(letter) for letter in text]

    def render_chat(
        self, messages: list[dict[str, str]], *, special_tokens_in_content: str = "text"
    ) -> list[int]:
        if messages[0]["role"] == "system":
            raise TemplateError("this model's template knows no system message: leave it out.")
        return [1, *(ord(letter) for message in messages for letter in message["content"]), 2]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))


def row(**fields: Any) -> Row:
    given = {"prompt": "abcd", "messages": None, "prompt_token_ids": None, "params": {}, **fields}
    return Row(row_index=3, line=7, custom_id="x", kind="completion", seed=99, **given)


LIMITS = Limits(context=100, defaults={"temperature": 0.6, "top_p": 0.9, "top_k": 40})


def prepared(it: Row, limits: Limits = LIMITS, **how: Any) -> Request:
    requests = prepare("rid", it, Letters(), limits, **how)
    assert isinstance(requests, list)
    return requests[0]


def test_what_a_row_leaves_open_is_the_models_then_neutral() -> None:
    sampling = prepared(row()).sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.6, 0.9, 40)
    sampling = prepared(row(), Limits(100, {})).sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (1.0, 1.0, 0)


def test_an_explicit_zero_is_a_value() -> None:
    sampling = prepared(row(params={"temperature": 0.0, "top_k": 0, "top_p": 0.0, "min_p": 0.0})).sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.0, 0, 0.0)


@pytest.mark.parametrize("odd", [None, True, "0.7", -1, []])
def test_nonsense_in_a_generation_config_is_passed_over(odd: object) -> None:
    assert prepared(row(), Limits(100, {"temperature": odd})).sampling.temperature == 1.0


def test_max_tokens_is_cut_to_what_the_context_leaves() -> None:
    assert prepared(row()).sampling.max_tokens == 96
    assert prepared(row(), Limits(8192, {})).sampling.max_tokens == 1024
    assert prepared(row(params={"max_tokens": 500})).sampling.max_tokens == 96
    assert prepared(row(params={"max_tokens": 5, "min_tokens": 5})).sampling.min_tokens == 5
    assert prepared(row(params={"max_tokens": 500, "min_tokens": 400})).sampling.min_tokens == 96
    assert prepared(row(), context=10).sampling.max_tokens == 6
    assert prepared(row(), context=10**6).sampling.max_tokens == 96, "a job can't declare more than there is"


def test_a_prompt_that_leaves_no_room_names_both_lengths() -> None:
    fault = prepare("rid", row(prompt="x" * 100), Letters(), LIMITS)
    assert isinstance(fault, RowFault)
    assert fault.code == "prompt_too_long"
    assert "line 7" in fault.message
    assert "100 tokens" in fault.message
    assert "99" in fault.message
    assert isinstance(prepare("rid", row(prompt="x" * 99), Letters(), LIMITS), list)


def test_truncation_keeps_the_end() -> None:
    it = row(prompt="x" * 500 + "end", params={"truncate_prompt_tokens": 3})
    assert prepared(it).prompt_token_ids == tuple(map(ord, "end"))


def test_a_template_that_refuses_is_the_rows_error() -> None:
    it = row(prompt=None, messages=[{"role": "system", "content": "hi"}])
    fault = prepare("rid", it, Letters(), LIMITS)
    assert isinstance(fault, RowFault)
    assert fault.code == "template_error"
    assert "system" in fault.message


def test_a_tokenizer_that_panics_costs_one_row_and_leaks_no_prompt() -> None:
    fault = prepare("rid", row(prompt="panic: secret"), Letters(), LIMITS)
    assert isinstance(fault, RowFault)
    assert fault.code in ROW_CODES
    assert "secret" not in fault.message


def test_samples_share_the_seed_and_differ_in_their_number() -> None:
    requests = prepare("rid", row(params={"n": 3}), Letters(), LIMITS, priority=4, group="job")
    assert isinstance(requests, list)
    assert [request.request_id for request in requests] == ["rid", "rid#1", "rid#2"]
    assert [request.sampling.sample for request in requests] == [0, 1, 2]
    assert {request.seed for request in requests} == {99}
    assert {(request.priority, request.group) for request in requests} == {(4, "job")}


def test_every_other_parameter_reaches_the_engine() -> None:
    params = {
        "min_p": 0.1, "stop": ["a"], "stop_token_ids": [5], "ignore_eos": True, "presence_penalty": 0.5,
        "frequency_penalty": -0.5, "repetition_penalty": 1.1, "logit_bias": {"7": -3.0}, "logprobs": 2,
    }  # fmt: skip
    sampling = prepared(row(params=params)).sampling
    assert (sampling.min_p, sampling.stop, sampling.stop_token_ids) == (0.1, ("a",), (5,))
    assert sampling.ignore_eos is True
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -0.5)
    assert (sampling.repetition_penalty, sampling.logit_bias, sampling.logprobs) == (1.1, ((7, -3.0),), 2)
    assert prepared(row(params={"logprobs": None})).sampling.logprobs is None


def completion(rid: str, text: str = "ok", **fields: Any) -> Completion:
    usual: dict[str, Any] = {
        "token_ids": (1,),
        "finish_reason": "stop",
        "usage": Usage(4, 2, 1),
        "timings": Timings(10.0, 10.5, 11.0),
    }
    return Completion(rid, text, **{**usual, **fields})


def test_an_answer_adds_samples_up() -> None:
    message = answer("rid", [completion("rid", "a"), completion("rid#1", "b")], Letters(), 9.5)
    assert [choice["text"] for choice in message["choices"]] == ["a", "b"]
    assert (message["prompt_tokens"], message["completion_tokens"], message["cached_tokens"]) == (4, 4, 1)
    assert (message["queued_ms"], message["first_token_ms"], message["total_ms"]) == (500.0, 500.0, 1000.0)


def test_a_row_is_queued_until_its_first_step_and_tokens_are_apart_by_their_mean() -> None:
    times = Timings(10.0, first_token=10.5, finished=11.0, started=10.25)
    samples = [
        completion("rid", token_ids=(1, 2, 3), timings=times),
        completion("rid#1", token_ids=(1, 2), timings=times),
        completion("rid#2", token_ids=(1,), timings=times),
    ]
    message = answer("rid", samples, Letters(), 9.5)
    assert (message["queued_ms"], message["first_token_ms"], message["total_ms"]) == (750.0, 500.0, 1000.0)
    assert message["inter_token_ms"] == 375.0  # of 250 and 500; one token has no gap
    assert answer("rid", samples[2:], Letters(), 9.5)["inter_token_ms"] is None


def test_one_failed_sample_fails_the_row() -> None:
    bad = completion("rid#1", finish_reason="error", error_code="numeric_error", error_message="NaN")
    message = answer("rid", [completion("rid"), bad], Letters(), 9.5)
    assert (message["status"], message["error_code"], message["error_message"]) == (
        "failed",
        "numeric_error",
        "NaN",
    )
    assert "choices" not in message


def test_an_aborted_row_says_only_that() -> None:
    assert answer("rid", [completion("rid", finish_reason="abort")], Letters(), 0.0) == {
        "rid": "rid",
        "status": "aborted",
    }


def test_logprobs_are_json_with_the_tokens_text() -> None:
    told = (TokenLogprob(65, -0.1, ((65, -0.1), (66, -2.0))),)
    message = answer("rid", [completion("rid", logprobs=told)], Letters(), 9.5)
    (entry,) = json.loads(message["choices"][0]["logprobs"])
    assert (entry["token"], entry["logprob"]) == ("A", -0.1)
    assert [top["token"] for top in entry["top_logprobs"]] == ["A", "B"]


def test_a_row_that_never_got_there_is_answered_too() -> None:
    assert failure("rid", RowFault("template_error", "why"))["error_code"] == "template_error"
