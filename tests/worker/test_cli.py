"""`pagemill run` and `pagemill worker` as programs, with the simulated engine: resumed, refused, interrupted,
in the dark."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pagemill.jobs.cli import main
from pagemill.jobs.client import Client
from pagemill.jobs.reading import Results
from pagemill.jobs.storage import open_storage
from pagemill.worker.oneshot import STATE_FOLDER

PROGRAM = [sys.executable, "-c", "import sys; from pagemill.jobs.cli import main; sys.exit(main())"]
Start = Callable[..., "subprocess.Popen[str]"]
Here = Callable[..., tuple[int, str, str]]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "one"}\nnot json\n{"prompt": "two", "max_tokens": 3}\n')
    return file


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts the program; `sim_delay_ms=5` and the like become variables. What still runs at the end is
    ended."""
    started: list[subprocess.Popen[str]] = []

    def begin(*words: object, stdin: Any = subprocess.DEVNULL, **variables: object) -> subprocess.Popen[str]:
        env = {name: value for name, value in os.environ.items() if not name.startswith("PAGEMILL_")}
        env |= {"PAGEMILL_ENGINE": "simulated", "PAGEMILL_LEASE_TTL_S": "1", "HOME": str(tmp_path)}
        env |= {f"PAGEMILL_{name.upper()}": str(value) for name, value in variables.items()}
        process = subprocess.Popen(
            [*PROGRAM, *map(str, words)], env=env, text=True, cwd=tmp_path, stdin=stdin,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        started.append(process)
        return process

    yield begin
    for process in started:
        if process.poll() is None:
            process.kill()
            process.communicate()


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]) -> Here:
    """The program in this process, for what ends before an engine starts."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PAGEMILL_ENGINE", "simulated")

    def call(*words: object) -> tuple[int, str, str]:
        capsysbinary.readouterr()
        code = main([str(word) for word in words])
        out, err = capsysbinary.readouterr()
        return code, out.decode(), err.decode()

    return call


def ended(process: subprocess.Popen[str], text: str | None = None) -> tuple[int, str, str]:
    out, err = process.communicate(text, timeout=60)
    assert "Traceback" not in err, err
    return process.returncode, out, err


def rows_of(output: Path, job: str) -> list[Any]:
    return Results(open_storage(output), job).list()


# run


def test_a_run_ends_with_a_table_and_the_next_is_told_that_it_ended(
    start: Start, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")  # nothing of ours
    output = tmp_path / "my out"
    code, out, err = ended(start("run", prompts, "--output", output))
    assert code == 0, err
    assert "1 failed" in err  # progress, one line at a time
    lines = out.splitlines()
    assert [line.split("\t")[0] for line in lines[:3]] == ["0", "1", "2"]
    assert "2 completed, 1 failed, of 3" in out
    assert "invalid_json_line 1" in out
    assert "tokens/s" in out
    assert "my out/jobs/" in out
    assert "2 files in" in out
    assert "--store 'my out'" in out
    # What it says to do next works when copied.
    following = [line.strip() for line in out[out.index("Next:") :].splitlines() if "--format jsonl" in line]
    copied = subprocess.run(
        ["/bin/sh", "-c", following[0]],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert len(copied.stdout.splitlines()) == 3, copied.stderr

    code, out, err = ended(start("run", prompts, "--output", output, "--json", model="smollm2"))
    document = json.loads(out)
    assert (code, document["state"], document["completed"], document["failed"]) == (0, "completed", 2, 1)
    assert document["seconds"] is None  # nothing ran
    assert err == ""
    assert len(rows_of(output, document["job"])) == 3


def test_another_input_model_or_parameter_is_refused_and_new_begins_anew(
    start: Start, here: Here, prompts: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    words = ["run", prompts, "-o", output, "--json", "--max-tokens", 5]
    first = json.loads(ended(start(*words, "--seed", 1))[1])
    before = rows_of(output, first["job"])
    changes = {"parameters": ["--seed", 1, "--top-k", 2], "seed": ["--seed", 2], "context": ["--context", 99]}
    for word, change in changes.items():
        code, out, err = here(*words, *change)
        assert (code, out) == (4, ""), err
        assert f"other {word}" in err or f"and {word}" in err
        assert "--new" in err
    prompts.write_text('{"prompt": "another"}\n')
    code, _, err = here(*words, "--seed", 1)
    assert code == 4
    assert "other input" in err
    second = json.loads(ended(start(*words, "--seed", 1, "--new", "--quiet"))[1])
    assert second["job"] != first["job"]
    assert second["total"] == 1
    assert rows_of(output, first["job"]) == before


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_run_that_was_cut_off_goes_on_and_computes_no_sealed_row_again(
    start: Start, tmp_path: Path, number: signal.Signals
) -> None:
    prompts, output, log = tmp_path / "in.jsonl", tmp_path / "out", tmp_path / "computed"
    prompts.write_text("".join(json.dumps({"prompt": f"row {i}"}) + "\n" for i in range(1500)))
    pace = {"sim_rows_per_second": 150, "sim_log": log, "seal_rows": 20, "seal_seconds": 0.2}
    words = ["run", prompts, "-o", output, "--json"]
    cut = start(*words, **pace)
    # Two of one shard, since the last one's record may not have been made before the kill.
    while not any(len(segments) > 1 for segments in segments_of(output)):
        assert cut.poll() is None
    cut.send_signal(number)
    _, err = cut.communicate(timeout=30)
    if number != signal.SIGKILL:
        assert cut.returncode == 130
        assert "run the same command again" in err
    assert "Traceback" not in err
    sealed = sum(len(pq_rows(path)) for segments in segments_of(output) for path in segments[:-1])
    assert 0 < sealed < 1500
    ran = float((output / STATE_FOLDER / "seconds").read_text())
    code, out, err = ended(start(*words, **pace | {"sim_rows_per_second": 0}))
    document = json.loads(out)
    assert (code, document["completed"], document["total"]) == (0, 1500, 1500)
    # What it says of speed is the whole job's, the time before the cut included.
    assert document["seconds"] > ran
    speed = document["completion_tokens"] / document["seconds"]
    assert document["tokens_per_second"] == pytest.approx(speed, rel=1e-3)
    assert "Going on with" in err
    assert [row.row_index for row in rows_of(output, document["job"])] == list(range(1500))
    # An id in the log ends in the row's index; what comes before it is another lease's each time.
    computed = Counter(rid.rpartition("/")[2] for rid in log.read_text().split())
    assert len(computed) == 1500
    assert sum(computed.values()) - 1500 <= 1500 - sealed


def segments_of(output: Path) -> list[list[Path]]:
    """Those of each shard, in the order in which they were sealed."""
    return [
        sorted(shard.glob("*.parquet"), key=lambda path: path.stat().st_mtime_ns)
        for shard in output.glob("jobs/*/_work/*")
    ]


def pq_rows(path: Path) -> list[int]:
    import pyarrow.parquet as pq

    indexes: list[int] = pq.read_table(path, columns=["row_index"]).column("row_index").to_pylist()
    return indexes


def test_standard_input_runs_and_is_recognised_again(start: Start, tmp_path: Path) -> None:
    words = ["run", "-", "-o", tmp_path / "out", "--json"]
    text = '{"prompt": "from a pipe"}\n' + "bad\n" * 5
    _, out, err = ended(start(*words, stdin=subprocess.PIPE), text)
    first = json.loads(out)
    assert first["completed"] == 1
    assert f"failed · and 2 more: pagemill results {first['job']} --store {tmp_path / 'out'}" in err
    again = json.loads(ended(start(*words, stdin=subprocess.PIPE), text)[1])
    assert (again["job"], again["seconds"]) == (first["job"], None)
    code, _, err = ended(start(*words, stdin=subprocess.PIPE), text * 2)
    assert code == 4
    assert "other input" in err


def test_a_file_that_cannot_be_run_fails_with_the_reason(start: Start, prompts: Path, tmp_path: Path) -> None:
    code, out, err = ended(start("run", prompts, "-o", tmp_path / "strict", "--strict", "--json"))
    assert code == 9
    assert "line 2" in err
    assert json.loads(out)["state"] == "failed"
    prompts.write_text("\n\n")
    code, _, err = ended(start("run", prompts, "-o", tmp_path / "empty", "-q"))
    assert code == 9
    assert "nothing to run" in err


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["none.jsonl", "-o", "out"], 2, "There is no file"),
        (["{folder}", "-o", "out"], 2, "is a folder"),
        (["{file}", "-o", "{file}"], 2, "is a file"),
        (["{file}", "-o", "/proc/none"], 2, "Cannot write into"),
        (["{file}", "-o", "out", "-m", "./none"], 7, "no model at ./none"),
        (["{file}", "-o", "out", "-m", "{file}"], 7, "not a .gguf"),
        (["{file}", "-o", "out", "-m", "{folder}"], 7, "config.json"),
        (
            ["{file}", "-o", "out", "--kv-cache-gb", "-1"],
            2,
            "--kv-cache-gb must be a number above 0 and up to 1,048,576, not -1.0",
        ),
        (
            ["{file}", "-o", "out", "--dtype", "int4"],
            2,
            '--dtype must be auto, float32, bfloat16 or float16, not "int4"',
        ),
        (["{file}", "-o", "out", "--device", "tpu"], 2, "--device: it must be auto, cpu, cuda or cuda:N"),
        (
            ["{file}", "-o", "out", "--quantization", "int4"],
            2,
            '--quantization must be int8, fp8 or left out, not "int4"',
        ),
        (["{file}", "-o", "out", "--set", "nonsense=1"], 2, "nonsense"),
        (["{file}", "-o", "out", "--store", "ftp://x"], 5, "ftp://"),
        (["{file}"], 2, "--output"),
    ],
)
def test_what_cannot_be_run_is_one_sentence(
    here: Here, prompts: Path, tmp_path: Path, words: list[str], code: int, said: str
) -> None:
    ending, out, err = here("run", *(word.format(file=prompts, folder=tmp_path) for word in words))
    assert ending == code
    assert said in err
    assert len(err.splitlines()) == 1
    assert out == ""
    assert not list(tmp_path.glob("out/jobs/*"))


def test_a_folder_whose_job_never_came_to_be_is_free_for_another_model(
    here: Here, start: Start, prompts: Path, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    assert here("run", "none.jsonl", "-o", "out", "-m", model)[0] == 2
    assert ended(start("run", prompts, "-o", "out", "-q"))[0] == 0
    code, _, err = here("run", prompts, "-o", "out", "-m", model)
    assert code == 4
    assert "belongs to job" in err


def test_two_runs_do_not_share_a_folder(here: Here, prompts: Path, tmp_path: Path) -> None:
    import fcntl

    folder = tmp_path / "out" / STATE_FOLDER
    folder.mkdir(parents=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        code, _, err = here("run", prompts, "-o", tmp_path / "out")
    assert code == 2
    assert "Another run" in err


def test_a_damaged_memory_of_the_folder_is_said(here: Here, prompts: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out" / STATE_FOLDER
    folder.mkdir(parents=True)
    (folder / "run.json").write_text("{")
    code, _, err = here("run", prompts, "-o", tmp_path / "out")
    assert code == 2
    assert "damaged" in err


# worker


def test_a_worker_serves_until_it_is_told_to_leave(
    start: Start, redis_url: str, prompts: Path, tmp_path: Path
) -> None:
    name, store = f"served-{tmp_path.name}", tmp_path / "store"
    surroundings = {"redis_url": redis_url, "store": store}

    async def job() -> int:
        async with Client(redis_url, str(store)) as client:
            submitted = await client.submit(prompts, model=name)
            return (await submitted.wait(timeout=60)).completed

    worker = start("worker", "--name", name, **surroundings)
    assert asyncio.run(job()) == 2
    worker.send_signal(signal.SIGTERM)
    _, err = worker.communicate(timeout=30)
    assert worker.returncode == 0, err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--slots", "many"], 2, "--slots"),
        (["--log-level", "loud"], 2, "--log-level"),
        (["--redis-url", "localhost"], 2, "--redis-url"),
        (["--dtype", "fp8"], 2, "--dtype"),
        (["--device", "gpu:0"], 2, "--device"),
    ],
)
def test_bad_options_of_a_worker_are_one_sentence(here: Here, words: list[str], code: int, said: str) -> None:
    ending, _, err = here("worker", *words)
    assert ending == code
    assert said in err
    assert len(err.splitlines()) == 1


def test_a_worker_without_its_model_says_so(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEMILL_ENGINE", "native")
    code, _, err = here("worker", "--model", "./none")
    assert code == 7
    assert "no model at ./none" in err


def test_a_worker_that_cannot_start_says_why(
    start: Start, redis_url: str, prompts: Path, tmp_path: Path
) -> None:
    here = {"store": tmp_path / "store", "redis_url": redis_url}
    weightless = tmp_path / "model"
    weightless.mkdir()
    (weightless / "config.json").write_text('{"model_type": "llama"}')
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        processes = {
            (6, "127.0.0.1:1"): start(
                "worker", **here | {"redis_url": "redis://127.0.0.1:1", "redis_patience_s": 0.2}
            ),
            (5, "file is where a folder"): start("worker", **here | {"store": prompts / "store"}),
            (2, "in use"): start("worker", "--metrics-port", port, **here),
            (7, "names no architecture"): start(
                "worker", "--model", weightless, **here | {"engine": "native"}
            ),
        }
        for (expected, said), process in processes.items():
            code, _, err = ended(process)
            assert code == expected, err
            assert said in err.splitlines()[-1], err
