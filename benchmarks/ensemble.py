"""Trains several systems on real data and puts them together, with the commands a user would type.

    python -m benchmarks.ensemble NAME HOW CORPUS 'PRESET [key=value …]' 'PRESET …' …

Each quoted part is what xmc.train gets beside corpus.path=CORPUS; all must hold out the same documents. `weighted`, the
usual HOW, fits the members' weights on these; test is measured once, at the end. Members that are trained stay trained.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

from benchmarks.quality import measured
from benchmarks.record import ROOT, record
from xmc import config


def train(number: int, words: list[str], corpus: str, home: Path) -> Path:
    """A member's run; the command skips what is done."""
    directory = home / f"{number}-{words[0]}"
    command = [sys.executable, "-m", "xmc.train", *words, f"corpus.path={corpus}", f"run.dir={directory}"]
    subprocess.run(command, cwd=ROOT, check=True)
    return directory


def main() -> None:
    name, how, corpus, *members = sys.argv[1:]
    home = ROOT / "runs" / "ensembles" / name
    given = [shlex.split(member) for member in members]
    runs = [train(number, words, corpus, home) for number, words in enumerate(given, start=1)]
    together = home / "together"
    command = [sys.executable, "-m", "xmc.ensemble", *map(str, runs), "-o", str(together), "--how", how]
    subprocess.run(command, cwd=ROOT, check=True)
    first = config.load(given[0][0], given[0][1:])
    record(
        f"ensemble_{name}",
        {"name": name, "how": how, "members": members, "corpus.name": first.corpus.name},
        {
            "members": {member: measured(run) for member, run in zip(members, runs, strict=True)},
            "metrics": measured(together),
        },
    )


if __name__ == "__main__":
    main()
