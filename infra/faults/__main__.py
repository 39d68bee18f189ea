"""The command: `infra/chaos --minutes M --seed S`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from faults.chaos import Options, run
from servers import ServerError

FIRST = "faults {faults}, rows {rows}, lost {lost}, doubled {doubled}, wrong counts {wrong_counts}"
SECOND = (
    "jobs {jobs}, wrong rows {wrong_rows}, wrong ends {wrong_ends}, wrong replies {wrong_replies},"
    " hung {hung}, left behind {left_behind}, unforeseen {unforeseen}; drained in {drained_s} s"
)


def parsed() -> argparse.Namespace:
    usual = Options(minutes=1, seed=0)
    parser = argparse.ArgumentParser(
        prog="infra/chaos",
        description="Many jobs over several workers with a simulated engine, while Redis, the S3 server, the"
        " workers and the clients fail in every way there is; then every dataset is read and compared.",
    )

    def number(name: str, what: str, default: float) -> None:
        parser.add_argument(name, type=type(default), default=default, help=f"{what} (default %(default)s)")

    number("--minutes", "how long faults and new jobs come", float(usual.minutes))
    number("--seed", "decides jobs and faults", usual.seed)
    number("--workers", "worker processes", usual.workers)
    number("--gap", "seconds between faults, on average", usual.gap_s)
    number("--jobs", "new jobs a minute", usual.jobs_per_minute)
    number("--drain", "seconds after the last fault until all jobs must have ended", usual.drain_s)
    parser.add_argument("--json", type=Path, help="write the summary here")
    parser.add_argument("--quiet", action="store_true", help="no log of faults on the terminal")
    return parser.parse_args()


def main() -> int:
    """0 when nothing is lost, doubled, wrong, hung or left behind."""
    given = parsed()
    options = Options(given.minutes, given.seed, given.workers, given.gap, given.jobs, given.drain)
    try:
        summary, kept = run(options, loud=not given.quiet)
    except ServerError as error:
        print(f"pagemill: {error}", file=sys.stderr)
        return 1
    if given.json:
        given.json.write_text(json.dumps(summary, indent=1) + "\n")
    for sentence in summary["found"]:
        print(sentence)
    print(FIRST.format(**summary))
    print(SECOND.format(**summary))
    if kept is None:
        return 0
    print(f"What was logged, and the state of Redis, is in {kept}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
