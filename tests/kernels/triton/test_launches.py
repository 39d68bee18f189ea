"""On a CUDA device the public functions launch the Triton kernels, and as the compile tool compiles them.

No card is needed: tensors say that they are on one and have no numbers, and launches are noted down instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from pagemill.kernels import attention, attention_triton
from pagemill.kernels.activation import gelu_tanh_mul, silu_mul
from pagemill.kernels.attention_triton import DevicePlan
from pagemill.kernels.attention_triton_plan import Sizes
from pagemill.kernels.compile import all_variants
from pagemill.kernels.linear_fp8 import Fp8Linear
from pagemill.kernels.linear_int8 import Int8Linear
from pagemill.kernels.norm import add_rms_norm, rms_norm
from pagemill.kernels.rope_write import rope_write
from pagemill.kernels.row_table import DecodeInputs, RowTable, advance, decode_inputs
from pagemill.kernels.sample import best_tokens, sample_tokens, token_logprobs
from pagemill.kernels.shape_logits import Shaping, shape_logits

VARIANTS = {variant.full_name: variant for variant in all_variants()}
BF16, I32, I64 = torch.bfloat16, torch.int32, torch.int64
# Llama 3.1 8B.
HEADS, KV_HEADS, HEAD_DIM, WIDTH, INNER, VOCABULARY = 32, 8, 128, 4096, 14336, 128_256


@dataclass
class Launch:
    kernel: str
    options: dict[str, Any]


class NoMemory(DevicePlan):
    """A plan of which nothing is read: numbers of a card's tensors cannot be set here."""

    def __init__(self, sizes: Sizes, words: Tensor) -> None:
        self.sizes = sizes

    def section(self, name: str) -> Tensor:
        return torch.empty(1, dtype=I32)

    count = section


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Launch]]:
    """Within it tensors are on a Hopper card, and what is launched is in the list."""
    found: list[Launch] = []

    def note(kernel: Any, *arguments: object, grid: object, warmup: bool, **options: Any) -> None:
        found.append(Launch(kernel.__name__, options))

    for kind in {type(variant.kernel) for variant in VARIANTS.values()}:
        monkeypatch.setattr(kind, "run", note)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    monkeypatch.setattr(attention_triton, "DevicePlan", NoMemory)
    # Tensors that are not there cannot be pinned.
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    attention_triton.has_wgmma.cache_clear()
    with FakeTensorMode(), torch.device("cuda"):
        yield found
    attention_triton.has_wgmma.cache_clear()


def wide(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=BF16)


