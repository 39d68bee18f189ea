"""The program `pagemill`, and its commands that change a job: submit, cancel, recover; other files and floors
join theirs.

Commands of the worker (run, worker, doctor) come in through the entry-point group `pagemill.commands`, so
that this room, which may know nothing of torch or of a worker, still makes one program. Results go to
standard output, notes and progress to standard error. Whatever goes wrong ends in one sentence and an exit
code (failures.py).
"""

from __future__ import annotations

import asyncio
import io
import sys
from collections.abc import Callable, Coroutine, Sequence
from importlib.metadata import EntryPoint, entry_points, version
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console

from pagemill.jobs import layout, options, render
from pagemill.jobs.client import Client
from pagemill.jobs.errors import JobConflict, JobFailed, UsageError
from pagemill.jobs.failures import (
    EXIT_CODES,
    INTERRUPTED,
    Interrupted,
    cancelled_by_signals,
    interruptible,
    report,
)
from pagemill.jobs.job import Job
from pagemill.jobs.progress import Follower
from pagemill.jobs.recent import RecentErrors
from pagemill.jobs.spec import new_job_id
from pagemill.jobs.status import JobStatus
from pagemill.jobs.terms import chosen_id
from pagemill.jobs.wrong_value import VALIDATOR

T = TypeVar("T")
COMMANDS = "pagemill.commands"

