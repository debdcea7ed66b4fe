"""What docs/server.md and README.md tell to type works as it is written."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOC = (ROOT / "docs" / "server.md").read_text()
BLOCKS = re.findall(r"```bash\n(.*?)```", DOC, re.DOTALL)


@pytest.mark.skipif(not shutil.which("curl") or not shutil.which("bash"), reason="no curl, no bash")
@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block[:60])
def test_examples_of_curl(served, block):
    """At the port of this server, and with sizes that the tiny model has room for."""
    assert "http://127.0.0.1:8000" in block
    script = block.replace("http://127.0.0.1:8000", served.url).replace("curl", "curl -sS --fail")
    run = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script], capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""
    for line in run.stdout.splitlines():
        if line.startswith("data: {"):
            assert json.loads(line[6:])["choices"]


def test_the_table_of_endpoints_is_whole(http):
    paths = http.get("/openapi.json").json()["paths"]
    table = DOC.partition("## Endpoints")[2].partition("## Fields")[0]
    told = set(re.findall(r"`(?:GET|POST) (/[^` ]*)`", table))
    assert told == {path.replace("{name}", "NAME") for path in paths}


def test_every_field_is_told_of(http):
    schemas = http.get("/openapi.json").json()["components"]["schemas"]
    fields = DOC.partition("## Fields")[2].partition("### Tools")[0]
    for name in ("CompletionRequest", "ChatRequest"):
        for field in schemas[name]["properties"]:
            assert re.search(rf"`{field}[`.]", fields), field
