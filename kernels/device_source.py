"""What a Triton variant is compiled from, as a digest: whether a table of compiled variants is still that of
the kernels can then be told without compiling them."""

from __future__ import annotations

import hashlib
import io
import json
import tokenize
from functools import cache
from inspect import getsource
from typing import Any

from pagemill.kernels.variants import FP_FUSION, Variant


def digest(variant: Variant) -> str:
    """16 digits that change with the device code, its constants or how it is compiled, and not with comments,
    line breaks, the version of Python or whether kernels are interpreted."""
    found: dict[str, object] = {}
    _collect(variant.kernel.fn, found)
    how = [variant.num_warps, variant.num_stages, FP_FUSION]
    parts = [sorted(found.items()), list(variant.signature.items()), sorted(variant.constexprs.items()), how]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def _collect(function: Any, found: dict[str, object]) -> None:
    """Adds a function's text, that of the functions of ours which it calls, and the constants it reads."""
    found[function.__name__] = _text(function)
    for name in function.__code__.co_names:
        value = function.__globals__.get(name)
        if name in found:
            continue
        if type(value).__name__ == "constexpr":
            found[name] = value.value
        elif hasattr(value, "fn") and value.fn.__module__.startswith("pagemill."):
            _collect(value.fn, found)


@cache
def _text(function: Any) -> str:
    return device_text(getsource(function))


def device_text(source: str) -> str:
    """Words and signs of Python source, without comments, docstrings and how lines are laid out."""
    words: list[str] = []
    begins = True
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.INDENT:
            words.append("{")
        elif token.type == tokenize.DEDENT:
            words.append("}")
        elif token.type == tokenize.NEWLINE:
            words += [] if begins else [";"]
            begins = True
        elif token.type == tokenize.STRING and begins:
            continue
        elif token.type not in (tokenize.COMMENT, tokenize.NL, tokenize.ENDMARKER):
            words.append(token.string)
            begins = False
    return " ".join(words)