app = typer.Typer(
    name="pagemill",
    help="Turns files of prompts into Parquet files of completions, on your own machines, and loses nothing.",
    epilog=EXIT_CODES,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def run_program(arguments: Sequence[str] | None = None) -> int:
    """Run the program; returns its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that cannot show a character gets a mark for it
            stream.reconfigure(errors="replace")
    from pagemill.jobs import (  # noqa: F401 (they add commands to `app`)
        commands_ended,
        commands_looking,
        commands_results,
        commands_validate,
    )

    join_commands(app)
    try:
        code = typer.main.get_command(app).main(
            args=None if arguments is None else list(arguments), prog_name="pagemill", standalone_mode=False
        )
        sys.stdout.flush()
    except SystemExit as leaving:
        # The library makes a 1 of a reader that went away, which is no error of ours.
        if isinstance(leaving.__context__, BrokenPipeError):
            return report(leaving.__context__)
        return leaving.code if isinstance(leaving.code, int) else 1
    except BaseException as error:
        return report(_as_ours(error))
    if code == INTERRUPTED:  # what the library makes, silently, of a Ctrl-C before our handlers are there
        return report(KeyboardInterrupt())
    return code if isinstance(code, int) else 0


def run_async(work: Coroutine[Any, Any, T], farewell: str = "Interrupted.") -> T:
    """The coroutine's result; Ctrl-C or SIGTERM ends the command with the farewell, a second one at once."""

    async def guarded() -> T:
        with interruptible(farewell), cancelled_by_signals():
            return await work

    with interruptible(farewell):
        return asyncio.run(guarded())


def join_commands(program: typer.Typer) -> None:
    """Lets other floors add their commands, once. One that does not load becomes a command that says why."""
    taken = {command.name for command in program.registered_commands}
    for entry in entry_points(group=COMMANDS):
        if entry.name in _JOINED:
            continue
        _JOINED.add(entry.name)
        try:
            entry.load()(program)
        except ImportError as error:
            if entry.name not in taken:
                program.command(entry.name, help=f"Not available: {error}.")(_unavailable(entry, error))


_JOINED: set[str] = set()


def _unavailable(entry: EntryPoint, error: ImportError) -> Callable[[], None]:
    def command() -> None:
        raise UsageError(
            f"`pagemill {entry.name}` lacks something here ({error}): pip install 'pagemill[{entry.name}]'."
        )

    return command


def _as_ours(error: BaseException) -> BaseException:
    """The command-line library's own complaints, as a sentence of ours with the way to the help."""
    if isinstance(error, typer.Abort):
        return KeyboardInterrupt()
    say = getattr(error, "format_message", None)
    if say is None:
        return error
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "pagemill"
    said = str(say()).replace(f": {VALIDATOR}", ": ", 1)
    return UsageError(f"{said.rstrip('.')}; see {path} --help.")


@app.callback(invoke_without_command=True)
def pagemill(
    context: typer.Context,
    show_version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if show_version:
        print(f"pagemill {version('pagemill')}")
    elif context.invoked_subcommand is None:
        print(context.get_help())


@app.command(epilog=EXIT_CODES)
def submit(
    file: options.File,
    model: Annotated[
        str, typer.Option("--model", "-m", help="The name that workers serve it under.", show_default=False)
    ],
    job_id: Annotated[
        str | None, typer.Option(metavar="ID", help="Chosen by you: the same again is the same job.")
    ] = None,
    idempotency_key: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Any text that makes this submission one.")
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
    seed: options.Seed = None,
    priority: Annotated[int, typer.Option(help="Higher goes first.")] = 0,
    max_shards: Annotated[int | None, typer.Option(min=1, help="Most shards run at once.")] = None,
    deadline: Annotated[
        str | None, typer.Option(metavar="TIME", help="30m, 2h, 1d, or a moment with its zone.")
    ] = None,
    context: Annotated[int | None, typer.Option(min=1, help="Tokens a row needs at most.")] = None,
    max_rows: Annotated[int | None, typer.Option(min=1, help="Refuse a longer file.")] = None,
    max_line_bytes: Annotated[int | None, typer.Option(min=1, help="Longer lines are error rows.")] = None,
    strict: options.Strict = False,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Follow the job until it ends.")] = False,
    as_json: options.Json = False,
    redis_url: options.RedisUrl = None,
    store: options.Store = None,
    s3_endpoint: options.Endpoint = None,
    s3_region: options.Region = None,
) -> int:
    """Upload a file of prompts and make a job of it; prints the job's id.

    The job waits until a worker serves its model. Every non-blank line gives exactly one row of results, bad
    lines an error row.
    """
    parameters = options.sampling(max_tokens, temperature, top_p, top_k, stop, others)
    limit = options.deadline(deadline)
    source, name = options.prompts(file)
    name_of_job = chosen_id(job_id, idempotency_key) or new_job_id()

    async def work() -> int:
        async with options.client(redis_url, store, s3_endpoint, s3_region) as client:
            try:
                job = await client.submit(
                    source, model=model, job_id=name_of_job, name=name, prompt_column=prompt_column,
                    template=template, id_column=id_column, chat=chat, defaults=parameters, seed=seed,
                    priority=priority, max_shards=max_shards, deadline=limit, context=context,
                    max_rows=max_rows, max_line_bytes=max_line_bytes, strict=strict,
                )  # fmt: skip
            except asyncio.CancelledError:
                raise Interrupted(await _interrupted_submission(client, name_of_job)) from None
            if watch:
                render.say(job.id)
                return await follow(client, job.id, as_json)
            await _tell_submitted(job, as_json)
            return 0

    return run_async(work())


async def _interrupted_submission(client: Client, job: str) -> str:
    """How far it had come: a job whose job.json is there is a job, whatever Redis was told."""
    if await asyncio.to_thread(client.storage.head, layout.job(job)) is None:
        return "Interrupted. Nothing was submitted."
    return (
        f"Interrupted, but job {job} is stored: pagemill cancel {job} stops it, submitting it again goes on."
    )


async def _tell_submitted(job: Job, as_json: bool) -> None:
    status = await job.status()
    if as_json:
        render.print_json(
            {"job": job.id, "existed": job.existed, "state": status.state, "output": status.output}
        )
        return
    print(job.id)
    if job.existed:
        render.say(f"This job was submitted before and is {status.state}.")
    elif status.blocked_reason:
        render.say(f"It waits: {status.blocked_reason}.")
    if sys.stdout.isatty():
        render.say(f"Next: pagemill watch {job.id}")


async def follow(client: Client, job: str, as_json: bool) -> int:
    """Show the job until it ends; the exit code. Ctrl-C leaves it running."""
    with interruptible(
        f"Job {job} goes on; pagemill watch {job} follows it again, pagemill cancel {job} stops it."
    ):
        if as_json:
            async for last in client.watch(job):
                render.print_json(render.status_document(last), lines=True)
        else:
            last = await Follower(Console(highlight=False)).follow(
                client.watch(job), RecentErrors(client, job)
            )
    return ended(last)


def ended(status: JobStatus) -> int:
    """The exit code of following a job to its end; raises JobFailed unless it completed."""
    if status.state == "completed":
        return 0
    why = f": {status.error_message or status.error_code}" if status.error_code else "."
    raise JobFailed(f"Job {status.job} ended as {status.state}{why}", status.error_code)


@app.command(epilog=EXIT_CODES)
def cancel(
    job: options.JobId,
    as_json: options.Json = False,
    redis_url: options.RedisUrl = None,
    store: options.Store = None,
    s3_endpoint: options.Endpoint = None,
    s3_region: options.Region = None,
) -> None:
    """Stop a job: finished rows are kept, the rest become error rows. Harmless to repeat."""

    async def work() -> tuple[str, bool]:
        async with options.client(redis_url, store, s3_endpoint, s3_region) as client:
            outcome = await client.cancel(job)
            return outcome.state, outcome.accepted

    state, accepted = run_async(work())
    if not accepted:
        ended = "is ending" if state == "finalizing" else f"has ended ({state})"
        raise JobConflict(f"Job {job} {ended}: there is nothing left to cancel.")
    if as_json:
        render.print_json({"job": job, "state": state})
    elif state == "cancelled":
        print(f"{job} is cancelled.")
    else:
        print(f"{job} is {state}: it ends when the shards that are held are handed in.")


@app.command(epilog=EXIT_CODES)
def recover(
    job: Annotated[
        str | None, typer.Argument(metavar="JOB", help="The job's id.", show_default=False)
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Every unfinished job of the store.")] = False,
    as_json: options.Json = False,
    redis_url: options.RedisUrl = None,
    store: options.Store = None,
    s3_endpoint: options.Endpoint = None,
    s3_region: options.Region = None,
) -> None:
    """Rebuild the state of a job that Redis has lost from its objects. Workers do so by themselves."""
    if (job is None) is not every:
        raise UsageError("Name a job, or say --all.")

    async def work() -> list[str]:
        async with options.client(redis_url, store, s3_endpoint, s3_region) as client:
            if job is None:
                return await client.recover_all()
            return [job] if await client.recover(job) else []

    rebuilt = run_async(work())
    if as_json:
        render.print_json({"rebuilt": rebuilt})
        return
    for name in rebuilt:
        print(name)
    render.say(f"{len(rebuilt)} rebuilt." if every or rebuilt else f"Redis knows {job}; nothing to rebuild.")
