from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_readmes_tables_are_those_of_the_results():
    subprocess.run([sys.executable, "-m", "benchmarks.readme", "--check"], cwd=ROOT, check=True)
