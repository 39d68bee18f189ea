"""What can go wrong with an engine as a whole.

A row's own failure is never one of these: it is a Completion with an error code.
"""

from __future__ import annotations


class EngineError(Exception):
    """Base of all; its text is one sentence a person can act on."""


class ModelLoadError(EngineError):
    """The model cannot be read or is of a kind that cannot be run; the text gives the reason."""


class OutOfMemory(EngineError):
    """Weights or key-value memory do not fit; the text says what is needed, what there is, what would fit."""


class StepTooLarge(EngineError):
    """A device had no memory for a step; the engine goes on with smaller ones."""


class EngineFailed(EngineError):
    """A step of the engine raised, or it was closed: it takes no more requests."""