def attend(new: list[int], lengths: list[int], stored: torch.dtype = BF16, shared: bool = False) -> None:
    tables = [list(range(-(-length // 16))) for length in lengths]
    if not shared:
        tables = [[1000 * row + block for block in table] for row, table in enumerate(tables)]
    layer = torch.empty(64, 2, KV_HEADS, HEAD_DIM * 16, dtype=stored)
    scales = None if stored is BF16 else torch.empty(64, 2, KV_HEADS, 16)
    rows = attention.plan_rows(new, lengths, tables, layer)
    attention.paged_attention(wide(sum(new), HEADS, HEAD_DIM), layer, rows, 0.1, scales=scales)


def write(stored: torch.dtype = BF16, norm: bool = False) -> None:
    heads = wide(5, HEADS + 2 * KV_HEADS, HEAD_DIM)
    layer = torch.empty(64, 2, KV_HEADS, HEAD_DIM * 16, dtype=stored)
    angles, places = (wide(5, HEAD_DIM // 2),) * 2, (torch.empty(5, dtype=I64),) * 2
    weights = wide(HEADS + KV_HEADS, HEAD_DIM) if norm else None
    scales = None if stored is BF16 else torch.empty(64, 2, KV_HEADS, 16)
    rope_write(heads, HEADS, angles, layer, *places, norm=weights, eps=1e-6, scales=scales)


def draw(what: str) -> None:
    logits, one, whole = torch.empty(3, VOCABULARY), torch.empty(3), torch.empty(3, dtype=I64)
    if what == "sample":
        sample_tokens(logits, one, whole, one, one, torch.empty(3, 2, dtype=I32))
    elif what == "best":
        best_tokens(logits)
    else:
        token_logprobs(logits, whole, 5)


def shape() -> None:
    one, whole = torch.empty(9), torch.empty(9, dtype=I32)
    lists = torch.empty(9, 300, dtype=I32), torch.empty(9, 300), torch.empty(9, 16, dtype=I32)
    shaping = Shaping(torch.empty(9, VOCABULARY, dtype=I32), one, one, one, *lists, whole, whole)
    shape_logits(torch.empty(3, VOCABULARY), torch.empty(3, dtype=I64), shaping)


def step_rows() -> None:
    line, slots = torch.empty(9, dtype=I32), torch.empty(3, dtype=I64)
    table = RowTable(line, line, line, torch.empty(9, 40, dtype=I32), torch.empty(9, dtype=I64))
    decode_inputs(table, slots, 4, DecodeInputs.empty(3, torch.device("cuda")))
    advance(table, slots, slots)


def dense(make: Callable[[Tensor, None], Callable[[Tensor], Tensor]], rows: int) -> None:
    assert make(wide(96, WIDTH), None)(wide(rows, WIDTH)).shape == (rows, 96)


CASES: dict[str, tuple[Callable[[], object], list[str]]] = {
    "norm": (lambda: rms_norm(wide(3, WIDTH), wide(WIDTH), 1e-5), ["rms_norm_kernel/bf16-4096"]),
    "sum and norm": (
        lambda: add_rms_norm(wide(3, WIDTH), wide(3, WIDTH), wide(WIDTH), 1e-5),
        ["add_rms_norm_kernel/bf16-4096"],
    ),
    "silu": (lambda: silu_mul(wide(3, 2 * INNER)), ["gate_kernel/bf16-silu"]),
    "gelu": (lambda: gelu_tanh_mul(wide(3, 2 * INNER)), ["gate_kernel/bf16-gelu"]),
    "write": (write, ["rope_write_kernel/bf16-d128"]),
    "norm and write": (lambda: write(norm=True), ["rope_write_kernel/bf16-d128-norm"]),
    "write int8": (lambda: write(torch.int8), ["rope_write_kernel/bf16-d128-int8"]),
    "write fp8": (lambda: write(torch.float8_e4m3fn), ["rope_write_kernel/bf16-d128-fp8"]),
    "prefill": (lambda: attend([40, 3], [40, 90]), ["attend_tiles/bf16-d128-g4-m128n64"]),
    "decode": (lambda: attend([1, 1], [40, 90]), ["attend_splits/bf16-d128-g4-m16n64"]),
    "decode, many splits": (
        lambda: attend([1, 1], [40, 900]),
        ["attend_splits/bf16-d128-g4-m16n64", "combine_splits/bf16-d128"],
    ),
    "common prefix": (
        lambda: attend([1] * 8, [512] * 8, shared=True),
        ["attend_splits/bf16-d128-g4-m64n32", "combine_splits/bf16-d128"],
    ),
    "mixed, int8": (
        lambda: attend([40, 1], [40, 90], torch.int8),
        ["attend_tiles/bf16-kv-i8-d128-g4-m128n64", "attend_splits/bf16-kv-i8-d128-g4-m16n64"],
    ),
    "mixed, fp8": (
        lambda: attend([40, 1], [40, 90], torch.float8_e4m3fn),
        ["attend_tiles/bf16-kv-fp8e4nv-d128-g4-m128n64", "attend_splits/bf16-kv-fp8e4nv-d128-g4-m16n64"],
    ),
    "sample": (lambda: draw("sample"), ["survey_kernel/any", "weigh_kernel/v128k", "pick_kernel/v128k"]),
    "best": (lambda: draw("best"), ["survey_kernel/any", "weigh_kernel/v128k", "pick_kernel/v128k"]),
    "logprobs": (
        lambda: draw("logprobs"),
        ["survey_kernel/any", "weigh_kernel/v128k-masses", "logprobs_kernel/v128k"],
    ),
    "penalties": (shape, ["shape_logits_kernel/b300-e16"]),
    "row table": (step_rows, ["decode_inputs_kernel/any", "advance_kernel/any"]),
    **{
        f"int8, {rows} rows": (
            lambda rows=rows: dense(Int8Linear, rows),
            # Weights first, and then what comes.
            ["round_rows_kernel/i8-4096"] * 2 + [f"multiply_kernel/i8-m{height}"],
        )
        for rows, height in ((5, 16), (64, 64), (200, 128))
    },
    **{
        f"fp8, {rows} rows": (
            lambda rows=rows: dense(Fp8Linear, rows),
            ["round_rows_kernel/fp8e4nv-4096", f"multiply_kernel/fp8e4nv-m{height}"],
        )
        for rows, height in ((5, 16), (64, 64), (200, 128))
    },
}


@pytest.mark.parametrize("name", CASES)
def test_a_card_gets_the_kernels_as_they_are_compiled(launches: list[Launch], name: str) -> None:
    call, expected = CASES[name]
    call()
    assert [launch.kernel for launch in launches] == [name.partition("/")[0] for name in expected]
    for launch, full_name in zip(launches, expected, strict=True):
        variant = VARIANTS[full_name]
        how = {"num_warps": variant.num_warps, "num_stages": variant.num_stages}
        # An argument that is None is one of the launch too, but not by name.
        how |= {name: value for name, value in variant.constexprs.items() if value is not None}
        assert {name: launch.options[name] for name in how} == how


def test_a_card_that_cannot_multiply_8_bit_floats_is_refused(
    launches: list[Launch], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(RuntimeError, match=r"a card has compute capability 8\.0 .* use int8"):
        Fp8Linear(wide(96, WIDTH))
