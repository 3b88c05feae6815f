"""The dashboard asks for metrics that the engine has."""

from __future__ import annotations

import json
import pathlib
import re

from prometheus_client.parser import text_string_to_metric_families

import server
from jaxserve.engine.metrics import EngineMetrics
from jaxserve.engine.scheduler import Scheduler
from jaxserve.kv.page_pool import PagePool

FOLDER = pathlib.Path(server.__file__).parent


def metric_names() -> set[str]:
    """Families that the engine exports, with the endings that counters and histograms have."""
    metrics = EngineMetrics("m")
    scheduler = Scheduler(PagePool(8, 16), max_num_seqs=2, max_step_tokens=8, prefix_caching=True)
    names = set()
    for family in text_string_to_metric_families(metrics.text(scheduler)):
        endings = {"counter": ["_total"], "histogram": ["_bucket"]}.get(family.type, [""])
        names |= {family.name + ending for ending in endings}
    return names


def test_every_panel_asks_for_metrics_that_exist() -> None:
    dashboard = json.loads((FOLDER / "grafana.json").read_text())
    known = metric_names()
    assert len(dashboard["panels"]) > 10
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            asked = set(re.findall(r"(?:vllm|jaxserve):\w+", target["expr"]))
            assert asked, panel["title"]
            assert asked <= known, (panel["title"], asked - known)
