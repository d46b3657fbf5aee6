"""Keeps a benchmark's figures with their settings, date and machine, and runs peers in their own environment.

`make peers` prepares that environment: libpecos wants an older numpy than this project.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
SHARED_DATA = ROOT.parent / "shared" / "data"
PEERS_PYTHON = ROOT / ".venv-peers" / "bin" / "python"


def machine() -> dict[str, Any]:
    """What the figures were measured on: processor, cores, memory, Python."""
    described = Path("/proc/cpuinfo").read_text()
    model = re.search(r"model name\s*: (.+)", described)
    flags = set(re.findall(r"\w+", described))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": model[1] if model else platform.processor(),
        # What training computes with: auto means bfloat16 where there is avx512_bf16.
        "vectors": next((kind for kind in ("avx512_bf16", "avx512f", "avx2") if kind in flags), "none"),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(memory / 1e9, 1),
        "python": platform.python_version(),
    }


def record(name: str, settings: dict[str, Any], results: dict[str, Any]) -> None:
    """Write `benchmarks/results/<name>.json` and print it."""
    entry = {
        "name": name,
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "settings": settings,
        "results": results,
    }
    text = json.dumps(entry, indent=2) + "\n"
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(text)
    print(text, end="")


def peak_rss_gb() -> float:
    """The largest resident memory this process has had, in GB. (In getrusage's figure a parent's memory lives on.)"""
    (line,) = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(line) * 1024 / 1e9


def run_peer(script: str, *args: str) -> dict[str, Any]:
    """Run `benchmarks/peers/<script>` in the peers' environment; return the JSON object it prints last."""
    if not PEERS_PYTHON.exists():
        raise SystemExit("the peers' environment is missing: run `make peers` first")
    done = subprocess.run(
        [str(PEERS_PYTHON), str(ROOT / "benchmarks" / "peers" / script), *args],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return json.loads(done.stdout.strip().splitlines()[-1])
