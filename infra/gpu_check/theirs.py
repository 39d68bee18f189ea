"""transformers' continuous batching over a model of the same shape, with random weights, on the same card."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from gpu_check.clock import synchronize
from gpu_check.setting import Setting

WARM_UP_ROWS = 16
# What is kept back of the part's time for its end.
RESERVE = 14


@dataclass(frozen=True, slots=True)
class Batched:
    """detail: how it was run, and whether it came to its end."""

    tokens_a_second: float
    detail: str


def batched(
    setting: Setting, config: PreTrainedConfig, rows: Sequence[list[int]], counts: Sequence[int]
) -> Batched:
    """Output tokens/s. Where time runs out before all rows are done it counts as if they were: an upper
    bound.

    Raises RuntimeError where it fails.
    """
    dtype = torch.float32 if setting.dry else torch.bfloat16
    with setting.device, torch.no_grad():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    greedy = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=max(counts))
    settings: dict[str, Any] = {}
    if setting.dry:
        # It was called a block until 5.18.
        page = "page_size" if hasattr(ContinuousBatchingConfig, "page_size") else "block_size"
        settings = {"num_blocks": 8, page: 16, "max_batch_tokens": 64, "use_cuda_graph": False}
    batching = ContinuousBatchingConfig(allow_block_sharing=False, **settings)
    with model.continuous_batching_context_manager(
        generation_config=greedy,
        continuous_batching_config=batching,
        block=True,
        timeout=5,
        warmup=not setting.dry,
    ) as manager:
        few = slice(0, WARM_UP_ROWS)
        if not setting.dry:
            _answered(manager, rows[few], [4] * WARM_UP_ROWS, setting.left - RESERVE)
        synchronize(setting.device)
        started = time.perf_counter()
        done = _answered(manager, rows, counts, setting.left - RESERVE)
        synchronize(setting.device)
        seconds = time.perf_counter() - started
        how = f"attention {model.config._attn_implementation}"
    if done < len(rows):
        how += f"; only {done} of {len(rows)} rows were done in {seconds:.0f} s, so this is more than it does"
    return Batched(sum(counts) / seconds, how)


def _answered(manager: Any, rows: Sequence[list[int]], counts: Sequence[int], seconds: float) -> int:
    """How many rows were done within so many seconds."""
    until = time.perf_counter() + seconds
    wanted = {
        manager.add_request(list(row), max_new_tokens=count): count
        for row, count in zip(rows, counts, strict=True)
    }
    done = 0
    while done < len(wanted) and time.perf_counter() < until:
        result = manager.get_result(timeout=1)
        if result is None:
            if not manager.is_running():
                raise RuntimeError("its thread ended before its rows did")
        elif result.is_finished():
            if result.error:
                raise RuntimeError(str(result.error))
            if len(result.generated_tokens) != wanted[result.request_id]:
                raise RuntimeError(f"a row of its has {len(result.generated_tokens)} tokens")
            done += 1
    return done
