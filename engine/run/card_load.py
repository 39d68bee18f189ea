"""What a card can hold beside the weights: how large steps may be, and how much key-value memory is left.

    free ─ weights ─ reserve ─ largest step (measured) ─ graphs (measured) = key-value memory

It may not know the scheduler.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from pagemill.engine.batch import Batch
from pagemill.engine.cache.storage import KVStorage
from pagemill.engine.config import BLOCK_SIZE, EngineConfig
from pagemill.engine.models.spec import DecoderSpec, ModelSpec
from pagemill.engine.request import Request, SamplingParams
from pagemill.engine.run.card import Card
from pagemill.engine.run.card_runner import CardRunner, put
from pagemill.engine.run.memory import memory_dtype, step_bytes
from pagemill.engine.run.runner import Model
from pagemill.engine.run.sampler import Sampler
from pagemill.engine.sequence import Sequence, Status

# Nobody waits for a first token, so steps are as large as they still gain by it.
LARGE_STEP, MANY_ROWS = 16_384, 1_024
LEAST_STEP, LEAST_ROWS = 512, 16
# A step may take this share of what weights leave.
STEP_SHARE = 1 / 4
# Of the whole card, left to the driver, to what lies idle between pieces of memory, and to steps that ask for
# more than the one that was measured (log-probabilities, penalties).
RESERVE_SHARE = 0.08


def usable_bytes(card: Card) -> int:
    """What weights, steps and key-value memory may take of what is free."""
    return max(0, card.free_bytes() - int(RESERVE_SHARE * card.facts().total))


def fit_limits(spec: ModelSpec, dtype: torch.dtype, config: EngineConfig, free: int) -> EngineConfig:
    """The config with a token budget and a number of rows: those asked for, else what a large card takes,
    halved until a step's numbers fit into STEP_SHARE of `free` bytes."""
    tokens, rows = config.max_num_tokens or LARGE_STEP, config.max_num_seqs or MANY_ROWS

    def step(tokens: int, rows: int) -> int:
        return step_bytes(spec, dtype, replace(config, max_num_tokens=tokens, max_num_seqs=rows))

    while step(tokens, rows) > STEP_SHARE * free:
        # Whichever of the two brings more, of those that are ours to choose.
        fewer_tokens = config.max_num_tokens is None and tokens > LEAST_STEP
        fewer_rows = config.max_num_seqs is None and rows > LEAST_ROWS
        if fewer_tokens and (not fewer_rows or step(tokens // 2, rows) <= step(tokens, rows // 2)):
            tokens //= 2
        elif fewer_rows:
            rows //= 2
        else:
            break
    return replace(config, max_num_tokens=tokens, max_num_seqs=rows)


def most_blocks(spec: ModelSpec, config: EngineConfig) -> int:
    """Beyond which a small model on a large card has no use for more: all rows at full context, twice."""
    return 2 * (config.max_num_seqs or MANY_ROWS) * -(-spec.context // BLOCK_SIZE)


def measure_steps(model: Model, dtype: torch.dtype, config: EngineConfig, card: Card) -> int:
    """Bytes that the largest step takes, and a decode of all rows beside it, as graphs keep theirs."""
    tokens, rows = config.max_num_tokens or LARGE_STEP, config.max_num_seqs or MANY_ROWS
    rows = min(rows, tokens)
    longest = min(-(-tokens // rows), model.spec.context - 1)
    # All rows over the same blocks: what they hold does not matter here.
    blocks = -(-longest // BLOCK_SIZE)
    storage = storage_of(model.spec, blocks, memory_dtype(dtype, config), card.device)
    runner = CardRunner(
        model, storage, Sampler(frozenset(), lambda tensor: put(card, tensor)), card,
        max_rows=rows, context=longest + 1, share_prefixes=config.shared_prefix_attention,
        deterministic=config.deterministic, graphs=False,
    )  # fmt: skip

    def step(length: int) -> None:
        batch = Batch(*_rows(rows, length, blocks))
        runner.begin(batch)()
        for row in batch.sequences:
            row.status = Status.FINISHED

    step(1)  # kernels are compiled, which takes memory of its own, and slots taken
    peak = card.peak_bytes(lambda: step(longest))
    if isinstance(model.spec, DecoderSpec):
        peak += card.peak_bytes(lambda: step(1))
    return peak


def _rows(count: int, length: int, blocks: int) -> tuple[tuple[Sequence, ...], tuple[int, ...]]:
    sampling = SamplingParams(max_tokens=1, top_p=0.9)
    rows = []
    for n in range(count):
        row = Sequence.of(Request(f"measured {n}", (0,) * length, sampling), n)
        row.block_table = list(range(blocks))
        row.status = Status.RUNNING
        rows.append(row)
    return tuple(rows), (length,) * count


def storage_of(spec: ModelSpec, blocks: int, dtype: torch.dtype, device: torch.device) -> KVStorage:
    """Blocks for rows, and one more for what fills a graph up."""
    return KVStorage(blocks + 1, spec.num_layers, spec.num_kv_heads, spec.head_dim, dtype, device)
