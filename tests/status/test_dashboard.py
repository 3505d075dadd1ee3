"""The Grafana dashboard in tools/: it asks for metrics that exist, and a real Prometheus answers."""

from __future__ import annotations

import json
import re
import subprocess
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.prometheus import exporter, fetched, free_port, program, running

from safe_gpu.devices import Gpu
from safe_gpu.status.facts import ClaimStatus, GpuStatus, HostStatus, WaiterStatus
from safe_gpu.status.render import render_metrics

DASHBOARD = Path(__file__).parents[2] / "tools" / "grafana-dashboard.json"

pytestmark = pytest.mark.skipif(not DASHBOARD.exists(), reason="this is not a checkout: there is no tools/ here")

CLAIM = ClaimStatus(7, "anna", since=1.0, until=2.0)
STATUS = HostStatus(
    host="gpu1",
    driver="nvml",
    driver_version="",
    state_dir="/tmp/safe-gpu",
    taken_at=100.0,
    gpus=(
        GpuStatus(Gpu(0, "GPU-a", memory_used=1 << 30), "free"),
        GpuStatus(Gpu(1, "GPU-b", memory_used=1 << 30), "claimed", claim=CLAIM, idle_for=30.0),
    ),
    queue=(WaiterStatus(1, 8, "ben", 1, 10.0),),
)
"""A host of which everything is known, so that every metric has a sample."""


def document() -> Any:
    return json.loads(DASHBOARD.read_text())


def queries() -> list[str]:
    return [target["expr"] for panel in document()["panels"] for target in panel["targets"]]


def names(text: str) -> set[str]:
    return set(re.findall(r"\bsafe_gpu_\w+", text))


def printed() -> set[str]:
    return set(re.findall(r"^(safe_gpu_\w+)[{ ]", render_metrics(STATUS), re.MULTILINE))


def test_it_shows_each_metric_and_no_other() -> None:
    assert names(" ".join(queries())) == printed()
    assert names(DASHBOARD.read_text()) == printed()
    assert all(names(query) for query in queries())


def test_its_variables_are_defined_and_its_panels_do_not_overlap() -> None:
    dashboard = document()
    defined = {one["name"] for one in dashboard["templating"]["list"]}
    assert set(re.findall(r"\$\{?(\w+)", " ".join(queries()) + json.dumps(dashboard["panels"]))) == defined
    places = [
        (x, y)
        for one in (panel["gridPos"] for panel in dashboard["panels"])
        for x in range(one["x"], one["x"] + one["w"])
        for y in range(one["y"], one["y"] + one["h"])
    ]
    assert len(places) == len(set(places))
    assert max(x for x, _ in places) < 24
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a Prometheus that scrapes a node_exporter, which serves every metric."""
    directory = tmp_path_factory.mktemp("prometheus")
    (directory / "textfiles").mkdir()
    (directory / "textfiles" / "safe_gpu.prom").write_text(render_metrics(STATUS))
    here, source = free_port(), free_port()
    config = directory / "prometheus.yml"
    job = {"job_name": "gpus", "static_configs": [{"targets": [f"127.0.0.1:{source}"]}]}
    times = {"scrape_interval": "1s", "scrape_timeout": "1s"}
    config.write_text(json.dumps({"global": times, "scrape_configs": [job]}))  # JSON is YAML
    server = (
        program("prometheus"),
        f"--config.file={config}",
        f"--storage.tsdb.path={directory / 'data'}",
        f"--web.listen-address=127.0.0.1:{here}",
        "--log.level=error",
    )
    with running(*exporter(directory / "textfiles", source)), running(*server):
        fetched(f"http://127.0.0.1:{here}/-/ready")
        yield f"http://127.0.0.1:{here}"


def answer(prometheus: str, query: str) -> list[Any]:
    found = json.loads(fetched(f"{prometheus}/api/v1/query?{urllib.parse.urlencode({'query': query})}"))
    assert found["status"] == "success"
    return list(found["data"]["result"])


def test_every_query_has_an_answer_in_a_real_prometheus(prometheus: str, eventually: Any) -> None:
    eventually(lambda: bool(answer(prometheus, "safe_gpu_oldest_wait_seconds")))
    for query in queries():
        assert answer(prometheus, query.replace("$host", ".*")), query
        done = subprocess.run(
            [program("promtool"), "query", "instant", prometheus, query.replace("$host", ".*")],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert (done.returncode, done.stderr) == (0, ""), query
    assert answer(prometheus, 'sum(safe_gpu_gpu_state{state="claimed"})')[0]["value"][1] == "1"
