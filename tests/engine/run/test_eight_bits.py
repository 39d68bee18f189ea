"""Numbers of 8 bits that a card computes and remembers in: keys and values, dense layers in 8-bit floats."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_card
import torch
from engine_fakes import request, run_all
from tiny_card import BLOCKS, CONTEXT
from tiny_models import all_logits, open_runner, save
from tiny_tokenizers import byte_level

from pagemill.engine.cache.storage import KVStorage, block_bytes
from pagemill.engine.config import EngineConfig
from pagemill.engine.engine import Engine, build_engine
from pagemill.engine.errors import EngineError
from pagemill.engine.request import Request
from pagemill.engine.run.card_load import storage_of
from pagemill.engine.run.card_runner import CardRunner
from pagemill.engine.run.load import fingerprint
from pagemill.engine.run.memory import plan_memory
from pagemill.engine.run.runner import ModelRunner
from pagemill.engine.run.sampler import Sampler
from pagemill.engine.run.simulated_card import SimulatedCard
from pagemill.engine.tokenizer import Tokenizer
from pagemill.engine.weights.load import load_decoder, load_weights, open_checkpoint
from pagemill.kernels.choice import triton_everywhere
from pagemill.kernels.linear_fp8 import Fp8Linear

pytestmark = pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")
VOCAB, ROWS = 300, 2
CPU = torch.device("cpu")
KINDS = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
TEXT = [1 + (7 * i) % (VOCAB - 1) for i in range(70)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = save(tiny_card.one_layer(VOCAB), tmp_path_factory.mktemp("tiny") / "model")
    byte_level().save_pretrained(directory)
    return directory


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """A card says nothing of overflow and of NaN; numpy, which interprets kernels, would."""
    with np.errstate(all="ignore"):
        yield


def storage(path: Path, dtype: torch.dtype) -> KVStorage:
    """Scales are NaN wherever no row has a token."""
    made = storage_of(open_checkpoint(path).spec, BLOCKS, dtype, CPU)
    assert made.scales is not None
    made.scales.fill_(torch.nan)
    return made


def on_cpu(path: Path, dtype: torch.dtype) -> ModelRunner:
    """The plain form: memory is widened whole at each step."""
    plain = open_runner(path, BLOCKS)
    return ModelRunner(plain.decoder, storage(path, dtype), Sampler(frozenset()))


def engine_over(runner: Any, budget: int = 40, **switches: bool) -> Engine:
    return tiny_card.engine_over(runner, VOCAB, ROWS, budget=budget, **switches)


def run(engine: Engine, requests: list[Request]) -> dict[str, tuple[int, ...]]:
    return {name: completion.token_ids for name, completion in run_all(engine, requests).items()}


def rows() -> list[Request]:
    return [
        request("long", TEXT[:37], 3, temperature=0.0),
        request("same start", [*TEXT[:17], 5], 3, temperature=0.0),
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_a_card_gives_the_tokens_of_the_plain_form(path: Path, kind: str) -> None:
    with triton_everywhere():
        card = SimulatedCard()
        model = load_weights(open_checkpoint(path), torch.float32, card.device)
        runner = CardRunner(
            model, storage(path, KINDS[kind]), Sampler(frozenset()), card, max_rows=ROWS, context=CONTEXT
        )
        found = run(engine_over(runner), rows())
        assert runner.stats.graphs > 1 and runner.stats.eager > 1
    assert found == run(engine_over(on_cpu(path, KINDS[kind])), rows())


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_the_same_tokens_in_chunks_with_hits_and_alone(path: Path, kind: str) -> None:
    """A token's numbers are rounded by themselves, so no neighbour and no border of a chunk changes them."""
    expected = run(engine_over(on_cpu(path, KINDS[kind]), 200, prefix_cache=False), rows())
    assert run(engine_over(on_cpu(path, KINDS[kind]), 7), rows()) == expected
    alone = {}
    for one in rows():
        alone |= run(engine_over(on_cpu(path, KINDS[kind])), [one])
    assert alone == expected


@pytest.mark.parametrize(("kind", "near"), [("int8", 0.02), ("fp8", 0.08)])
def test_logits_are_near_those_of_a_memory_that_rounds_nothing(path: Path, kind: str, near: float) -> None:
    exact, rounded = all_logits(open_runner(path, BLOCKS), TEXT), all_logits(on_cpu(path, KINDS[kind]), TEXT)
    error = float((rounded - exact).std() / exact.std())
    assert 0 < error < near


