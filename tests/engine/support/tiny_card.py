"""The smallest model and engine that are of use on a simulated card, whose kernels are interpreted."""

from __future__ import annotations

from typing import Any

from engine_fakes import FakeTokenizer
from tiny_models import tiny_llama

from pagemill.engine.config import ModelInfo, SchedulerConfig
from pagemill.engine.engine import Engine

CONTEXT, BLOCKS = 128, 24


def one_layer(vocabulary: int) -> Any:
    return tiny_llama(
        vocab_size=vocabulary, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=CONTEXT,
    )  # fmt: skip


def engine_over(
    runner: Any, vocabulary: int, rows: int, *, num_blocks: int = BLOCKS, budget: int = 40, **switches: bool
) -> Engine:
    """rows: most at once. budget: tokens of a step."""
    info = ModelInfo("tiny", "", "", "float32", "cpu", CONTEXT, vocabulary, num_blocks, num_blocks * 16)
    limits = SchedulerConfig(num_blocks, CONTEXT, max_num_tokens=budget, max_num_seqs=rows, **switches)
    return Engine(runner, FakeTokenizer(), info, limits)  # type: ignore[arg-type]
