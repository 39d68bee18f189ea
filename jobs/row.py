"""One row to run: everything about it that can be known from its text.

This room knows what a row is and how it is written down. It may not know where rows come from (lines,
lists) nor who runs them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Final, Literal

Kind = Literal["chat", "completion"]

MAX_SEED: Final = 2**63 - 1

# One encoder for all rows: `json.dumps` with options builds a new one at each call.
_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


@dataclass(frozen=True, slots=True)
class Row:
    """A checked row. Exactly one of `messages`, `prompt` and `prompt_token_ids` is set.

    row_index: 0-based over non-blank lines; the key of the output row.
    line: physical line, 1-based; None for rows that came from no file.
    messages: [{"role": "system"|"user"|"assistant", "content": str}, ...]
    params: canonical names (parameters.py) with the row's values over the job's defaults. A name that is
        absent means "ask the model"; `"logprobs": None` means that the row wants none. Never holds seed.
    seed: the row's own, or `row_seed(job seed, row_index)`; 0 <= seed < 2**63.
    requested_model: what the line asked for, before the job's model replaced it.
    filled_id: true where the line had no id and `custom_id` was made from the row index.
    """

    row_index: int
    line: int | None
    custom_id: str
    kind: Kind
    messages: list[dict[str, str]] | None
    prompt: str | None
    prompt_token_ids: list[int] | None
    params: dict[str, Any]
    seed: int
    requested_model: str | None = None
    metadata: dict[str, Any] | None = None
    filled_id: bool = False

    def to_dict(self) -> dict[str, Any]:
        """The row as plain JSON values, without what is unset."""
        out: dict[str, Any] = {"row_index": self.row_index, "custom_id": self.custom_id, "kind": self.kind}
        if self.line is not None:
            out["line"] = self.line
        if self.messages is not None:
            out["messages"] = self.messages
        if self.prompt is not None:
            out["prompt"] = self.prompt
        if self.prompt_token_ids is not None:
            out["prompt_token_ids"] = self.prompt_token_ids
        out["params"] = self.params
        out["seed"] = self.seed
        if self.requested_model is not None:
            out["requested_model"] = self.requested_model
        if self.metadata is not None:
            out["metadata"] = self.metadata
        if self.filled_id:
            out["filled_id"] = True
        return out

    @classmethod
    def from_dict(cls, doc: dict[str, Any]) -> Row:
        return cls(
            row_index=doc["row_index"],
            line=doc.get("line"),
            custom_id=doc["custom_id"],
            kind=doc["kind"],
            messages=doc.get("messages"),
            prompt=doc.get("prompt"),
            prompt_token_ids=doc.get("prompt_token_ids"),
            params=doc["params"],
            seed=doc["seed"],
            requested_model=doc.get("requested_model"),
            metadata=doc.get("metadata"),
            filled_id=doc.get("filled_id", False),
        )

    def to_json(self) -> str:
        """One line of JSON without its newline; shard objects hold one a row."""
        return _encode(self.to_dict())

    @classmethod
    def from_json(cls, text: str | bytes) -> Row:
        # Bytes would be searched for their encoding first.
        return cls.from_dict(json.loads(text.decode() if isinstance(text, bytes) else text))


def row_seed(job_seed: int, row_index: int) -> int:
    """The seed of a row that brings none: 63 bits of blake2b over the job's seed and the row's index.

    Public and stable: whoever knows the job's seed can compute it, so a row run again repeats.
    The hash is blake2b with digest_size=8 and person=b"pagemill-seed", over the two numbers as 8 bytes
    each, little endian; the digest is read little endian and its top bit dropped.
    """
    text = job_seed.to_bytes(8, "little") + row_index.to_bytes(8, "little")
    digest = blake2b(text, digest_size=8, person=b"pagemill-seed").digest()
    return int.from_bytes(digest, "little") & MAX_SEED


def filled_id(row_index: int) -> str:
    """The id of a row that brings none."""
    return f"row-{row_index}"
