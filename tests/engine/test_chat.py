"""Templates render here as they do in transformers."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from pagemill.engine.chat import ChatTemplate, Guard, TemplateError

EVERYTHING = """{%- set ns = namespace(last=0) %}
{%- if messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\n' + messages[0]['content'] + '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if loop.first and message.role == 'system' %}{%- continue %}{%- endif %}
    {%- set ns.last = loop.index %}
    {%- generation %}
        {{- '<|im_start|>' + message.role + '\n' + (message.content | trim) + eos_token }}
    {%- endgeneration %}
    {%- if message.tool_calls %}{{ message.tool_calls | tojson(indent=2) }}{% endif %}
{%- endfor %}
{{ ns.last }} {{ {'a': '<é>'} | tojson }} {{ dict(a=1) }}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""

CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "  é <b> & 'q' "},
    {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": {"x": "<é>"}}]},
    {"role": "user", "content": "And?"},
]


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_template_renders_as_in_transformers(count: int, add_generation_prompt: bool) -> None:
    chat = CHAT[:count]
    expected, _ = render_jinja_template(
        conversations=[chat],
        chat_template=EVERYTHING,
        add_generation_prompt=add_generation_prompt,
        eos_token="</s>",
    )
    template = ChatTemplate(EVERYTHING, {"eos_token": "</s>"})
    assert template.render(chat, add_generation_prompt=add_generation_prompt) == expected[0]


def test_a_template_may_ask_for_the_date() -> None:
    template = ChatTemplate("{{ strftime_now('%Y') }}", {})
    assert template.render(CHAT) in {str(datetime.now().year), str(datetime.now().year - 1)}


def test_a_template_that_trips_says_over_what() -> None:
    template = ChatTemplate("{{ messages[0].nothing.at_all }}", {})
    with pytest.raises(TemplateError, match=r"fails on these messages: .* \(UndefinedError\)"):
        template.render(CHAT)


def test_a_guard_without_control_tokens_changes_nothing() -> None:
    guard = Guard([])
    assert not guard.needed(CHAT)
    assert guard.spelled(CHAT) is None
    template = ChatTemplate("{{ messages[1].content }}", {})
    assert guard.render(CHAT, template.render, str) == CHAT[1]["content"]


def test_the_longest_control_token_counts() -> None:
    guard = Guard(["<a>", "<a><b>", "<b>"])
    template = ChatTemplate("<a><b>{{ messages[0].content }}", {})
    text = guard.render([{"content": "<a><b>"}], template.render, lambda token: f"[{len(token)}]")
    assert text == "[6]<a><b>"


def test_messages_that_use_every_mark_are_refused() -> None:
    chat = [{"content": "".join(map(chr, range(0xFDD0, 0xFDF0)))}]
    with pytest.raises(TemplateError, match="use up the characters"):
        Guard(["<a>"]).render(chat, ChatTemplate("{{ messages[0].content }}", {}).render, str)
