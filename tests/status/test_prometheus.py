"""Metrics: what they say, and that Prometheus reads them: its own parser, and a real server."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import threading
import urllib.parse
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import api
from support.claims import claim
from support.processes import free_port
from support.real import long, unavailable

NOW = 1_795_000_000.0
CLAIM = api.Holder(7, "anna", since=NOW - 60, until=NOW + 60, utilization=40.0)
GPUS = (
    api.GpuStatus(api.Gpu(0, "GPU-a", memory_used=1 << 30), "free"),
    api.GpuStatus(api.Gpu(1, "GPU-b"), "claimed", claim=CLAIM, idle_for=30.0),
)
QUEUE = (api.WaiterStatus(1, 8, "ben", 1, NOW - 90), api.WaiterStatus(2, 9, "ben", 1, NOW - 10))
STATUS = api.HostStatus("gpu1", "nvml", "", "/tmp/safe-gpu", NOW, GPUS, QUEUE)


def program(name: str) -> str:
    return shutil.which(name) or unavailable(f"needs {name}")


def test_every_metric() -> None:
    assert [line for line in api.render_metrics(STATUS).splitlines() if not line.startswith("#")] == [
        "safe_gpu_up 1.0",
        *(
            f'safe_gpu_gpu_state{{gpu="{gpu}",UUID="{uuid}",vendor="nvidia",state="{state}"}} {float(state == now)}'
            for gpu, uuid, now in (("0", "GPU-a", "free"), ("1", "GPU-b", "claimed"))
            for state in ("free", "claimed", "busy", "display", "unusable")
        ),
        'safe_gpu_memory_used_bytes{gpu="0",UUID="GPU-a",vendor="nvidia"} 1073741824.0',
        'safe_gpu_claimed{gpu="1",UUID="GPU-b",vendor="nvidia",user="anna"} 1.0',
        'safe_gpu_claim_start_time_seconds{gpu="1",UUID="GPU-b",vendor="nvidia",user="anna"} 1794999940.0',
        'safe_gpu_claim_idle_seconds{gpu="1",UUID="GPU-b",vendor="nvidia",user="anna"} 30.0',
        'safe_gpu_claim_utilization{gpu="1",UUID="GPU-b",vendor="nvidia",user="anna"} 40.0',
        'safe_gpu_claim_expected_end_time_seconds{gpu="1",UUID="GPU-b",vendor="nvidia",user="anna"} 1795000060.0',
        'safe_gpu_claim_beside_bytes{gpu="1",UUID="GPU-b",vendor="nvidia",user="anna"} 0.0',
        'safe_gpu_waiting{user="ben"} 2.0',
        "safe_gpu_oldest_wait_seconds 90.0",
    ]


def test_what_is_not_known_has_no_sample() -> None:
    text = api.render_metrics(replace(STATUS, warnings=("the claims are not known",)))
    assert "safe_gpu_gpu_state{" in text
    assert "safe_gpu_up 0.0" in text
    for name in ("claimed{", "waiting", "oldest"):
        assert f"safe_gpu_{name}" not in text


@settings(max_examples=25)
@given(st.text(max_size=20))
def test_the_parser_of_prometheus_reads_any_user_back(user: str) -> None:
    if importlib.util.find_spec("prometheus_client") is None:
        unavailable("needs prometheus-client")
    read = importlib.import_module("prometheus_client.parser").text_string_to_metric_families
    gpu = replace(GPUS[1], claim=CLAIM._replace(user=user))
    text = api.render_metrics(replace(STATUS, gpus=(gpu,)))
    families = {one.name: one for one in read(text)}
    assert [*families] == re.findall("^# TYPE (\\S+)", text, re.MULTILINE)
    assert all(one.type == "gauge" and one.documentation for one in families.values())
    (sample,) = families["safe_gpu_claimed"].samples
    assert (sample.labels["gpu"], sample.labels["UUID"], sample.value) == ("1", "GPU-b", 1.0)
    assert len(sample.labels["user"]) >= len(user.strip("\n")) - user.count("\ud800")


def test_a_real_claim_and_the_file(dgx: Any, tmp_path: Path, run_here: Any) -> None:
    file = tmp_path / "safe_gpu.prom"
    file.write_text("old")
    file.chmod(0o600)
    with claim(2, hold_for="1h"):
        done = run_here("status", "--prometheus", "--output", file)
        printed = run_here("status", "--prometheus").stdout
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    for text in (file.read_text(), printed):
        assert len(re.findall(r"^safe_gpu_claim(?:ed|_expected_end_time_seconds){", text, re.MULTILINE)) == 4
    assert file.stat().st_mode & 0o777 == 0o644
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


def test_jobs_and_limits() -> None:
    claimed, waiter = GPUS[1], QUEUE[0]
    claim = CLAIM._replace(job="sge:7.3")
    limited = replace(waiter, limit=(1, 1))
    queue = (limited, limited, waiter)
    status = replace(STATUS, gpus=(replace(claimed, claim=claim),), queue=queue, max_gpus={"ben": 1})
    text = api.render_metrics(status)
    assert 'safe_gpu_max_gpus{user="ben"} 1.0' in text
    assert 'safe_gpu_claim_info{gpu="1",UUID="GPU-b",vendor="nvidia",user="anna",batch_job="sge:7.3"} 1.0' in text
    assert 'safe_gpu_waiting_at_limit{user="ben"} 2.0' in text
    shares = [claim._replace(job="sge:8", share=2 << 30, memory_used=3 << 30), claim, claim]
    text = api.render_metrics(replace(status, gpus=(replace(claimed, claim=api.Holder.of_sharers(shares)),)))
    assert re.findall('safe_gpu_claim_info{.*batch_job="(.*)"}', text) == ["sge:8", "sge:7.3"]
    of_one = 'gpu="1",UUID="GPU-b",vendor="nvidia",user="anna",pid="7"'
    assert f"safe_gpu_share_bytes{{{of_one}}} {float(2 << 30)}" in text
    assert f"safe_gpu_share_used_bytes{{{of_one}}} {float(3 << 30)}" in text


def test_a_driver_that_fails_shows_in_the_file(command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAFE_GPU_DRIVER", "kfd")
    monkeypatch.setenv("SAFE_GPU_FSROOT", str(tmp_path))
    file, missing = tmp_path / "safe_gpu.prom", tmp_path / "missing" / "safe_gpu.prom"
    assert api.main(["status", "--prometheus", "--output", str(file)]) == 69
    assert file.read_text() == "safe_gpu_up 0\n"
    done = command.run("status", "--prometheus", "--output", missing)
    assert (done.returncode, f"{missing} cannot be written: No such file or directory" in done.stderr) == (74, True)


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo, lambda path: os.symlink("/dev/null", path)])
def test_what_is_no_regular_file_is_not_replaced(tmp_path: Path, make: Callable[[Path], None], capfd: Any) -> None:
    """Root would make a file of /dev/null."""
    file = tmp_path / "safe_gpu.prom"
    make(file)
    before = file.lstat().st_mode, file.lstat().st_ino
    assert api.main(["status", "--prometheus", "--output", str(file)]) == 74
    assert f"{file} exists and is not a regular file" in capfd.readouterr().err
    assert (file.lstat().st_mode, file.lstat().st_ino) == before
    assert list(tmp_path.iterdir()) == [file]


# The Grafana dashboard in tools/: it asks for metrics that exist, and a real Prometheus answers

DASHBOARD = Path(__file__).parents[2] / "tools" / "grafana-dashboard.json"

checkout = pytest.mark.skipif(not DASHBOARD.exists(), reason="this is not a checkout: there is no tools/ here")


def queries() -> list[str]:
    return [target["expr"] for panel in json.loads(DASHBOARD.read_text())["panels"] for target in panel["targets"]]


@checkout
def test_it_shows_each_metric_and_no_other() -> None:
    """But for those that are for alerts, and to be joined."""
    printed = set(re.findall(r"^(safe_gpu_\w+)[{ ]", api.render_metrics(STATUS), re.MULTILINE))
    printed -= {"safe_gpu_up", "safe_gpu_claim_info", "safe_gpu_waiting_at_limit"}
    for text in (" ".join(queries()), DASHBOARD.read_text()):
        assert set(re.findall(r"\bsafe_gpu_\w+", text)) == printed
    assert all("safe_gpu_" in query for query in queries())


class Metrics(BaseHTTPRequestHandler):
    """What node_exporter serves of the file."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/plain")
        self.end_headers()
        self.wfile.write(api.render_metrics(STATUS).encode())


