"""Which device is taken, and what a person is told who asks for one that cannot be had."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pagemill.engine.errors import EngineError
from pagemill.engine.run import card
from pagemill.engine.run.card import CardFacts, Look
from pagemill.engine.run.device import choose_card, resolve_dtype
from pagemill.engine.run.simulated_card import SimulatedCard


def facts(index: int, capability: tuple[int, int] = (9, 0)) -> CardFacts:
    return CardFacts(index, "T4" if capability < (8, 0) else "H100", capability, 80 << 30, 79 << 30)


OLD, GOOD = facts(0, (7, 5)), facts(1)


@pytest.fixture(autouse=True)
def triton_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())


def test_auto_is_the_first_card_that_will_do_or_the_cpu() -> None:
    assert choose_card("auto", lambda: Look(None, None, ())) is None
    assert choose_card("auto", lambda: Look("13.0", None, (), "no driver")) is None
    assert choose_card("auto", lambda: Look("13.0", None, (OLD,))) is None
    chosen = choose_card("auto", lambda: Look("13.0", None, (OLD, GOOD)))
    assert chosen is not None and chosen.device == torch.device("cuda", 1)


def test_the_cpu_is_taken_without_a_look_at_cards() -> None:
    assert choose_card("cpu", lambda: pytest.fail("looked")) is None


def test_a_card_is_taken_by_its_number() -> None:
    for name, index in (("cuda", 0), ("cuda:0", 0), ("cuda:1", 1)):
        chosen = choose_card(name, lambda: Look("13.0", None, (facts(0), facts(1))))
        assert chosen is not None and chosen.device == torch.device("cuda", index)


@pytest.mark.parametrize(
    ("device", "seen", "reason"),
    [
        ("cuda", Look(None, None, ()), "needs a build of torch for CUDA.*pip install torch --index-url"),
        ("cuda", Look("13.0", None, (), "driver too old"), r"no CUDA device \(driver too old\).*nvidia-smi"),
        (
            "cuda:0",
            Look("13.0", None, (OLD,)),
            r"T4 has compute capability 7\.5.* need 8\.0.*device cpu",
        ),
        ("cuda:7", Look("13.0", None, (GOOD,)), r"no device cuda:7 here; there is cuda:1 \(H100\)"),
    ],
)
def test_a_card_that_cannot_be_had_is_refused_with_what_to_do(device: str, seen: Look, reason: str) -> None:
    with pytest.raises(EngineError, match=reason):
        choose_card(device, lambda: seen)


def test_a_card_without_triton_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(EngineError, match="pip install 'triton"):
        choose_card("cuda:1", lambda: Look("13.0", None, (facts(0), GOOD)))


def test_numbers_are_16_bits_on_a_card_and_float16_there_only() -> None:
    assert resolve_dtype("auto", SimulatedCard()) == torch.bfloat16
    assert resolve_dtype("float16", SimulatedCard()) == torch.float16
    assert resolve_dtype("float32", SimulatedCard()) == torch.float32
    with pytest.raises(EngineError, match="float16 is not computed on CPU"):
        resolve_dtype("float16")


def test_the_drivers_version_is_read_where_the_system_tells_it(tmp_path: Path) -> None:
    file = tmp_path / "version"
    assert card._driver(file) is None
    file.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\n")
    assert card._driver(file) == "580.65.06"
