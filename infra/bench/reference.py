"""Which tokens are right: transformers' greedy ones in float32, and how an engine's compare with them.

    python infra/bench/reference.py --model out/bench/models/float32 --json FILE

One row at a time, so that no padding and no neighbour is in it; 16 rows of each workload. Beside each token
stands the margin: how far its logit lay above the next best. In float32 an engine must give the same tokens.
In bfloat16 every engine leaves the reference somewhere, and should do so where the margin is small.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import measure
import workloads


def compare(
    outputs: Mapping[str, Sequence[int]], reference: Path, workload: str, digest: str
) -> dict[str, Any]:
    """How many of the reference's rows came out alike, and the margins where the others first differ.

    Rows cut short are compared as far as they go. Raises ValueError when the reference is of other prompts.
    """
    known = json.loads(reference.read_text())
    theirs = known["manifest"]["workloads"][workload]["tok_sha256"]
    if theirs != digest:
        raise ValueError(
            f"{reference.name} is of another {workload}: another model, or Python's text differs."
        )
    exact, rows, margins, agreed = 0, 0, [], []
    for row_id, expected in known["workloads"][workload].items():
        got = outputs.get(row_id)
        if not got:
            continue
        rows += 1
        expected = expected[: len(got)]
        same = next((i for i, pair in enumerate(zip(got, expected, strict=True)) if pair[0] != pair[1]), None)
        exact += same is None
        agreed.append(1.0 if same is None else same / len(expected))
        if same is not None:
            margins.append(known["margins"][workload][row_id][same])
    return {
        "rows": rows,
        "exact": exact,
        "mean_agreeing_prefix": round(statistics.mean(agreed), 4) if agreed else None,
        "largest_margin_at_first_difference": max(margins, default=None),
    }


def greedy(model: Any, item: workloads.Item) -> tuple[list[int], list[float]]:
    """Tokens and margins of one row."""
    import torch

    ids, past = torch.tensor([item.prompt]), None
    tokens: list[int] = []
    margins: list[float] = []
    for _ in range(item.max_tokens):
        out = model(input_ids=ids, past_key_values=past, use_cache=True, logits_to_keep=1)
        past = out.past_key_values
        best, index = out.logits[0, -1].topk(2)
        tokens.append(int(index[0]))
        margins.append(round(float(best[0] - best[1]), 3))
        ids = index[:1].view(1, 1)
    return tokens, margins


def main() -> None:
    parser = argparse.ArgumentParser(description="Greedy tokens of transformers in float32.")
    parser.add_argument("--model", required=True, help="a directory, as convert.py writes it")
    parser.add_argument("--workloads", type=Path, default=Path("out/bench/workloads"))
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--threads", type=int, default=measure.cores())
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    import torch
    import transformers

    torch.set_num_threads(options.threads)
    model = transformers.AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    record: dict[str, Any] = {
        "command": measure.command_line(),
        "made_with": f"transformers {transformers.__version__}, torch {torch.__version__}, float32",
        "manifest": json.loads((options.workloads / "manifest.json").read_text()),
        "workloads": {},
        "margins": {},
    }
    with torch.inference_mode():
        for name in workloads.NAMES:
            rows = workloads.read(options.workloads, name, options.rows)
            found = {item.id: greedy(model, item) for item in rows}
            record["workloads"][name] = {row_id: tokens for row_id, (tokens, _) in found.items()}
            record["margins"][name] = {row_id: margins for row_id, (_, margins) in found.items()}
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(record, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
