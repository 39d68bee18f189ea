"""`pagemill models`: which models can be run, and how a given one would be.

It asks the engine, which looks at files without reading weights, and shows the answer. It may not know how
the command line is written.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pagemill.jobs.render import harmless, print_fields
from pagemill.worker.models import resolve_model
from pagemill.worker.settings import WorkerSettings

if TYPE_CHECKING:
    from pagemill.engine.run.preview import Preview, Sizes

COLUMNS = ("family", "covers", "architectures", "loaders")
OTHERS = (
    "Any other causal language model of transformers runs through its own code, slower and without int8, if "
    "its attention works on keys and values of earlier tokens alone; `pagemill models PATH` says whether it "
    "does. Refused: encoder-decoders, recurrent and convolutional layers, models that need code of their "
    "own, and checkpoints that are quantised otherwise than as GGUF."
)


def families() -> dict[str, Any]:
    """The families of our own, and in words what becomes of other models."""
    from pagemill.engine.models.registry import FAMILIES

    return {
        "families": [
            {
                "family": family.name,
                "covers": family.covers,
                "architectures": list(family.architectures),
                "gguf_architectures": list(family.gguf_architectures),
                "loaders": ["safetensors", *(["gguf"] if family.gguf_architectures else [])],
            }
            for family in FAMILIES
        ],
        "others": OTHERS,
    }


def look(settings: WorkerSettings) -> Preview:
    """How the settings' model would be run. Raises ModelError where it is not on this machine: nothing is
    downloaded."""
    path = resolve_model(settings.model, fetch=False)
    # torch comes with these.
    from pagemill.engine.run.preview import preview
    from pagemill.worker.native import engine_config

    return preview(engine_config(settings.model_dump(), str(path)))


def document(found: Preview) -> dict[str, Any]:
    """A preview as one flat JSON object; sizes are bytes."""
    sizes = found.sizes
    names = sizes.__slots__ if sizes is not None else ()
    return {
        "path": str(found.found.path),
        "runs": found.runs,
        "how": found.found.how,
        "family": found.found.family,
        "architecture": found.found.architecture,
        "dtype": found.dtype,
        "quantization": found.quantization,
        "chat_template": found.chat_template,
        "context": found.context,
        "kv_tokens": found.kv_tokens,
        **{name: getattr(sizes, name) for name in names},
        "reason": found.reason,
    }


def print_families() -> None:
    """A family a line under a head, then the others in words."""
    known = families()
    if not sys.stdout.isatty():
        print(*COLUMNS, sep="\t")
        for family in known["families"]:
            names = [*family["architectures"], *(f"gguf:{name}" for name in family["gguf_architectures"])]
            print(family["family"], family["covers"], ",".join(names), ",".join(family["loaders"]), sep="\t")
        print(known["others"])
        return
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in COLUMNS:
        table.add_column(column, overflow="fold")
    for family in known["families"]:
        shown = ", ".join(family["architectures"])
        if family["gguf_architectures"]:
            shown += f" (GGUF: {', '.join(family['gguf_architectures'])})"
        table.add_row(family["family"], family["covers"], shown, ", ".join(family["loaders"]))
    console = Console(highlight=False)
    console.print(table)
    console.print(Text(f"\n{known['others']}"))


def print_preview(found: Preview) -> None:
    """One model, a field a line."""
    how = {
        "family": f"by our own decoder, family {found.found.family}",
        "fallback": "through the code of transformers, which is slower",
        "refused": "not at all",
    }[found.found.how]
    numbers = f"{found.quantization} and {found.dtype}" if found.quantization else found.dtype
    fields = {
        "model": str(found.found.path),
        "architecture": found.found.architecture or "",
        "runs": how if found.runs or found.found.how == "refused" else f"not like this (else {how})",
        "numbers": numbers,
        **(_sizes(found.sizes) if found.sizes else {}),
        "fits": _fits(found),
        "chat template": {True: "yes", False: "none; rows need prompt, not messages", None: ""}[
            found.chat_template
        ],
        "reason": found.reason or "",
    }
    print_fields({name: harmless(value) for name, value in fields.items()}, {"reason": "red"})


def _sizes(sizes: Sizes) -> dict[str, str]:
    from pagemill.engine.run.memory import size_text as size

    free = "" if sizes.available_bytes is None else size(sizes.available_bytes)
    return {
        "parameters": f"{sizes.parameters:,}",
        "context": f"{sizes.own_context:,} tokens, the model's own",
        "weights": f"{size(sizes.weight_bytes)} in memory, {size(sizes.file_bytes)} on disk",
        "a token": f"{size(sizes.kv_token_bytes)} of keys and values",
        "a step": f"{size(sizes.step_bytes)} at most",
        "free memory": free,
    }


def _fits(found: Preview) -> str:
    if found.context is None or found.kv_tokens is None or found.sizes is None:
        return ""
    # As asked for: whole blocks are a little less.
    gib = round(found.kv_tokens * found.sizes.kv_token_bytes / (1 << 30), 2)
    rows = found.kv_tokens / found.context
    return (
        f"{found.kv_tokens:,} tokens in {gib:.4g} GiB of keys and values (--kv-cache-gb), "
        f"{rows:.1f} rows of {found.context:,}"
    )
