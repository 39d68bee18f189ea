"""Norms, gated activations, rotation with the write to memory, shaping of logits and the row table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

import torch
from torch import Tensor

from gpu_check.case import Case, Results, Trial
from gpu_check.compare import EXACT, ROUNDED, Tolerance
from gpu_check.setting import DTYPE_NAMES, Setting
from pagemill.kernels import (
    activation_triton,
    norm_triton,
    rope_write_triton,
    row_table_triton,
    shape_logits_triton,
)
from pagemill.kernels.row_table import DecodeInputs, RowTable, advance_torch, decode_inputs_torch
from pagemill.kernels.shape_logits import IN_PROMPT, Shaping, shape_logits_torch

BLOCK = 16


def cases(setting: Setting) -> Iterator[Case]:
    for dtype in setting.all_dtypes:
        widths = (40,) if setting.dry else (64, 577, 2304, 4096, 8192)
        for width in widths:
            for wide in (False, True):
                yield _norm(dtype, width, wide)
                yield _added_norm(dtype, width, wide)
            for gelu in (False, True):
                yield _gate(dtype, width, gelu)
        shapes = ((16, 8),) if setting.dry else ((64, 32), (80, 40), (96, 36), (128, 64), (256, 128))
        for head_dim, half in shapes:
            yield _rope(dtype, head_dim, half, norm=None)
            yield _rope(dtype, head_dim, half, norm=dtype)
        yield _rope(dtype, *shapes[-1], norm=torch.float32)
    for stored in (torch.int8, torch.float8_e4m3fn):
        yield _rope_in_eight_bits(setting.sixteen, 16 if setting.dry else 128, stored)
    for vocabulary in (300,) if setting.dry else (37, 4_100, 151_936):
        yield _shaping(vocabulary)
    for rows in (5,) if setting.dry else (1, 129, 1024):
        yield _decode_inputs(rows)
        yield _advance(rows)


def _numbers(random: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=random, device=random.device).to(dtype)


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.double()
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight.double()


def _norm(dtype: torch.dtype, width: int, wide: bool) -> Case:
    def make(random: torch.Generator) -> Trial:
        x = _numbers(random, 37, 2, width, dtype=dtype)[:, 1]
        weight = _numbers(random, width, dtype=torch.float32 if wide else dtype)
        run = lambda: (norm_triton.rms_norm(x, weight, 1e-5),)  # noqa: E731
        return Trial(run, lambda: (_normed(x, weight, 1e-5),), [ROUNDED[dtype]])

    return Case(f"rms_norm: {width} {DTYPE_NAMES[dtype]}{', weight in fp32' * wide}", make)


def _added_norm(dtype: torch.dtype, width: int, inner: bool) -> Case:
    """With an inner norm as Gemma has it, whose weights are in float32."""

    def make(random: torch.Generator) -> Trial:
        residual = _numbers(random, 33, 2, width, dtype=dtype)
        x = _numbers(random, 33, 3, width, dtype=dtype)[:, 1]
        weights = _numbers(random, 2, width, dtype=torch.float32 if inner else dtype)

        def run() -> Results:
            whole = residual.clone()
            inside = weights[0] if inner else None
            out = norm_triton.add_rms_norm(whole[:, 0], x, weights[1], 1e-6, inside)
            return out, whole[:, 0], whole[:, 1]

        def expected() -> Results:
            added = _normed(x, weights[0], 1e-6).to(dtype).double() if inner else x.double()
            # The next layer reads the rounded sum, and so does the norm.
            total = (residual[:, 0].double() + added).to(dtype)
            return _normed(total, weights[1], 1e-6), total, residual[:, 1]

        return Trial(run, expected, [ROUNDED[dtype], ROUNDED[dtype], EXACT])

    return Case(f"add_rms_norm: {width} {DTYPE_NAMES[dtype]}{', inner norm' * inner}", make)


def _gate(dtype: torch.dtype, width: int, gelu: bool) -> Case:
    def make(random: torch.Generator) -> Trial:
        x = _numbers(random, 29, 2 * width, dtype=dtype)

        def expected() -> Results:
            gate, up = x.double().chunk(2, -1)
            if gelu:
                return (torch.nn.functional.gelu(gate, approximate="tanh") * up,)
            return (torch.nn.functional.silu(gate) * up,)

        return Trial(lambda: (activation_triton.gate(x, gelu=gelu),), expected, [ROUNDED[dtype]])

    return Case(f"{'gelu' if gelu else 'silu'}_mul: {width} {DTYPE_NAMES[dtype]}", make)


NUM_HEADS, KV_HEADS, TOKENS = 4, 2, 41


class Turned:
    """Random heads of some tokens, their angles, and places for them in a memory of which nobody else may be
    touched."""

    def __init__(
        self, random: torch.Generator, dtype: torch.dtype, head_dim: int, half: int, norm: torch.dtype | None
    ) -> None:
        device = random.device
        positions = torch.randint(0, 9000, (TOKENS, 1, 1), generator=random, device=device)
        angles = positions * torch.rand((half,), generator=random, device=device)
        self.cos, self.sin = angles.cos().to(dtype), angles.sin().to(dtype)
        self.heads = _numbers(random, TOKENS, 2, NUM_HEADS + 2 * KV_HEADS, head_dim, dtype=dtype)
        places = torch.randperm(TOKENS + 55, generator=random, device=device)[:TOKENS]
        self.blocks, self.offsets = places // BLOCK, places % BLOCK
        self.count = (TOKENS + 55) // BLOCK + 1
        self.norm = None if norm is None else _numbers(random, NUM_HEADS + KV_HEADS, head_dim, dtype=norm)
        self.half = half

    def expected(self) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values in float64."""
        heads = self.heads[:, 1].double()
        turning = heads[:, : NUM_HEADS + KV_HEADS]
        if self.norm is not None:
            turning = _normed(turning, self.norm, 1e-6)
        first, second = turning[..., : self.half], turning[..., self.half : 2 * self.half]
        cos, sin = self.cos.double(), self.sin.double()
        rest = turning[..., 2 * self.half :]
        turned = torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)
        return turned[:, :NUM_HEADS], turned[:, NUM_HEADS:], heads[:, NUM_HEADS + KV_HEADS :]

    def run(self, layer: Tensor, scales: Tensor | None = None) -> Tensor:
        heads = self.heads.clone()[:, 1]
        rope_write_triton.rope_write(
            heads, NUM_HEADS, self.cos, self.sin, layer, self.blocks, self.offsets,
            norm=self.norm, eps=1e-6, scales=scales,
        )  # fmt: skip
        return heads[:, :NUM_HEADS]

    def storage(self, head_dim: int, dtype: torch.dtype) -> Tensor:
        shape = (self.count, 3, 2, KV_HEADS, head_dim * BLOCK)
        return torch.full(shape, 77.0, device=self.heads.device).to(dtype)

    def written(self, layer: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
        """Keys and values at the tokens' places [tokens, kv_heads, head_dim]."""
        keys = layer[:, 0].unflatten(2, (head_dim, BLOCK))[self.blocks, :, :, self.offsets]
        values = layer[:, 1].unflatten(2, (BLOCK, head_dim))[self.blocks, :, self.offsets]
        return keys, values

    def others(self, storage: Tensor, head_dim: int) -> Tensor:
        """All that was not to be written, which has to be 77."""
        rest = storage.clone().float()
        keys = rest[:, 1, 0].unflatten(2, (head_dim, BLOCK))
        keys[self.blocks, :, :, self.offsets] = 77.0
        values = rest[:, 1, 1].unflatten(2, (BLOCK, head_dim))
        values[self.blocks, :, self.offsets] = 77.0
        return rest


def _rope(dtype: torch.dtype, head_dim: int, half: int, norm: torch.dtype | None) -> Case:
    def make(random: torch.Generator) -> Trial:
        turned = Turned(random, dtype, head_dim, half, norm)

        def run() -> Results:
            storage = turned.storage(head_dim, dtype)
            query = turned.run(storage[:, 1])
            return query, *turned.written(storage[:, 1], head_dim), turned.others(storage, head_dim)

        def expected() -> Results:
            rest = torch.full_like(turned.storage(head_dim, dtype), 77.0, dtype=torch.float32)
            return *turned.expected(), rest

        # Two products, each rounded, and a norm before them: numbers of about 4.
        near = ROUNDED[dtype]
        near = Tolerance(2 * near.relative, 4 * near.absolute, 2 * near.norm)
        return Trial(run, expected, [near, near, EXACT, EXACT])

    name = f"rope_write: {head_dim}, {2 * half} turned, {DTYPE_NAMES[dtype]}"
    return Case(name + ("" if norm is None else f", norm in {DTYPE_NAMES[norm]}"), make)


def _rope_in_eight_bits(dtype: torch.dtype, head_dim: int, stored: torch.dtype) -> Case:
    """What is read back is what was written, to half a step: of the largest number of the token in int8, of
    each number in e4m3."""

    def make(random: torch.Generator) -> Trial:
        turned = Turned(random, dtype, head_dim, head_dim // 2, None)

        def run() -> Results:
            storage = turned.storage(head_dim, stored)
            scales = torch.full((turned.count, 3, 2, KV_HEADS, BLOCK), 5.0, device=random.device)
            turned.run(storage[:, 1], scales[:, 1])
            keys, values = turned.written(storage[:, 1], head_dim)
            mine = scales[:, 1][turned.blocks, :, :, turned.offsets]
            read = keys.float() * mine[:, 0, :, None], values.float() * mine[:, 1, :, None]
            return *read, turned.others(storage, head_dim)

        def expected() -> Results:
            _, keys, values = turned.expected()
            # 77 as the dtype has it (80 in e4m3).
            rest = turned.storage(head_dim, stored).float()
            return keys, values, turned.others(rest, head_dim)

        # The largest of 128 normal numbers is below 6: half a step is 6 / 127 / 2.
        near = Tolerance(4e-3, 0.03, 0.015) if stored == torch.int8 else Tolerance(0.07, 0.02, 0.04)
        return Trial(run, expected, [near, near, EXACT])

    name = str(stored).removeprefix("torch.")
    return Case(f"rope_write: {head_dim}, {DTYPE_NAMES[dtype]} into {name}", make)


def _shaping(vocabulary: int) -> Case:
    def make(random: torch.Generator) -> Trial:
        shaping = random_shaping(random, 7, vocabulary, min(40, vocabulary // 3), 5)
        logits = _numbers(random, 4, 2, vocabulary)
        slots = torch.tensor([5, -1, 0, 4], device=random.device)

        def run() -> Results:
            whole = logits.clone()
            shape_logits_triton.shape_logits(whole[:, 0], slots, shaping)
            return whole[:, 0], whole[:, 1]

        def expected() -> Results:
            whole = logits.clone()
            shape_logits_torch(whole[:, 0], slots, shaping)
            return whole[:, 0], whole[:, 1]

        return Trial(run, expected, [Tolerance(1e-6, 1e-6, 1e-6), EXACT])

    return Case(f"shape_logits: {vocabulary}", make)


def random_shaping(random: torch.Generator, slots: int, vocabulary: int, biases: int, ends: int) -> Shaping:
    """Of slots of which every third shapes nothing."""
    device = random.device

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=random, device=device)

    def some(count: int) -> Tensor:
        found = uniform(slots, vocabulary).topk(count, dim=1).indices.to(torch.int32)
        found[uniform(slots, count) < 0.3] = -1
        return found

    plain = torch.arange(slots, device=device) % 3 == 0
    output = (uniform(slots, vocabulary) * 7 - 3).to(torch.int32).clamp(min=0)
    prompt = (uniform(slots, vocabulary) < 0.5).to(torch.int32)
    return Shaping(
        output + prompt * IN_PROMPT,
        _numbers(random, slots) * ~plain,
        _numbers(random, slots) * ~plain,
        torch.where(plain, 1.0, 0.5 + uniform(slots)),
        some(biases),
        _numbers(random, slots, biases),
        some(ends),
        (uniform(slots) * 2).to(torch.int32) * 5,
        torch.full((slots,), 4, dtype=torch.int32, device=device),
    )


def _table(random: torch.Generator, slots: int, blocks: int) -> RowTable:
    def integers(low: int, high: int, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.randint(low, high, shape, generator=random, device=random.device, dtype=dtype)

    computed = integers(0, blocks * BLOCK, slots)
    noise = integers(-(2**62), 2**62, slots, dtype=torch.int64) * 2 + 1
    last, places = integers(0, 2**18, slots), integers(0, 2**20, slots, blocks)
    return RowTable(computed + 1, computed, last, places, noise)


def _parts(record: object) -> Results:
    return tuple(getattr(record, field.name) for field in fields(record))  # type: ignore[arg-type]


def _on_cpu(table: RowTable) -> RowTable:
    return RowTable(*(part.cpu().clone() for part in _parts(table)))


def _slots(random: torch.Generator, rows: int, of: int, none: int) -> Tensor:
    slots = torch.randperm(of, generator=random, device=random.device)[:rows]
    slots[none::3] = -1
    return slots


def _decode_inputs(rows: int) -> Case:
    def make(random: torch.Generator) -> Trial:
        table = _table(random, rows + 70, 5)
        slots = _slots(random, rows, rows + 70, 1)

        def run() -> Results:
            out = DecodeInputs.empty(rows, random.device)
            row_table_triton.decode_inputs(table, slots, 4321, out)
            return _parts(out)

        def expected() -> Results:
            out = DecodeInputs.empty(rows, torch.device("cpu"))
            decode_inputs_torch(_on_cpu(table), slots.cpu(), 4321, out)
            return _parts(out)

        return Trial(run, expected, [EXACT] * 6)

    return Case(f"row table, inputs of a step: {rows} rows", make)


def _advance(rows: int) -> Case:
    def make(random: torch.Generator) -> Trial:
        table = _table(random, rows + 70, 2)
        slots = _slots(random, rows, rows + 70, 1)
        tokens = torch.randint(0, 2**18, (rows,), generator=random, device=random.device)

        def run() -> Results:
            mine = RowTable(*(part.clone() for part in _parts(table)))
            row_table_triton.advance(mine, slots, tokens)
            return _parts(mine)

        def expected() -> Results:
            theirs = _on_cpu(table)
            advance_torch(theirs, slots.cpu(), tokens.cpu())
            return _parts(theirs)

        return Trial(run, expected, [EXACT] * 5)

    return Case(f"row table, tokens into it: {rows} rows", make)
