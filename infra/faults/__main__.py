"""The command: `infra/chaos --minutes M --seed S`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from faults.chaos import Options, run
from servers import ServerError


def main() -> int:
    """0 when nothing is lost, doubled, wrong or left behind."""
    parser = argparse.ArgumentParser(
        prog="infra/chaos",
        description="Runs many jobs over several workers, with a simulated engine, while Redis, the S3 server, the"
        " workers and the clients fail in every way there is; then reads every dataset and compares.",
    )
    usual = Options(minutes=1, seed=0)
    parser.add_argument(
        "--minutes", type=float, default=1.0, help="how long faults and new jobs come (default 1)"
    )
    parser.add_argument("--seed", type=int, default=0, help="decides jobs and faults (default 0)")
    parser.add_argument("--workers", type=int, default=usual.workers)
    parser.add_argument("--gap", type=float, default=usual.gap_s, help="seconds between faults, on average")
    parser.add_argument("--jobs", type=float, default=usual.jobs_per_minute, help="new jobs a minute")
    parser.add_argument("--drain", type=float, default=usual.drain_s, help="seconds after the last fault until all"
                        " jobs must have ended (default %(default)s)")  # fmt: skip
    parser.add_argument("--json", type=Path, help="write the summary here")
    parser.add_argument("--quiet", action="store_true", help="no log of faults on the terminal")
    given = parser.parse_args()
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
    print(
        "faults {faults}, rows {rows}, lost {lost}, doubled {doubled}, wrong counts {wrong_counts}".format(
            **summary
        )
    )
    print("jobs {jobs}, wrong rows {wrong_rows}, wrong ends {wrong_ends}, wrong replies {wrong_replies}, hung {hung},"
          " left behind {left_behind}, unforeseen {unforeseen}; drained in {drained_s} s".format(**summary))  # fmt: skip
    if kept is None:
        return 0
    print(f"What was logged, and the state of Redis, is in {kept}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
