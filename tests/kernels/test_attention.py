"""What the public function of attention takes and refuses, whatever the device."""

from __future__ import annotations

import pytest
import torch

from pagemill.kernels.attention import paged_attention, plan_rows
from pagemill.kernels.attention_torch import reference_attention
from pagemill.kernels.cache_write import read_scaled_keys, read_scaled_values, write_scaled_kv

HEAD_DIM, KV_HEADS = 32, 2


@pytest.mark.parametrize("stored", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (5, 3.0)])
def test_a_memory_of_8_bits_is_read_with_its_scales(
    stored: torch.dtype, window: int | None, softcap: float | None
) -> None:
    layer = torch.zeros(5, 2, KV_HEADS, HEAD_DIM * 16).to(stored)
    scales = torch.zeros(5, 2, KV_HEADS, 16)
    tokens = torch.arange(20)
    blocks = torch.tensor([3, 1])[tokens // 16]
    keys, values = torch.randn(20, KV_HEADS, HEAD_DIM), 100 * torch.randn(20, KV_HEADS, HEAD_DIM)
    write_scaled_kv(layer, scales, keys, values, blocks, tokens % 16)
    rows = plan_rows([3, 1], [20, 16], [[3, 1], [3]], layer)
    query = torch.randn(4, 4, HEAD_DIM)
    found = paged_attention(query, layer, rows, 0.2, window=window, softcap=softcap, scales=scales)
    wide_keys, wide_values = (
        read(layer, scales, HEAD_DIM) for read in (read_scaled_keys, read_scaled_values)
    )
    wide = torch.stack([wide_keys.flatten(2), wide_values.flatten(2)], 1)
    expected = reference_attention(query, wide, rows, 0.2, window=window, softcap=softcap)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_what_shows_nothing_or_has_no_meaning_is_refused() -> None:
    layer = torch.zeros(1, 2, 1, HEAD_DIM * 16)
    query, rows = torch.zeros(1, 1, HEAD_DIM), plan_rows([1], [3], [[0]], layer)
    with pytest.raises(ValueError, match="window of 0"):
        paged_attention(query, layer, rows, 1.0, window=0)
    with pytest.raises(ValueError, match="softcap must be above 0"):
        paged_attention(query, layer, rows, 1.0, softcap=0.0)
    with pytest.raises(ValueError, match="8 bits has scales"):
        paged_attention(query, layer.to(torch.int8), rows, 1.0)
    with pytest.raises(ValueError, match="8 bits has scales"):
        paged_attention(query, layer, rows, 1.0, scales=torch.ones(1, 2, 1, 16))
    with pytest.raises(ValueError, match="device meta"):
        plan_rows([1], [3], [[0]], layer.to("meta"))
