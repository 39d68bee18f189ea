"""Which device an engine runs on, and in which numbers.

It may not know models or memory.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable

import torch

from pagemill.engine.config import FLOAT16_ON_CPU, EngineConfig
from pagemill.engine.errors import EngineError
from pagemill.engine.run.card import LEAST_CAPABILITY, Card, CardFacts, CudaCard, Look, look
from pagemill.kernels.linear_fp8 import LEAST_CAPABILITY as FP8_CAPABILITY

log = logging.getLogger(__name__)

CPU = torch.device("cpu")


def choose_card(device: str, look: Callable[[], Look] = look) -> Card | None:
    """The card for a device of EngineConfig, None for the CPU.

    auto is the first card that will do. Raises EngineError, with what to do about it, where a card is asked
    for that cannot be had.
    """
    if device == "cpu":
        return None
    seen = look()
    if device == "auto":
        return _first(seen)
    index = int(device.partition(":")[2] or 0)
    if seen.built is None:
        raise EngineError(
            f"device {device} needs a build of torch for CUDA, and this one is for CPU only: install one "
            "with pip install torch --index-url https://download.pytorch.org/whl/cu130 (cu126 for drivers "
            "before 580), or use device cpu."
        )
    if not seen.cards:
        raise EngineError(
            f"device {device}: torch sees no CUDA device ({seen.problem or 'and gives no reason'}). "
            "nvidia-smi must list one here; a container needs --gpus all, and CUDA_VISIBLE_DEVICES must not "
            "hide it."
        )
    if index >= len(seen.cards):
        there = ", ".join(f"cuda:{card.index} ({card.name})" for card in seen.cards)
        raise EngineError(f"There is no device {device} here; there is {there}.")
    reason = refusal(seen.cards[index])
    if reason is not None:
        raise EngineError(f"device {device} cannot be used: {reason}; use another card, or device cpu.")
    return CudaCard(index)


def _first(seen: Look) -> Card | None:
    for card in seen.cards:
        reason = refusal(card)
        if reason is None:
            return CudaCard(card.index)
        log.warning("cuda:%d is left out: %s.", card.index, reason)
    if seen.problem is not None:
        log.warning("The engine runs on the CPU, since torch sees no CUDA device: %s", seen.problem)
    return None


def refusal(card: CardFacts) -> str | None:
    """Why our kernels cannot run on it."""
    if card.capability < LEAST_CAPABILITY:
        found, least = (".".join(map(str, pair)) for pair in (card.capability, LEAST_CAPABILITY))
        return (
            f"{card.name} has compute capability {found}, and the kernels need {least} or more (Ampere: "
            "A100, A10, RTX 30, and later)"
        )
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed (pip install 'triton>=3.6,<3.8'; Windows has no build of it)"
    return None


def resolve_dtype(name: str, card: Card | None = None) -> torch.dtype:
    """auto is bfloat16 where the device multiplies it in hardware, as every card that is taken does, else
    float32. Raises EngineError for float16 on CPU."""
    if name == "float16" and card is None:
        raise EngineError(FLOAT16_ON_CPU)
    if name == "auto":
        name = "bfloat16" if card is not None or _multiplies_bfloat16() else "float32"
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]


def check_eight_bits(config: EngineConfig, card: Card | None) -> None:
    """Raises EngineError where the device has no kernels for the numbers of 8 bits that were asked for."""
    asked = [
        f"{name} {value}"
        for name, value in (("quantization", config.quantization), ("kv_cache_dtype", config.kv_cache_dtype))
        if value == "fp8" or (value is not None and name == "kv_cache_dtype")
    ]
    if asked and card is None:
        instead = "; int8 dense layers a CPU has" if config.quantization == "fp8" else ""
        raise EngineError(f"{' and '.join(asked)} need a CUDA card{instead}: leave it out on a CPU.")
    if card is not None and any("fp8" in what for what in asked):
        facts = card.facts()
        if facts.capability < FP8_CAPABILITY:
            found, least = (".".join(map(str, pair)) for pair in (facts.capability, FP8_CAPABILITY))
            raise EngineError(
                f"{facts.name} has compute capability {found} and no 8-bit floats, which need {least} (L4, "
                "RTX 40, H100, and later): use int8."
            )


def _multiplies_bfloat16() -> bool:
    cpu = torch.cpu
    return bool(cpu._is_avx512_bf16_supported() or cpu._is_amx_tile_supported())
