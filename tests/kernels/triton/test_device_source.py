"""When the digest of a variant changes, and when it does not."""

from __future__ import annotations

import dataclasses

import pytest

from pagemill.kernels import sample_triton_kernel
from pagemill.kernels.compile import all_variants
from pagemill.kernels.device_source import device_text, digest

VARIANTS = {variant.full_name: variant for variant in all_variants()}

PLAIN = """
@jit
def add(x, y, N: constexpr):
    for i in range(N):
        x += y[i]
    return x * "s"
"""
COMMENTED = '''
@jit
def add(
    x,
    y, N: constexpr
):
    """Adds them."""
    # One after another.
    for i in range(N):

        x += y[i]  # in place
    return x * "s"
'''


def test_comments_docstrings_and_line_breaks_are_no_part_of_it() -> None:
    assert device_text(PLAIN) == device_text(COMMENTED)


@pytest.mark.parametrize(
    ("old", "new"), [("+=", "-="), ('"s"', '"t"'), ("    return", "        return"), ("(N)", "(M)")]
)
def test_words_signs_and_indentation_are(old: str, new: str) -> None:
    assert device_text(PLAIN.replace(old, new)) != device_text(PLAIN)


def test_how_a_variant_is_compiled_is_part_of_its_digest() -> None:
    variant = VARIANTS["pick_kernel/v128k"]
    before = digest(variant)
    others = [
        dataclasses.replace(variant, num_warps=4),
        dataclasses.replace(variant, num_stages=2),
        dataclasses.replace(variant, constexprs={**variant.constexprs, "TILE": 64}),
        dataclasses.replace(variant, signature={**variant.signature, "stride": "i32"}),
        dataclasses.replace(variant, kernel=VARIANTS["weigh_kernel/v128k"].kernel),
    ]
    assert len({before, *map(digest, others)}) == 1 + len(others)
    assert digest(dataclasses.replace(variant, name="other", targets=(90,))) == before


def test_a_constant_that_a_called_function_reads_is_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pick, shape = VARIANTS["pick_kernel/v128k"], VARIANTS["shape_logits_kernel/b300-e16"]
    before = digest(pick), digest(shape)
    # Read by `_kth_in_registers`, which `_bound` calls, which the kernel calls.
    monkeypatch.setattr(sample_triton_kernel, "LAST", type(sample_triton_kernel.LAST)(1))
    assert digest(pick) != before[0]
    assert digest(shape) == before[1]
