"""The dashboard imports, and shows figures that a worker has."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from prometheus_client.metrics import MetricWrapperBase

from pagemill.worker.metrics import Figures
from pagemill.worker.native import FIGURES

FILE = Path(__file__).resolve().parents[2] / "infra" / "grafana" / "pagemill.json"
BOARD: dict[str, Any] = json.loads(FILE.read_text())
PANELS: list[dict[str, Any]] = BOARD["panels"]
CHARTS = [panel for panel in PANELS if panel["type"] != "row"]
EXPRESSIONS = [target["expr"] for panel in CHARTS for target in panel["targets"]]
QUERIES = [variable["definition"] for variable in BOARD["templating"]["list"]]
VALUES = {
    "kind": {"prompt", "completion", "cached"},
    "status": {"completed", "failed"},
    "until": {"started", "first_token", "end"},
    "figure": set(FIGURES),
}


def series() -> dict[str, set[str]]:
    """Every name that a scrape of a worker has, with its labels."""
    found: dict[str, set[str]] = {}
    for metric in vars(Figures()).values():
        if not isinstance(metric, MetricWrapperBase):
            continue
        (family,) = metric.describe()
        endings = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}.get(family.type, ("",))
        labels = {*metric._labelnames, "job", "instance", *({"le"} if family.type == "histogram" else ())}
        found |= {family.name + ending: labels for ending in endings}
    for family in Figures().rows.collect():
        for sample in family.samples:
            found[sample.name] = {*sample.labels, "job", "instance"} | found.get(sample.name, set())
    return found


def test_every_figure_in_it_is_one_that_workers_have() -> None:
    known = series()
    assert len(known) > 12
    for text in EXPRESSIONS + QUERIES:
        names = re.findall(r"pagemill_\w+", text)
        assert names, text
        assert set(names) <= known.keys(), text
        labels = set().union(*(known[name] for name in names))
        grouped = {name.strip() for group in re.findall(r"by \(([^)]*)\)", text) for name in group.split(",")}
        assert grouped <= labels, text
        for name, body in re.findall(r"(pagemill_\w+)\{([^}]*)\}", text):
            for label, value in re.findall(r"(\w+)=~?\"([^\"]*)\"", body):
                assert label in known[name], text
                assert value.startswith("$") or value in VALUES[label], text


def test_every_expression_is_closed() -> None:
    for text in EXPRESSIONS:
        for opening, closing in ("()", "{}", "[]"):
            assert text.count(opening) == text.count(closing), text


def test_it_imports() -> None:
    assert BOARD["id"] is None  # or Grafana takes it for one of its own
    (source,) = BOARD["__inputs"]
    uid = f"${{{source['name']}}}"
    sources = [panel["datasource"] for panel in CHARTS] + [
        t["datasource"] for panel in CHARTS for t in panel["targets"]
    ]
    sources += [variable["datasource"] for variable in BOARD["templating"]["list"]]
    assert all(one == {"type": source["pluginId"], "uid": uid} for one in sources)
    needed = {one["id"] for one in BOARD["__requires"]}
    assert {panel["type"] for panel in CHARTS} | {source["pluginId"]} <= needed
    ids = [panel["id"] for panel in PANELS]
    assert len(set(ids)) == len(ids)
    used = {name for text in EXPRESSIONS for name in re.findall(r"\$(\w+)", text)} - {"__rate_interval"}
    assert used == {variable["name"] for variable in BOARD["templating"]["list"]}


def test_no_panel_covers_another() -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in PANELS:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert (x, y) not in taken, f"{panel['title']} lies on {taken[x, y]}"
                taken[x, y] = panel["title"]
