"""The whole engine against transformers: the same greedy tokens, however the rows are scheduled.

Tiny models with seeded weights, float32 on CPU. Their weights are spread widely, so that the best token is
ahead of the next by far more than what another order of summation changes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from engine_fakes import FakeTokenizer, check, prompt, request

from pagemill.engine.cache.storage import KVStorage
from pagemill.engine.config import ModelInfo, SchedulerConfig
from pagemill.engine.engine import Engine
from pagemill.engine.models.decoder import Decoder
from pagemill.engine.request import Completion, Request
from pagemill.engine.run.runner import ModelRunner
from pagemill.engine.run.sampler import Sampler
from pagemill.engine.weights.load import load_decoder, open_checkpoint

VOCAB = 199
CONTEXT = 512
LENGTHS = (1, 3, 15, 16, 17, 32, 33, 70)
ANSWER = 20


@dataclass(frozen=True)
class Tiny:
    """A model in both forms, and what transformers answers to prompts (cached, as each costs a second)."""

    decoder: Decoder
    reference: object
    answers: dict[tuple[int, ...], list[int]]

    def answer(self, ids: Iterable[int]) -> list[int]:
        key = tuple(ids)
        if key not in self.answers:
            with torch.inference_mode():
                out = self.reference.generate(  # type: ignore[attr-defined]
                    torch.tensor([key]),
                    attention_mask=torch.ones(1, len(key), dtype=torch.int64),
                    max_new_tokens=ANSWER,
                    do_sample=False,
                    pad_token_id=0,
                )
            self.answers[key] = out[0, len(key) :].tolist()
        return self.answers[key]


def build(path: Path, *, heads: int, kv_heads: int, tied: bool) -> Tiny:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(heads * 100 + kv_heads * 10 + tied)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=heads * 8,
        intermediate_size=56,
        num_hidden_layers=3,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=8,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=tied,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(path)
    return Tiny(load_decoder(open_checkpoint(path), torch.float32, torch.device("cpu")), model, {})


MODELS = {
    "grouped-3-tied": {"heads": 6, "kv_heads": 2, "tied": True},
    "grouped-4-untied": {"heads": 4, "kv_heads": 1, "tied": False},
    "ungrouped-tied": {"heads": 4, "kv_heads": 4, "tied": True},
}


@pytest.fixture(scope="module", params=MODELS.values(), ids=MODELS.keys())
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return build(tmp_path_factory.mktemp("tiny"), **request.param)


@pytest.fixture(scope="module")
def one_model(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return build(tmp_path_factory.mktemp("tiny"), **MODELS["grouped-4-untied"])  # type: ignore[arg-type]


def engine_over(
    tiny: Tiny, *, num_blocks: int = 64, budget: int = 512, seqs: int = 16, cache: bool = True
) -> Engine:
    spec = tiny.decoder.spec
    storage = KVStorage(
        num_blocks, spec.num_layers, spec.num_kv_heads, spec.head_dim, torch.float32, torch.device("cpu")
    )
    # Whatever memory held before must not matter: nothing that was not written may be read.
    storage.tensor.fill_(torch.nan)
    info = ModelInfo("tiny", "", "", "float32", "cpu", CONTEXT, VOCAB, num_blocks, num_blocks * 16)
    limits = SchedulerConfig(
        num_blocks, CONTEXT, max_num_tokens=budget, max_num_seqs=seqs, prefix_cache=cache
    )
    runner = ModelRunner(tiny.decoder, storage, Sampler(frozenset()))
    return Engine(runner, FakeTokenizer(), info, limits)  # type: ignore[arg-type]


def run(engine: Engine, rows: Iterable[Request]) -> dict[str, Completion]:
    for row in rows:
        engine.add(row)
    done = {}
    while engine.has_work:
        done.update({completion.request_id: completion for completion in engine.step()})
        check(engine)
    return done


def ids(length: int, first: int = 1) -> list[int]:
    return [token % VOCAB for token in prompt(length, first)]


def greedy(name: str, tokens: list[int]) -> Request:
    return request(name, tokens, ANSWER, temperature=0.0)


@pytest.mark.parametrize("budget", [1, 7, 15, 16, 17, 512])
@pytest.mark.parametrize("cache", [True, False], ids=["cached", "uncached"])
def test_greedy_tokens_equal_transformers(tiny: Tiny, budget: int, cache: bool) -> None:
    lengths = LENGTHS if budget > 1 else (1, 16, 17, 33)
    rows = {f"{n}": ids(n, n) for n in lengths}
    done = run(engine_over(tiny, budget=budget, cache=cache), [greedy(*row) for row in rows.items()])
    for name, tokens in rows.items():
        assert list(done[name].token_ids) == tiny.answer(tokens), f"prompt of {name} tokens"


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33, 48])
def test_a_prompt_that_is_wholly_cached_gets_the_same_tokens(one_model: Tiny, length: int) -> None:
    engine = engine_over(one_model)
    first = run(engine, [greedy("a", ids(length))])["a"]
    again = run(engine, [greedy("b", ids(length))])["b"]
    assert list(first.token_ids) == list(again.token_ids) == one_model.answer(ids(length))
    assert again.usage.cached_tokens == (length - 1) // 16 * 16


@pytest.mark.parametrize("budget", [5, 40, 512])
def test_rows_that_share_a_prefix_get_their_own_tokens(one_model: Tiny, budget: int) -> None:
    common = ids(50)
    rows = {f"{n}": [*common[: 50 - 4 * (n % 3)], *ids(n + 1, n + 7)] for n in range(8)}
    done = run(engine_over(one_model, budget=budget), [greedy(*row) for row in rows.items()])
    assert sum(completion.usage.cached_tokens for completion in done.values()) >= 7 * 32
    for name, tokens in rows.items():
        assert list(done[name].token_ids) == one_model.answer(tokens)


@pytest.mark.parametrize("cache", [True, False], ids=["cached", "uncached"])
def test_preempted_rows_get_the_same_tokens(tiny: Tiny, cache: bool) -> None:
    rows = {f"{n}": ids(12 + n, n) for n in range(8)}
    engine = engine_over(tiny, num_blocks=9, budget=24, cache=cache)
    engine.scheduler.admission.growth = lambda seq: 0.0  # type: ignore[method-assign]
    done = run(engine, [greedy(*row) for row in rows.items()])
    assert engine.metrics().preemptions > 0
    for name, tokens in rows.items():
        assert list(done[name].token_ids) == tiny.answer(tokens)


def test_sampled_tokens_do_not_depend_on_anything_but_the_row(one_model: Tiny) -> None:
    """Alone, among others, in chunks, after a hit, preempted: the same seed gives the same tokens."""
    row = request("row", ids(40), 30, seed=77, temperature=0.9, top_p=0.95, top_k=50)
    others = [request(f"o{n}", ids(5 * n + 1, n), 30, seed=n, temperature=1.2) for n in range(9)]
    wanted = run(engine_over(one_model), [row])["row"].token_ids
    assert len(set(wanted)) > 3
    for settings in ({"budget": 7}, {"budget": 33, "seqs": 3}, {"num_blocks": 10}, {"cache": False}):
        engine = engine_over(one_model, **settings)  # type: ignore[arg-type]
        done = run(engine, [*others[:5], row, *others[5:]])
        assert done["row"].token_ids == wanted, settings
    twice = engine_over(one_model)
    run(twice, [request("before", ids(40), 30, seed=5)])
    assert run(twice, [row])["row"].token_ids == wanted


def test_samples_of_one_prompt_differ_and_repeat(one_model: Tiny) -> None:
    rows = [request(f"{n}", ids(20), 20, seed=3, temperature=1.0, sample=n) for n in range(4)]
    first, second = run(engine_over(one_model), rows), run(engine_over(one_model, budget=16), rows)
    assert len({completion.token_ids for completion in first.values()}) == 4
    assert {name: c.token_ids for name, c in first.items()} == {
        name: c.token_ids for name, c in second.items()
    }


def test_a_row_without_finite_numbers_ends_alone_and_leaves_nothing_behind(one_model: Tiny) -> None:
    """The model's own Inf, from a token whose embedding overflows, reaches no neighbour and no later row."""
    rows = {"0": ids(20, 0), "1": ids(20, 1), "2": ids(20, 2), "after": ids(60, 5)}
    used = {token for tokens in rows.values() for token in [*tokens, *one_model.answer(tokens)]}
    bad = next(token for token in range(VOCAB) if token not in used)
    weight = one_model.decoder.embedding
    kept = weight[bad].clone()
    weight[bad] = torch.inf
    try:
        engine = engine_over(one_model, num_blocks=12)
        broken = greedy("broken", [*ids(20)[:10], bad, *ids(20)[11:]])
        done = run(engine, [*(greedy(name, rows[name]) for name in "012"), broken])
        done |= run(engine, [greedy("after", rows["after"])])  # over memory that the broken row had
    finally:
        weight[bad] = kept
    assert done["broken"].error_code == "numeric_error"
    for name, tokens in rows.items():
        assert list(done[name].token_ids) == one_model.answer(tokens), name


def test_a_row_over_the_context_ends_there(one_model: Tiny) -> None:
    done = run(engine_over(one_model), [request("a", ids(CONTEXT - 3), 50, temperature=0.0)])
    assert (done["a"].finish_reason, done["a"].usage.completion_tokens) == ("length", 3)
