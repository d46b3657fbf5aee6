"""Trains a preset on real data with the command a user would type, and keeps its metrics, time and memory.

    python -m benchmarks.quality PRESET [key=value …]

Nothing is selected on test: the preset's settings are fixed before, and test is measured once, at the end.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

import psutil

from benchmarks.record import ROOT, record
from xmc import config
from xmc.settings import flatten, to_mapping


def watch_memory(process: subprocess.Popen, peaks: dict[str, float], stop: threading.Event) -> None:
    """The largest resident memory, in GB, of a training rank, another task and the driver, looked at once a second."""
    while not stop.wait(1.0):
        try:
            family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        except psutil.NoSuchProcess:
            return
        for member in family:
            try:
                title, size = " ".join(member.cmdline()), member.memory_info().rss / 1e9
            except psutil.Error:
                continue
            kind = "rank" if "RayTrainWorker" in title else "task" if title.startswith("ray::") else "driver"
            if kind != "driver" or member.pid == process.pid:
                peaks[kind] = max(peaks.get(kind, 0.0), size)


def measured(directory: Path) -> dict[str, float]:
    """The metrics of a finished run, without those of frequency bands."""
    (found,) = directory.glob("stages/evaluate-*/metrics.json")
    values = json.loads(found.read_text())["values"]
    return {key: round(value, 2) for key, value in values.items() if value is not None and "." not in key}


def stage_seconds(directory: Path) -> dict[str, float]:
    """What each kind of stage of a run took; variants have several of a kind."""
    seconds: dict[str, float] = {}
    for path in directory.glob("stages/*/stage.json"):
        name = path.parent.name.rsplit("-", 1)[0]
        seconds[name] = round(seconds.get(name, 0.0) + json.loads(path.read_text())["seconds"], 1)
    return seconds


def seconds_behind(home: Path) -> float:
    """What all stages took that a run's model was made by (an ensemble's members' too), and its measurement."""
    (evaluated,) = home.glob("stages/evaluate-*")
    model = (home / "model").resolve()
    seconds: dict[Path, float] = {}
    todo = [evaluated.resolve(), model]
    while todo:
        directory = todo.pop()
        stage = json.loads((directory / "stage.json").read_text())
        seconds[directory] = stage["seconds"]
        members = (f"model-{key[:10]}" for key in stage["settings"].get("models", ()))
        behind = {model.parent / name for name in (*stage["inputs"].values(), *members)}
        todo += behind - seconds.keys()
    return round(sum(seconds.values()), 1)


def main() -> None:
    preset, *overrides = sys.argv[1:]
    directory = ROOT / "runs" / "quality" / preset
    settings = config.load(preset, [*overrides, f"run.dir={directory}"])
    command = [sys.executable, "-m", "xmc.train", preset, *overrides, f"run.dir={directory}"]
    seen = directory / "peaks.json"  # of a command that this one goes on from
    peaks: dict[str, float] = json.loads(seen.read_text()) if seen.exists() else {}
    stop = threading.Event()
    process = subprocess.Popen(command, cwd=ROOT)
    watcher = threading.Thread(target=watch_memory, args=(process, peaks, stop))
    watcher.start()
    code = process.wait()
    stop.set()
    watcher.join()
    seen.write_text(json.dumps(peaks))
    if code:
        raise SystemExit(code)
    stages = stage_seconds(directory)
    logs = directory.glob("stages/*/metrics.jsonl")
    steps = [json.loads(line) for log in logs for line in log.read_text().splitlines()]
    waiting = [step["waiting_share"] for step in steps if "waiting_share" in step]
    homes = {own["name"]: directory / "variants" / own["name"] for own in settings.variants}
    kept = {
        key: value
        for key, value in flatten(to_mapping(settings)).items()
        if not key.startswith(("run.", "tracking."))
    }
    kept["corpus.path"] = Path(settings.corpus.path).name
    record(
        f"quality_{preset.replace('.', '_')}",
        {"preset": preset, "overrides": [o for o in overrides if not o.startswith("corpus.path")], **kept},
        {
            **(
                {
                    "variants": {name: measured(home) for name, home in homes.items()},
                    "variant_seconds": {name: seconds_behind(home) for name, home in homes.items()},
                }
                if homes
                else {"metrics": measured(directory)}
            ),
            # Of all stages: the command may have gone on from what an earlier one left.
            "seconds": round(sum(stages.values()), 1),
            "stage_seconds": stages,
            "share_of_step_waiting_for_data": round(sum(waiting) / max(len(waiting), 1), 5),
            "peak_gb": {k: round(v, 2) for k, v in peaks.items()},
        },
    )


if __name__ == "__main__":
    main()
