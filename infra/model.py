"""Print where the demo model is, fetching it into models/ the first time."""

from __future__ import annotations

import sys
from pathlib import Path

from pagemill.jobs.errors import PagemillError
from pagemill.worker.models import DEMO_FILE, fetch_demo_model, find_demo_model

if __name__ == "__main__":
    try:
        model = find_demo_model()
        if model is None:
            print(f"· fetching the demo model, {DEMO_FILE} (once, 90 MB)", file=sys.stderr)
            model = fetch_demo_model(Path("models") / DEMO_FILE)
        print(model)
    except PagemillError as error:
        sys.exit(f"pagemill: {error}")
