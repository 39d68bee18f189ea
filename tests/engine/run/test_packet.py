"""Sections of the words that a step sends."""

from __future__ import annotations

import numpy as np
import torch

from pagemill.engine.run.packet import ALIGNMENT, Layout


def test_sections_come_back_as_they_were_sent() -> None:
    arrays = {
        "ids": np.array([-(2**40), 7, 3], np.int64),
        "lengths": np.arange(17, dtype=np.int32),
        "chances": np.array([0.25], np.float32),
        "none": np.array([], np.int64),
    }
    layout = Layout.of(arrays)
    words = torch.zeros(layout.words, dtype=torch.int32)
    for name, values in arrays.items():
        layout.write(words, name, values)
    for name, values in arrays.items():
        assert layout.places[name][0] % ALIGNMENT == 0
        assert layout.read(words, name).tolist() == values.tolist()


def test_a_section_may_hold_less_than_there_is_room_for() -> None:
    layout = Layout([("a", np.int64, 4), ("b", np.float32, 2)])
    words = torch.zeros(layout.words, dtype=torch.int32)
    layout.write(words, "a", np.array([1, 2], np.int64))
    assert layout.read(words, "a").tolist() == [1, 2, 0, 0]
