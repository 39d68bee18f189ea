"""The decoder's layers as one program of compiled kernels, for a CPU: a step is one call.

The same kernels in the same order as the layers call them one by one, over the same numbers, so it changes no
bit; it saves what calling costs (kernels/cpu_program.py). Serves a decoder whose every part is compiled for
its dtype; any other, and any other memory, goes layer by layer.

Knows layers and tensors; it may not know rows, requests or sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pagemill.engine.cache.storage import KVStorage
from pagemill.kernels import attention_cpu, cpu_program, dense_phases, small_cpu
from pagemill.kernels.attention_cpu_items import Shape
from pagemill.kernels.choice import takes_compiled
from pagemill.kernels.cpu_program import Phase, Program
from pagemill.kernels.dense_phases import Compiled
from pagemill.kernels.linear_cpu_words import ADD, GATE, STORE
from pagemill.kernels.small_cpu_words import OUT

if TYPE_CHECKING:
    from pagemill.engine.models.decoder import Angles, Decoder, Inputs, Layer

# Room is made for so many tokens more whenever a step has more than there is room for.
ROOM = 64


@dataclass(frozen=True, slots=True)
class _Parts:
    """One layer's dense parts as they are computed."""

    qkv: Compiled
    output: Compiled
    gated: Compiled
    down: Compiled


@dataclass(slots=True)
class _Made:
    """A program for so many tokens at most, one memory and number of threads; keeps alive what it uses."""

    program: Program
    residual: Tensor
    tokens: int
    storage: KVStorage
    threads: int
    buffers: tuple[Tensor, ...]


class LayerProgram:
    """Runs all layers of a decoder and the norm behind them."""

    def __init__(self, decoder: Decoder, parts: Sequence[_Parts]) -> None:
        self.spec, self.dtype = decoder.spec, decoder.dtype
        self.layers, self.norm = decoder.layers, decoder.norm
        self.parts = parts
        self._made: _Made | None = None

    @classmethod
    def of(cls, decoder: Decoder) -> LayerProgram | None:
        """None where some part of the decoder is not compiled."""
        spec, dtype = decoder.spec, decoder.dtype
        ropes = [decoder.rope, *([decoder.window_rope] if decoder.window_rope else [])]
        sample = torch.empty(0, 1, spec.head_dim, dtype=dtype, device=decoder.embedding.device)
        angles = torch.empty(0, 1, ropes[0].frequencies.shape[-1])
        if (
            spec.post_norms
            or spec.hidden_size % 16
            or not takes_compiled(decoder.embedding)
            or not small_cpu.turns(sample, angles)
            or any(rope.frequencies.shape != ropes[0].frequencies.shape for rope in ropes)
            or attention_cpu.refusal(spec.head_dim, dtype) is not None
            or cpu_program.why_not() is not None
        ):
            return None
        parts = [_parts_of(layer, dtype) for layer in decoder.layers]
        whole = [part for part in parts if part is not None]
        return cls(decoder, whole) if len(whole) == len(parts) else None

    def serves(self, storage: KVStorage) -> bool:
        return (
            storage.scales is None and storage.tensor.dtype == self.dtype and takes_compiled(storage.tensor)
        )

    def run(
        self, residual: Tensor, inputs: Inputs, angles: tuple[Angles, Angles], storage: KVStorage
    ) -> Tensor:
        """residual [tokens, hidden], embedded; angles of layers that see all and of those with a window.

        Returns hidden states [tokens, hidden] after the last norm.
        """
        tokens = residual.shape[0]
        made = self._made_for(tokens, storage)
        made.residual[:tokens] = residual
        out = torch.empty_like(residual)
        words, program = made.program.words, made.program
        words[program.calls("last"), OUT] = out.data_ptr()
        spec = self.spec
        shape = Shape(
            spec.num_heads // spec.num_kv_heads, spec.num_kv_heads, spec.head_dim, self.dtype.itemsize
        )
        for window in {layer.window for layer in self.layers}:
            places = small_cpu.rope_places(*angles[window is not None], inputs.blocks, inputs.offsets)
            _put(program, f"rope {window}", places)
            plan = attention_cpu.plan_step(inputs.rows, shape, window, made.threads)
            _put(program, f"attention {window}", attention_cpu.plan_places(plan))
        program.run(tokens, made.threads)
        return out

    def _made_for(self, tokens: int, storage: KVStorage) -> _Made:
        made, threads = self._made, torch.get_num_threads()
        if made is None or made.tokens < tokens or made.storage is not storage or made.threads != threads:
            room = -(-tokens // ROOM) * ROOM
            self._made = made = None  # its buffers go before others are taken
            self._made = made = self._make(room, storage, threads)
        return made

    def _make(self, room: int, storage: KVStorage, threads: int) -> _Made:
        spec = self.spec
        width = spec.query_size + 2 * spec.kv_size

        def buffer(size: int) -> Tensor:
            return torch.empty(room, size, dtype=self.dtype)

        residual, x, attended = buffer(spec.hidden_size), buffer(spec.hidden_size), buffer(spec.query_size)
        projected, inner = buffer(width), buffer(spec.intermediate_size)
        heads = projected.view(room, -1, spec.head_dim)
        dense = [layer for part in self.parts for layer in (part.qkv, part.output, part.gated, part.down)]
        scratch = dense_phases.scratch_of(dense, room, threads)

        def of(layer: Compiled, source: Tensor, target: Tensor, into: int) -> list[Phase]:
            return dense_phases.phases(layer, source, target, into, scratch, threads)

        def norm(weight: Tensor, name: str = "") -> Phase:
            return small_cpu.norm_phase(residual, weight, spec.norm_eps, x, name)

        phases = [norm(self.layers[0].input_norm)]
        following = [layer.input_norm for layer in self.layers[1:]]
        for i, (layer, part) in enumerate(zip(self.layers, self.parts, strict=True)):
            memory = storage.layer(i)
            query, out = heads[:, : spec.num_heads], attended.view(room, spec.num_heads, spec.head_dim)
            phases += [
                *of(part.qkv, x, projected, STORE),
                small_cpu.rope_phase(
                    heads, spec.num_heads, memory, layer.qk_norm, spec.norm_eps, f"rope {layer.window}"
                ),
                attention_cpu.phase(
                    query, memory, out, spec.scale, spec.attention_softcap, f"attention {layer.window}"
                ),
                *of(part.output, attended, residual, ADD),
                norm(layer.mlp_norm),
                *of(part.gated, x, inner, GATE),
                *of(part.down, inner, residual, ADD),
                norm(following[i]) if i < len(following) else norm(self.norm, "last"),
            ]
        buffers = (x, attended, projected, inner, scratch)
        return _Made(Program(phases), residual, room, storage, threads, buffers)


def _parts_of(layer: Layer, dtype: torch.dtype) -> _Parts | None:
    found = [
        dense_phases.compiled(part, dtype) for part in (layer.qkv, layer.output, layer.gated, layer.down)
    ]
    whole = [part for part in found if part is not None]
    return _Parts(*whole) if len(whole) == len(found) else None


def _put(program: Program, name: str, places: dict[int, int]) -> None:
    calls = program.calls(name)
    for place, value in places.items():
        program.words[calls, place] = value
