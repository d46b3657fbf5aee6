from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from raycluster import stages
from raycluster.stages import Stage
from xmc.errors import InputError


class Recipe:
    """Three stages a → b → c that count how often each ran."""

    def __init__(self) -> None:
        self.runs: list[str] = []
        self.fail_in: str | None = None

    def stage(self, name: str, inputs: tuple[str, ...], settings: dict, resumes: bool = False) -> Stage:
        def run(out: Path, given: Mapping[str, Path]) -> None:
            self.runs.append(name)
            (out / "value").write_text(
                "".join((path / "value").read_text() for path in given.values()) + name
            )
            if self.fail_in == name:
                raise RuntimeError(name)
            if (out / "half").exists():
                (out / "value").write_text("resumed")

        return Stage(name, settings, run, inputs, resumes)

    def all(self, a: int = 1, b: int = 1, c: int = 1) -> list[Stage]:
        return [
            self.stage("a", (), {"x": a}),
            self.stage("b", ("a",), {"x": b}),
            self.stage("c", ("a", "b"), {"x": c}, resumes=True),
        ]


def execute(todo: list[Stage], root: Path) -> dict[str, Path]:
    runner = stages.Runner(root)
    for stage in todo:
        runner.run(stage)
    return runner.done


def test_done_stages_are_skipped_and_a_change_redoes_what_depends_on_it(tmp_path: Path):
    recipe = Recipe()
    out = execute(recipe.all(), tmp_path)
    assert (out["c"] / "value").read_text() == "aabc"
    execute(recipe.all(), tmp_path)
    assert recipe.runs == ["a", "b", "c"]
    out = execute(recipe.all(b=2), tmp_path)
    assert recipe.runs == ["a", "b", "c", "b", "c"]
    stages.prune(tmp_path, out)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(p.name for p in out.values())


def test_a_stage_that_two_want_at_once_is_done_once(tmp_path: Path):
    begun, runs = threading.Barrier(2), []

    def run(out: Path, given: Mapping[str, Path]) -> None:
        runs.append(out)
        time.sleep(0.2)

    def want() -> None:
        begun.wait()
        stages.Runner(tmp_path).run(Stage("a", {}, run))

    members = [threading.Thread(target=want) for _ in range(2)]
    for member in members:
        member.start()
    for member in members:
        member.join()
    assert len(runs) == 1


def test_an_interrupted_stage_leaves_nothing_unless_it_resumes(tmp_path: Path):
    recipe = Recipe()
    recipe.fail_in = "b"
    with pytest.raises(RuntimeError):
        execute(recipe.all(), tmp_path)
    assert [p for p in tmp_path.iterdir() if stages.is_done(p)] == list(tmp_path.glob("a-*"))
    assert not list(tmp_path.glob("b-*"))
    recipe.fail_in = "c"
    with pytest.raises(RuntimeError):
        execute(recipe.all(), tmp_path)
    (half,) = tmp_path.glob("c-*")
    assert not stages.is_done(half)
    (half / "half").touch()
    recipe.fail_in = None
    out = execute(recipe.all(), tmp_path)
    assert recipe.runs == ["a", "b", "b", "c", "c"]
    assert (out["c"] / "value").read_text() == "resumed"


def test_a_second_process_is_refused(tmp_path: Path):
    with stages.locked(tmp_path), pytest.raises(InputError, match="another process"), stages.locked(tmp_path):
        pass
