"""Sweeps: spaces that presets accept, and a real one that is killed and goes on."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import optuna
import pytest

from raycluster.tracking import RUN_FILE
from xmc import config, sweep
from xmc.corpus import sample_path
from xmc.errors import InputError
from xmc.evaluation.trials import Objective, Trial, load_trials

SMALL = [
    "encoder.name=random:bert",
    "encoder.layers_pooled=1",
    "encoder.max_tokens=16",
    "model.hidden_width=32",
    "train.batch_size=64",
    "train.epochs=2",
    "train.cpus_per_worker=0.2",
    "corpus.valid_fraction=0.2",
]
# APLC's partitions, but trial 2 cannot be trained.
SPACE = """
from tune_spaces import aplc_partitions


def space(trial, preset):
    rate = 1e30 if trial.number == 2 else 0.02
    return aplc_partitions.space(trial, preset) | {"train.label_rate": rate}
"""


@pytest.mark.parametrize("name", sweep.space_names())
def test_every_space_fits_the_presets_of_its_system(name: str):
    system = {"aplc_partitions": "aplc_xlnet", "aplc_rates": "aplc_xlnet"}.get(name, name)
    presets = [path.stem for path in config.PRESETS.glob(f"{system}*.yaml")]
    assert presets
    for preset in presets:
        chosen = config.load(preset)
        sweep.check_space(sweep.find_space(name), chosen)


def test_three_rates_are_ordered_and_partitions_are_the_papers():
    from tune_spaces import aplc_partitions, aplc_rates

    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    for _ in range(100):
        drawn = aplc_rates.space(study.ask(), None)
        assert drawn["train.encoder_rate"] < drawn["train.hidden_rate"] < drawn["train.label_rate"]
    assert aplc_partitions.fractions(3, "falling") == pytest.approx([0.7, 0.2, 0.1])
    assert aplc_partitions.fractions(3, "rising") == pytest.approx([0.1, 0.2, 0.7])
    assert aplc_partitions.fractions(3, "even") == pytest.approx([1 / 3] * 3)


def test_a_space_that_does_not_fit_is_refused_in_the_users_words(tmp_path: Path):
    chosen = config.load("light_xml")
    own = tmp_path / "own.py"

    def check(source: str, message: str) -> None:
        own.write_text(source)
        with pytest.raises(InputError, match=message):
            sweep.check_space(sweep.find_space(str(own)), chosen)

    check("def space(trial, preset): return {'train.encoder_rte': 1}", "did you mean train.encoder_rate")
    check("def space(trial, preset): return {'corpus.seed': 1}", "same for all trials")
    check("def space(trial, preset): return {'train.workers': 2}", "same for all trials")
    check("def space(trial): return {}", r"space\(trial, preset\)")
    check("def space(trial, preset): return trial.suggest_folat('x', 0, 1)", "fails with AttributeError")
    check("import nothing_like_it", "cannot be loaded")
    with pytest.raises(InputError, match="did you mean light_xml"):
        sweep.find_space("light_xlm")
    with pytest.raises(InputError, match="is it a space for linear"):
        sweep.check_space(sweep.find_space("light_xml"), config.load("linear"))


def test_what_cannot_be_compared_is_refused_before_anything_starts():
    chosen = config.load("light_xml")
    space = sweep.find_space("light_xml")
    with pytest.raises(InputError, match=r"metrics\.ks"):
        sweep.sweep(chosen, space, Objective("P@7"), 4)
    with pytest.raises(InputError, match="at least one"):
        sweep.sweep(chosen, space, Objective("P@1"), 0)
    with pytest.raises(InputError, match=r"members=\[\]"):
        sweep.sweep(config.load("light_xml", ["members=[{seed: 2}]"]), space, Objective("P@1"), 4)
    with pytest.raises(InputError, match="without steps"):
        sweep.sweep(config.load("linear"), sweep.find_space("linear"), Objective("P@1", "step_seconds"), 4)


@pytest.mark.parametrize(
    ("preset", "metric", "num_labels", "early"),
    [
        ("light_xml", "P@1", 1_000_000, True),
        ("light_xml", "nDCG@5", 1_000, True),
        ("light_xml", "PSP@1", 1_000, False),  # needs label frequencies that a rank does not have
        ("attention_xml", "P@1", 1_000, True),
        ("attention_xml", "P@1", 1_000_000, False),  # means a tree, whose first levels know no labels
        ("attention_xml.amazon_670k", "P@1", 1_000, False),
        ("x_transformer", "P@1", 1_000, False),
        ("linear", "P@1", 1_000, False),
    ],
)
def test_trials_are_stopped_early_only_by_what_can_be_compared(preset, metric, num_labels, early):
    assert sweep.is_measured_early(config.load(preset), metric, num_labels) is early


def test_losers_go_and_what_others_are_made_of_stays(tmp_path: Path):
    def trial(number: int, state: str, value: float, stages: list[str]) -> None:
        Trial(number, {}, {}, state, [{"P@1": value}]).save(tmp_path / "trials")  # type: ignore[arg-type]
        shown = tmp_path / "trials" / f"{number:03d}" / "stages"
        shown.mkdir()
        for name in stages:
            stage = tmp_path / "stages" / name
            stage.mkdir(parents=True, exist_ok=True)
            (stage / "stage.json").write_text(json.dumps({"inputs": {}}))
            os.symlink(stage, shown / name)

    trial(0, "done", 50, ["tokens-a", "clusters-a", "train-a", "ranker-a", "model-a"])
    trial(1, "done", 60, ["tokens-a", "clusters-b", "train-b", "model-b"])
    trial(2, "stopped", 90, ["tokens-a", "clusters-c", "train-c"])
    trial(3, "running", 10, ["tokens-a", "clusters-a", "train-a"])
    record = {"inputs": {"clusters": "clusters-a", "train": "train-a"}}
    (tmp_path / "stages" / "ranker-a" / "stage.json").write_text(json.dumps(record))
    noted = tmp_path / "stages" / "train-c" / "group.txt"
    noted.touch()  # its actor has not given back the training group yet
    found = sweep.remove_losers(tmp_path, Objective("P@1"))
    assert sorted(path.name for path in found) == ["model-a", "ranker-a", "train-c"]
    assert noted.exists()
    noted.unlink()
    assert [path.name for path in sweep.remove_losers(tmp_path, Objective("P@1"))] == ["train-c"]
    left = sorted(path.name for path in (tmp_path / "stages").iterdir())
    assert left == ["clusters-a", "clusters-b", "clusters-c", "model-b", "tokens-a", "train-a", "train-b"]


# ------------------------------------------------------------------------------------------------ a real sweep


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first documents of the sample."""
    directory = tmp_path_factory.mktemp("documents")
    for name, count in (("train", 400), ("test", 50)):
        with gzip.open(sample_path() / f"{name}.jsonl.gz", "rt") as source:
            (directory / f"{name}.jsonl").write_text("".join(next(source) for _ in range(count)))
    return directory


