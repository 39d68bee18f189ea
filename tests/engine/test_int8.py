"""quantization="int8" through the whole engine: rows stay independent, break alone, and are told apart."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_fakes import check, request
from tiny_models import prompts, save, tiny_llama
from tiny_tokenizers import byte_level

from pagemill.engine.config import EngineConfig
from pagemill.engine.engine import Engine, build_engine
from pagemill.engine.errors import EngineError
from pagemill.engine.request import Completion, Request
from pagemill.engine.weights.load import load_decoder, open_checkpoint
from pagemill.kernels import linear_int8_cpu
from pagemill.kernels.linear_int8 import Int8Linear

VOCABULARY = 520


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = save(tiny_llama(vocab_size=VOCABULARY), tmp_path_factory.mktemp("model") / "tiny")
    byte_level().save_pretrained(path)
    return path


def engine(directory: Path, *, dtype: str = "float32", budget: int = 512, blocks: int = 64) -> Engine:
    config = EngineConfig(
        str(directory), dtype, quantization="int8", num_blocks=blocks, max_num_tokens=budget, threads=1
    )
    return build_engine(config)


def run(engine: Engine, rows: list[Request]) -> dict[str, Completion]:
    for row in rows:
        engine.add(row)
    done = {}
    while engine.has_work:
        done.update({completion.request_id: completion for completion in engine.step()})
        check(engine)
    return done


def rows() -> list[Request]:
    return [
        request(f"{i}", ids, 12, seed=i, temperature=0.0 if i % 2 else 1.0)
        for i, ids in enumerate(prompts(9, VOCABULARY))
    ]


def tokens(done: dict[str, Completion]) -> dict[str, tuple[int, ...]]:
    return {name: completion.token_ids for name, completion in done.items()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_gets_the_same_tokens_alone_in_pieces_and_in_company(directory: Path, dtype: str) -> None:
    together = tokens(run(engine(directory, dtype=dtype), rows()))
    pieces = run(engine(directory, dtype=dtype, budget=7, blocks=9), rows())
    assert tokens(pieces) == together
    alone: dict[str, tuple[int, ...]] = {}
    for row in rows():
        alone |= tokens(run(engine(directory, dtype=dtype), [row]))
    assert alone == together


def test_a_row_without_finite_numbers_ends_alone(directory: Path) -> None:
    clean = tokens(run(engine(directory), rows()))
    used = {token for row in rows() for token in (*row.prompt_token_ids, *clean[row.request_id])}
    bad = next(token for token in range(VOCABULARY) if token not in used)
    for number in (torch.inf, torch.nan):
        hurt = engine(directory)
        hurt.runner.decoder.embedding[bad] = number  # type: ignore[attr-defined]
        done = run(hurt, [request("broken", [3, bad, 4], 5, temperature=0.0), *rows()])
        assert done.pop("broken").error_code == "numeric_error"
        assert tokens(done) == clean


def test_the_answers_are_mostly_those_of_float32(directory: Path) -> None:
    exact = build_engine(EngineConfig(str(directory), "float32", num_blocks=64, threads=1))
    greedy = [request(f"{i}", ids, 1, temperature=0.0) for i, ids in enumerate(prompts(40, VOCABULARY))]
    mine, theirs = tokens(run(engine(directory), greedy)), tokens(run(exact, greedy))
    assert sum(mine[name] == theirs[name] for name in theirs) >= 30


def test_it_is_named_in_fingerprint_and_info(directory: Path) -> None:
    plain = build_engine(EngineConfig(str(directory), "float32", num_blocks=9, threads=1)).model_info
    info = engine(directory).model_info
    assert (info.quantization, info.dtype, plain.quantization) == ("int8", "float32", None)
    assert info.fingerprint != plain.fingerprint


def test_every_dense_layer_is_quantised_and_no_other(directory: Path) -> None:
    decoder = load_decoder(open_checkpoint(directory), torch.float32, torch.device("cpu"), "int8")
    layer = decoder.layers[0]
    dense = [decoder.head, layer.qkv, layer.output, layer.down]
    assert all(isinstance(layer, Int8Linear) for layer in dense)
    assert isinstance(layer.gated.whole, linear_int8_cpu.Layer)
    assert decoder.embedding.dtype == decoder.norm.dtype == torch.float32


def test_another_kind_is_refused() -> None:
    with pytest.raises(EngineError, match="quantization must be int8"):
        EngineConfig("model", quantization="int4")