def answer(prometheus: str, query: str) -> list[Any]:
    """A query that is wrong fails with the server's 400."""
    url = f"{prometheus}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
    with urllib.request.urlopen(url, timeout=10) as reply:
        found = json.load(reply)
    assert found["status"] == "success"
    return list(found["data"]["result"])


@checkout
@long
def test_every_query_has_an_answer_in_a_real_prometheus(tmp_path: Path, eventually: Any) -> None:
    """It scrapes every metric."""
    path, address = program("prometheus"), f"127.0.0.1:{free_port()}"
    server = ThreadingHTTPServer(("127.0.0.1", 0), Metrics)
    job = {"job_name": "gpus", "static_configs": [{"targets": [f"127.0.0.1:{server.server_port}"]}]}
    times = {"scrape_interval": "1s", "scrape_timeout": "1s"}
    (tmp_path / "prometheus.yml").write_text(json.dumps({"global": times, "scrape_configs": [job]}))  # JSON is YAML
    command = [path, f"--config.file={tmp_path}/prometheus.yml", "--log.level=error"]
    command += [f"--storage.tsdb.path={tmp_path}/data", f"--web.listen-address={address}"]

    def scraped() -> bool:
        try:
            return bool(answer(f"http://{address}", "safe_gpu_oldest_wait_seconds"))
        except OSError:  # it does not serve yet
            return False

    threading.Thread(target=server.serve_forever, daemon=True).start()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        eventually(scraped)
        for query in queries():
            assert answer(f"http://{address}", query.replace("$host", ".*")), query
        claimed = answer(f"http://{address}", 'sum(safe_gpu_gpu_state{state="claimed"})')
        assert claimed[0]["value"][1] == "1"
    finally:
        process.kill()
        process.wait(60)
        server.shutdown()
        server.server_close()


def test_promtool_has_nothing_to_say(driver_libraries: object, state_dir: Path) -> None:
    words = [program("promtool"), "check", "metrics"]
    for status in (STATUS, api.gather()):
        done = subprocess.run(words, input=api.render_metrics(status), capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stdout + done.stderr) == (0, "")