def command(directory: Path, documents: Path, trials: int, *more: str) -> list[str]:
    (directory / "own.py").write_text(SPACE)
    words = ["aplc_xlnet", "--space", str(directory / "own.py"), "--trials", str(trials), *SMALL, *more]
    return [
        *[sys.executable, "-m", "xmc.tune", *words],
        *[f"corpus.path={documents}", f"run.dir={directory / 'sweep'}"],
    ]


def wait_for(condition, process: subprocess.Popen, seconds: float = 900) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, "the command ended too soon"
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.slow
def test_a_killed_sweep_goes_on_and_ends_with_the_best(ray_session: None, documents: Path, tmp_path: Path):
    words, root = command(tmp_path, documents, 8), tmp_path / "sweep" / "trials"

    def halfway() -> bool:
        states = [trial.state for trial in load_trials(root)]
        return len(states) - states.count("running") >= 3 and "running" in states

    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        wait_for(halfway, process)
    finally:
        process.kill()
        process.wait()
    before = {trial.number: trial for trial in load_trials(root) if trial.state != "running"}
    again = subprocess.run(words, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    trials = load_trials(root)
    assert [trial.number for trial in trials] == list(range(8))
    assert {trial.state for trial in trials} <= {"done", "stopped", "failed"}
    for number, trial in before.items():
        assert trials[number] == trial
        assert f"trial {number:03d}  starts" not in again.stdout
    assert len({json.dumps(trial.settings) for trial in trials}) == 8

    # The trial that cannot be trained is named, and ended nothing.
    assert [trial.number for trial in trials if trial.state == "failed"] == [2]
    assert "loss became" in trials[2].error

    # The winner: highest on validation, its preset trains, its model is there; what the others trained is gone.
    done = [trial for trial in trials if trial.state == "done"]
    winner = max(done, key=lambda trial: (trial.reports[-1]["P@1"], -trial.number))
    best = config.load(str(tmp_path / "sweep" / "best.yaml"))
    assert best.model.partition.fractions == tuple(winner.settings["model.partition.fractions"])
    assert best.model.hidden_width == winner.settings["model.hidden_width"]
    assert again.stdout.rstrip().endswith(f"python -m xmc.train {tmp_path / 'sweep' / 'best.yaml'}")
    assert (root / winner.name / "model" / "config.yaml").exists()
    stages = [path.name.partition("-")[0] for path in (tmp_path / "sweep" / "stages").glob("[a-z]*")]
    assert sorted(name for name in stages if name != "partition") == [
        "corpus",
        "evaluate_valid",
        "label_layer",
        "model",
        "tokens",
        "train",
    ]  # so test was never read
    made = {path.name for path in (tmp_path / "sweep").iterdir()}
    assert {"parallel.png", "clusters.png", "partitions.png", "trials.csv", "table.txt"} <= made

    # Stages are shared: one trial made the tokens, the others found them.
    logs = [(root / trial.name / "log.txt").read_text() for trial in trials]
    assert sum("tokens: starts" in log for log in logs) == 1

    check_mlflow(tmp_path / "sweep", trials)


def check_mlflow(directory: Path, trials: list[Trial]) -> None:
    import mlflow

    about = json.loads((directory / RUN_FILE).read_text())
    client = mlflow.MlflowClient(about["uri"])
    parent = client.get_run(about["run_id"])
    assert parent.info.status == "FINISHED"
    children = client.search_runs(
        [parent.info.experiment_id], f"tags.mlflow.parentRunId = '{about['run_id']}'"
    )
    assert len(children) == len(trials)
    statuses = {"done": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
    by_name = {child.info.run_name: child for child in children}
    for trial in trials:
        child = by_name[f"sweep-{trial.name}"]
        assert child.info.status == statuses[trial.state]
        assert int(child.data.params["model.hidden_width"]) == trial.settings["model.hidden_width"]


@pytest.mark.slow
def test_more_trials_add_to_a_sweep_and_another_sweep_does_not(
    ray_session: None, documents: Path, tmp_path: Path
):
    words = ["linear", "--space", "linear", "--minimise", "model_bytes", f"corpus.path={documents}"]
    words = [sys.executable, "-m", "xmc.tune", *words, f"run.dir={tmp_path / 'sweep'}"]
    subprocess.run([*words, "--trials", "2"], check=True, stdout=subprocess.DEVNULL)
    more = subprocess.run([*words, "--trials", "3"], check=True, capture_output=True, text=True)
    trials = load_trials(tmp_path / "sweep" / "trials")
    assert [trial.state for trial in trials] == ["done"] * 3  # two objectives: none is stopped
    assert "trial 002  starts" in more.stdout
    assert "trial 001  starts" not in more.stdout
    assert "on the Pareto front" in more.stdout
    assert (tmp_path / "sweep" / "front.png").exists()
    other = subprocess.run([*words, "--trials", "3", "seed=2"], capture_output=True, text=True)
    assert other.returncode == 2
    assert "holds a sweep with other settings" in other.stderr


@pytest.mark.slow
def test_a_corpus_without_validation_is_refused(ray_session: None, documents: Path, tmp_path: Path):
    chosen = config.load(
        "linear", [f"corpus.path={documents}", "corpus.valid_fraction=0", f"run.dir={tmp_path / 'sweep'}"]
    )
    with pytest.raises(InputError, match=r"corpus\.valid_fraction=0\.1"):
        sweep.sweep(chosen, sweep.find_space("linear"), Objective("P@1"), 2)
