"""The command that checks a file without running it: validate.

It joins the program like those of other floors. What a model says to a file is another floor's to tell: it
offers that here when it joins. This room may not know how lines are judged.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated, Any

import typer

from pagemill.jobs import options, render
from pagemill.jobs.columns import Columns
from pagemill.jobs.commands import app, run_async
from pagemill.jobs.errors import RowFault, UsageError
from pagemill.jobs.failures import EXIT_CODES
from pagemill.jobs.inputs import open_source
from pagemill.jobs.scratch import scratch_folder
from pagemill.jobs.settings import ClientSettings
from pagemill.jobs.spec import InputRef
from pagemill.jobs.submission import build_spec, in_daemon_thread
from pagemill.jobs.validate import Appraisal, Report, validate

# The model, the context and the measured tokens a second, where given, to what appraises rows.
Appraiser = Callable[[str, int | None, float | None], Appraisal]
_offered: list[Appraiser] = []


def offer_appraiser(appraiser: Appraiser) -> None:
    """What `--model` asks; the floor that has models calls this when it joins the program."""
    _offered[:] = [appraiser]


@app.command("validate", epilog=EXIT_CODES)
def validate_file(
    file: options.File,
    model: Annotated[
        str | None,
        typer.Option(
            "--model", "-m", show_default=False,
            help="Also check templates and lengths, and estimate: smollm2, a directory, a .gguf file.",
        ),
    ] = None,
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
    context: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a row at most, where less than the model's.")
    ] = None,
    speed: Annotated[
        float | None,
        typer.Option("--tokens-per-second", min=0.001, show_default=False,
                     help="Written by all workers together, as watch shows it, for the estimate of time."),
    ] = None,
    max_line_bytes: Annotated[int | None, typer.Option(min=1, help="Longer lines are faults.")] = None,
    as_json: options.Json = False,
    s3_endpoint: options.Endpoint = None,
    s3_region: options.Region = None,
) -> int:  # fmt: skip
    """Check a file without running it: every fault, by line. Needs neither Redis nor a store.

    With --model, what only the model can tell, and an estimate of tokens, memory and time. Ends with 0 when
    every line is a row that can be run, else with 1. --json prints a document a fault, then the summary.
    """
    columns = Columns(prompt_column, template, id_column, chat)
    parameters = options.sampling(max_tokens, temperature, top_p, top_k, stop, others)
    prompts, name = options.prompts(file)
    settings = ClientSettings.load(s3_endpoint=s3_endpoint, s3_region=s3_region)
    source = open_source(prompts, settings.storage_options(), name=name, columns=columns)
    fields: dict[str, Any] = {"model": model or "any", "created_at": time.time(), "seed": 0}
    if max_line_bytes is not None:
        fields["max_line_bytes"] = max_line_bytes
    spec = build_spec("validate", InputRef(key="-", size=0, etag=""), {**fields, "defaults": parameters})
    appraisal = None if model is None else _appraiser()(model, context, speed)
    if model is None and (context is not None or speed is not None):
        raise UsageError("--context and --tokens-per-second go with --model.")

    def tell(fault: RowFault) -> None:
        if as_json:
            render.print_json(asdict(fault), lines=True)
        else:
            print(f"{fault.code}: {render.harmless(fault.message)}")

    async def work() -> Report:
        with scratch_folder() as folder:
            return await in_daemon_thread(lambda _: validate(source, spec, folder, tell, appraisal))

    report = run_async(work())
    _summarise(report, appraisal, as_json)
    return 1 if report.faults else 0


def _appraiser() -> Appraiser:
    if not _offered:
        raise UsageError("--model needs the worker's libraries: pip install 'pagemill[worker]'.")
    return _offered[0]


def _summarise(report: Report, appraisal: Appraisal | None, as_json: bool) -> None:
    good = report.rows - report.faults
    if as_json:
        estimate = None if appraisal is None or not good else appraisal.document()
        document = {"rows": report.rows, "good": good, "faults": report.faults, "codes": report.codes}
        render.print_json({**document, "estimate": estimate}, lines=True)
        return
    codes = ", ".join(f"{count:,} {code}" for code, count in report.codes.items())
    fields = {"rows": f"{report.rows:,}", "faults": f"{report.faults:,}" + (f": {codes}" if codes else "")}
    if appraisal is not None and good:
        fields |= appraisal.fields()
    render.print_fields(fields, {"faults": "red" if report.faults else "green"})