def test_a_block_counts_its_scales() -> None:
    made = KVStorage(3, 2, 4, 64, torch.int8, CPU)
    assert made.scales is not None
    assert 3 * block_bytes(2, 4, 64, torch.int8) == made.tensor.nbytes + made.scales.nbytes
    assert block_bytes(2, 4, 64, torch.bfloat16) / block_bytes(2, 4, 64, torch.int8) == 128 / 68


@pytest.mark.parametrize("kind", KINDS)
def test_a_broken_row_leaves_nothing_behind_in_its_blocks(path: Path, kind: str) -> None:
    made = storage(path, KINDS[kind])
    made.clear(torch.tensor([2, 5]))
    assert made.scales is not None
    assert [block for block in range(BLOCKS) if not made.scales[block].isnan().any()] == [2, 5]
    assert not made.scales[[2, 5]].any()


def test_an_engine_on_a_card_says_and_shows_what_it_was_told(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "pagemill")
    config = EngineConfig(
        str(path), "float32", kv_cache_gb=1e-4, max_num_tokens=16, max_num_seqs=1, quantization="fp8",
        kv_cache_dtype="fp8",
    )  # fmt: skip
    with triton_everywhere():
        engine = build_engine(config, card=SimulatedCard(capability=(8, 9)))
        done = run_all(engine, [request("a", TEXT[:9], 2, temperature=0.0, ignore_eos=True)])
    assert len(done["a"].token_ids) == 2
    assert "fp8 and float32 on" in caplog.messages[-1]
    assert "key-value memory in fp8" in caplog.messages[-1]
    assert (engine.model_info.quantization, engine.model_info.kv_cache_dtype) == ("fp8", "fp8")
    plain = plan_memory(open_checkpoint(path).spec, torch.float32, replace(config, kv_cache_dtype=None))
    assert engine.model_info.num_blocks > 3 * plain.num_blocks


def test_what_decides_tokens_is_in_the_fingerprint(path: Path) -> None:
    checkpoint, tokenizer = open_checkpoint(path), Tokenizer.from_path(str(path))
    settings: list[dict[str, Any]] = [{}, {"quantization": "fp8"}, {"quantization": "int8"}]
    settings += [{"kv_cache_dtype": kind} for kind in KINDS]
    configs = [EngineConfig(str(path), **chosen) for chosen in settings]
    found = {fingerprint(checkpoint, tokenizer, torch.bfloat16, config) for config in configs}
    assert len(found) == len(configs)


def test_dense_layers_in_fp8_are_near_the_exact_ones_and_rows_break_alone(path: Path) -> None:
    checkpoint = open_checkpoint(path)
    decoder = load_decoder(checkpoint, torch.float32, CPU, "fp8")
    assert isinstance(decoder.head, Fp8Linear)
    exact = open_runner(path, BLOCKS)
    rounded = ModelRunner(decoder, exact.storage, Sampler(frozenset()))
    right = all_logits(exact, TEXT)
    found = all_logits(rounded, TEXT)
    assert 0 < float((found - right).std() / right.std()) < 0.15
    x = torch.randn(3, decoder.head.in_features)
    alone = decoder.head(x[:1])
    x[1] = torch.inf
    assert torch.equal(decoder.head(x)[:1], alone)
    assert decoder.head(x)[1].isnan().all()


@pytest.mark.parametrize(
    ("settings", "capability", "reason"),
    [
        ({"kv_cache_dtype": "int8"}, None, "kv_cache_dtype int8 need.* a CUDA card: leave it out on a CPU"),
        ({"quantization": "fp8"}, None, "quantization fp8 need.* a CUDA card; int8 dense layers a CPU has"),
        ({"kv_cache_dtype": "fp8"}, (8, 0), r"capability 8.0 and no 8-bit floats, which need 8.9 .*use int8"),
        ({"quantization": "fp8"}, (8, 6), r"capability 8.6 and no 8-bit floats"),
    ],
)
def test_a_device_without_such_kernels_is_refused_before_weights_are_read(
    path: Path, settings: dict[str, str], capability: tuple[int, int] | None, reason: str
) -> None:
    card = None if capability is None else SimulatedCard(capability=capability)
    (path / "model.safetensors").rename(path / "away")
    try:
        with pytest.raises(EngineError, match=reason):
            build_engine(EngineConfig(str(path), device="auto" if card else "cpu", **settings), card=card)
    finally:
        (path / "away").rename(path / "model.safetensors")


def test_deterministic_and_fp8_exclude_each_other() -> None:
    with pytest.raises(EngineError, match="deterministic holds for int8"):
        EngineConfig("nowhere", deterministic=True, quantization="fp8")
    with pytest.raises(EngineError, match="kv_cache_dtype must be int8, fp8 or left out, not 'int4'"):
        EngineConfig("nowhere", kv_cache_dtype="int4")
