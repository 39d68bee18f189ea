"""`deterministic`: a row's logits are the same to the last bit, whatever is beside it and however it is cut.

The model has shapes that the compiled dense layers take and shapes that they do not (its vocabulary and its
feed-forward part are no multiples of sixteen).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tiny_models import save, tiny_llama, tiny_model
from tiny_tokenizers import byte_level
from torch import Tensor
from transformers import GPTNeoXConfig

from pagemill.engine.batch import Batch
from pagemill.engine.cache.storage import KVStorage
from pagemill.engine.config import EngineConfig
from pagemill.engine.errors import ModelLoadError
from pagemill.engine.models.decoder import Decoder
from pagemill.engine.request import Request, SamplingParams
from pagemill.engine.run.load import LoadedModel, load_model
from pagemill.engine.run.preview import preview
from pagemill.engine.run.rows import build_rows
from pagemill.engine.sequence import Sequence
from pagemill.engine.weights.load import load_decoder, open_checkpoint
from pagemill.kernels import attention_cpu
from pagemill.kernels.linear import InvariantLinear, Linear

VOCABULARY = 509
TEXTS = [
    [(13 * row + 29 * i + 5) % VOCABULARY for i in range(length)] for row, length in enumerate((70, 33, 5))
]
# Tokens of each text in each step.
ALONE = [(70, 0, 0), (0, 33, 0), (0, 0, 5)]
TOGETHER = [(70, 33, 5)]
CHUNKS = [(1, 33, 0), (16, 0, 5), (1, 0, 0), (35, 0, 0), *[(1, 0, 0)] * 17]
KINDS = ["float32", "bfloat16", "int8", "int8-bfloat16"]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("tiny")
    save(tiny_llama(vocab_size=VOCABULARY, intermediate_size=88, attention_bias=True), place)
    byte_level().save_pretrained(place)
    return place


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def decoder_of(path: Path, kind: str) -> tuple[Decoder, torch.dtype]:
    dtype = torch.bfloat16 if "bfloat16" in kind else torch.float32
    quantization = "int8" if kind.startswith("int8") else None
    return load_decoder(open_checkpoint(path), dtype, torch.device("cpu"), quantization, True), dtype


@torch.inference_mode()
def logits_of(decoder: Decoder, dtype: torch.dtype, steps: list[tuple[int, ...]]) -> list[Tensor]:
    """Logits of every token of each text, computed in these steps."""
    spec = decoder.spec
    storage = KVStorage(20, spec.num_layers, spec.num_kv_heads, spec.head_dim, dtype, torch.device("cpu"))
    rows, parts = [], [[] for _ in TEXTS]  # type: ignore[var-annotated]
    for i, text in enumerate(TEXTS):
        rows.append(Sequence.of(Request(str(i), tuple(text), SamplingParams(1)), i))
        rows[i].block_table = list(range(6 * i, 6 * i + 6))
    for step in steps:
        chosen = [i for i, count in enumerate(step) if count]
        counts = [step[i] for i in chosen]
        batch = Batch(tuple(rows[i] for i in chosen), tuple(counts))
        logits = decoder.logits(decoder.hidden(build_rows(batch, storage).inputs, storage))
        for i, count, part in zip(chosen, counts, logits.split(counts), strict=True):
            parts[i].append(part)
            rows[i].num_computed_tokens += count
    return [torch.cat(part) for part in parts]


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_the_same_bits_alone_together_and_in_chunks(path: Path, kind: str, threads: None) -> None:
    decoder, dtype = decoder_of(path, kind)
    torch.set_num_threads(1)
    alone = logits_of(decoder, dtype, ALONE)
    assert all(found.isfinite().all() and found.std() > 0 for found in alone)
    for number, steps in ((1, TOGETHER), (1, CHUNKS), (2, TOGETHER)):
        torch.set_num_threads(number)
        for row, (found, expected) in enumerate(zip(logits_of(decoder, dtype, steps), alone, strict=True)):
            # Only what was computed: the second kind of steps leaves out nothing, the others neither.
            assert torch.equal(found, expected), (number, steps, row)


def test_rows_of_a_wide_layer_are_their_own_and_near_the_exact_product() -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(96, 4096).bfloat16(), torch.randn(64, 4096).bfloat16()
    layer = InvariantLinear(weight)
    whole = layer(x)
    for count in (1, 2, 3, 5, 8, 17, 33):
        assert torch.equal(layer(x[:count]), whole[:count])
    exact = (x.double() @ weight.double().T).bfloat16()
    assert (whole == exact).float().mean() > 0.999


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("outputs", "inputs"), [(48, 64), (50, 64), (48, 66), (7, 3), (1, 1)])
def test_any_shape_is_the_product_in_its_own_bits(dtype: torch.dtype, outputs: int, inputs: int) -> None:
    torch.manual_seed(outputs + inputs)
    weight, bias = torch.randn(outputs, inputs).to(dtype), torch.randn(outputs).to(dtype)
    x = torch.randn(37, inputs).to(dtype)
    layer = InvariantLinear(weight, bias)
    expected = x.double() @ weight.double().T + bias.double()
    torch.testing.assert_close(
        layer(x).double(), expected, atol=1e-5 if dtype == torch.float32 else 0.05, rtol=0.01
    )
    assert layer(x).dtype == dtype
    for begin, end in ((0, 1), (5, 9), (36, 37), (0, 36)):
        assert torch.equal(layer(x[begin:end]), layer(x)[begin:end])
    residual = torch.randn(37, outputs).to(dtype)
    before, added = residual.clone(), residual.double() + expected
    layer.add_to(residual, x)
    # Rounded once or twice, by what is compiled for the shape.
    near = 1e-5 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(residual.double(), added, atol=near, rtol=0.01)
    for begin, end in ((0, 1), (5, 9), (0, 36)):
        part = before[begin:end].clone()
        layer.add_to(part, x[begin:end])
        assert torch.equal(part, residual[begin:end])


def open_model(path: Path, **config: object) -> LoadedModel:
    return load_model(EngineConfig(str(path), num_blocks=20, deterministic=True, **config))  # type: ignore[arg-type]


def test_float32_is_the_same_with_and_without_the_switch(path: Path) -> None:
    """Where the compiled layers take all shapes: it costs nothing, and jobs may go on under either."""
    with_it = open_model(path, dtype="float32").info.fingerprint
    assert load_model(EngineConfig(str(path), num_blocks=20, dtype="float32")).info.fingerprint == with_it
    half = open_model(path, dtype="bfloat16").info.fingerprint
    assert load_model(EngineConfig(str(path), num_blocks=20, dtype="bfloat16")).info.fingerprint != half
    # Neither shapes that come in whole panels nor others go another way.
    for outputs, inputs in ((32, 64), (33, 66)):
        weight, x = torch.randn(outputs, inputs), torch.randn(5, inputs)
        assert torch.equal(Linear(weight)(x), InvariantLinear(weight)(x))


def test_what_cannot_be_promised_is_refused(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    foreign = save(tiny_model(GPTNeoXConfig(vocab_size=VOCABULARY, **sizes)), tmp_path / "foreign")
    byte_level().save_pretrained(foreign)
    with pytest.raises(ModelLoadError, match="GPTNeoXForCausalLM runs through the code of transformers"):
        open_model(foreign, dtype="float32")
    monkeypatch.setattr(attention_cpu, "refusal", lambda *_: "numba does not load (no reason)")
    with pytest.raises(ModelLoadError, match="cannot be promised, since numba does not load"):
        open_model(path, dtype="float32")
    found = preview(EngineConfig(str(path), dtype="float32", deterministic=True))
    assert not found.runs
    assert "cannot be promised" in str(found.reason)
