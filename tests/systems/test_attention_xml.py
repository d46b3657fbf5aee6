"""AttentionXML from the settings of a command to labelled and explained texts: the bundled sample, tiny networks."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pytest
import scipy.sparse as sp
from safetensors.numpy import load_file

import xmc
from raycluster.follow import Tail, append_line
from raycluster.rank import AdaptiveClip
from xmc import config, run
from xmc.corpus.words import Vocabulary
from xmc.errors import InputError
from xmc.labels.clustering import ClusterConfig, LabelClusters, cluster_labels, count_clusters
from xmc.labels.tree import LabelTree, TreeConfig, build_tree, kept_levels
from xmc.progress import Progress
from xmc.systems import attention_xml
from xmc.systems.levels import draw_siblings

SMALL = [
    "words.vectors.width=24",
    "words.max_words=40",
    "encoder.width=16",
    "encoder.dropout=0.1",
    "model.hidden_widths=[16]",
    "train.epochs=2",
    "train.average_from=2",
    "train.batch_size=32",
    "train.encoder_rate=0.01",
    "train.label_rate=0.01",
]
TREE = [
    "model.mode=tree",
    "clusters.max_leaf_size=8",
    "tree.branching=4",
    "tree.height=2",
    "model.candidates=6",
    "train.checkpoint_steps=10",
]


def settings(directory: Path, *more: str):
    return config.load("attention_xml", [*SMALL, f"run.dir={directory}", *more])


def values(directory: Path) -> dict[str, float]:
    (metrics,) = directory.glob("stages/evaluate-*/metrics.json")
    return json.loads(metrics.read_text())["values"]


def steps_of(directory: Path, stage: str) -> list[dict[str, float]]:
    (file,) = directory.glob(f"stages/{stage}-*/metrics.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.fixture(scope="module")
def tree(ray_session: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run.train(settings(tmp_path_factory.mktemp("runs") / "tree", *TREE))


@pytest.mark.slow
def test_flat_models_chosen_by_validation_and_their_average(ray_session: None, tmp_path: Path, capsys):
    """One and two models measured by one command, as the paper's Table 5 does with trees; the first is trained once."""
    variants = "variants=[{name: one}, {name: two, members: [{seed: 1}, {seed: 2}]}]"
    # Two ranks and a member's driver must leave a whole CPU: Ray Data divides the documents by tasks that ask for one.
    more = ["train.workers=2", "train.validate_steps=20", variants]
    directory = run.train(settings(tmp_path / "flat", *more))
    said = capsys.readouterr().out
    assert "member 0: train: up to date" in said
    one, two = (directory / "variants" / name for name in ("one", "two"))
    for home in (one, two):
        assert values(home)["P@5"] > 5
        assert [len(row) for row in xmc.load(home).predict(["a strategy game", ""], k=3)] == [3, 3]
        assert f"{values(home)['P@5']:.2f}" in said.split("variant two")[1]
    rows = steps_of(one, "train")
    measured = {row["step"]: row["valid_nDCG_at_5"] for row in rows if "valid_P_at_1" in row}
    steps = [row["step"] for row in rows]
    assert steps == list(range(1, len(steps) + 1))
    an_epoch = len(steps) // 2
    assert set(measured) == {*range(20, len(steps), 20), an_epoch, 2 * an_epoch}
    assert all(0 <= value <= 100 for value in measured.values())


@pytest.mark.slow
def test_a_tree_is_trained_level_by_level(tree: Path):
    assert values(tree)["P@5"] > 3
    levels = sorted(path.name for path in (tree / "model" / "levels").iterdir())
    grown = LabelTree.load(tree / "model" / "tree.npz")
    assert levels == [str(level) for level in range(1, grown.num_levels)]
    assert grown.num_levels == 4
    for level in levels:
        assert any("valid_nDCG_at_5" in row for row in steps_of(tree, f"level-{level}"))
    steps = [step for of_level in logged_steps(tree, levels) for step in of_level]
    assert steps == list(range(1, len(steps) + 1)), "each level's follow those of the level above"


def logged_steps(directory: Path, levels: list[str]) -> list[list[int]]:
    """The steps that MLflow has of each of a tree's levels."""
    import mlflow

    about = json.loads((directory / "mlflow.json").read_text())
    client = mlflow.MlflowClient(about["uri"])
    history = [client.get_metric_history(about["run_id"], f"level_{level}_loss") for level in levels]
    return [[metric.step for metric in part] for part in history]


@pytest.mark.slow
def test_probabilities_of_the_model_are_products_of_its_levels(tree: Path):
    """A beam as wide as the levels is exact: any narrower one finds a part of the same labels with the same scores."""
    texts = ["a strategy game for the desktop", "python bindings for a library", "documentation"]
    model = xmc.load(tree)
    narrow = model.predictor.top_k(texts, 10)
    assert model.predictor._width < 1000
    model.predictor._width = 1000
    wide = model.predictor.top_k(texts, 385)
    scores = np.full((len(texts), 385), -1.0)
    np.put_along_axis(scores, wide.label_ids, wide.scores, 1)
    kept = narrow.label_ids >= 0
    found = np.take_along_axis(scores, np.maximum(narrow.label_ids, 0), 1)
    np.testing.assert_allclose(narrow.scores[kept], found[kept], rtol=1e-4)
    assert (wide.scores[:, 0] >= narrow.scores[:, 0] - 1e-6).all()


@pytest.mark.slow
def test_explanations_name_the_words_of_the_text(tree: Path, tmp_path: Path):
    text = "Strategy game strategy zzyzx"
    model = xmc.load(tree)
    labels, of_nothing = model.explain([text, ""], k=3)
    assert [why["label"] for why in labels] == [label for label, _ in model.predict([text], k=3)[0]]
    assert [why["words"] for why in of_nothing] == [[], [], []]
    for why in labels:
        assert {word["word"] for word in why["words"]} == {"strategy", "game", "zzyzx"}
        assert sum(word["weight"] for word in why["words"]) == pytest.approx(1.0, abs=1e-3)
    file, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    file.write_text(
        "".join(json.dumps({"id": str(i), "text": t}) + "\n" for i, t in enumerate([text, "game"]))
    )
    command = [
        sys.executable,
        "-m",
        "xmc.predict",
        str(tree),
        str(file),
        "-o",
        str(out),
        "-k",
        "2",
        "--explain",
    ]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["id"] for row in rows] == ["0", "1"]
    assert [len(row["explanations"]) for row in rows] == [2, 2]
    assert rows[1]["explanations"][0]["words"] == [{"word": "game", "weight": 1.0}]
    done = subprocess.run([*command, "-o", str(tmp_path / "out.csv")], capture_output=True, text=True)
    assert done.returncode == 2
    assert "JSON lines" in done.stderr


def assert_same_networks(a: Path, b: Path) -> None:
    """All that was trained and lies below the one directory is the same below the other."""
    names = sorted(path.relative_to(a) for path in a.rglob("*.safetensors"))
    assert names == sorted(path.relative_to(b) for path in b.rglob("*.safetensors"))
    assert names
    for name in names:
        ours, theirs = load_file(a / name), load_file(b / name)
        assert ours.keys() == theirs.keys()
        for key, value in ours.items():
            np.testing.assert_allclose(
                value.astype(float), theirs[key].astype(float), atol=1e-5, err_msg=f"{name} {key}"
            )


def copy_until_level_2(tree: Path, directory: Path) -> Path:
    """Make a run of what a trained tree had done before its level 2; return where that will be."""
    for name in ("corpus", "tokens", "words", "tfidf", "level-1", "candidates-1"):
        (stage,) = (tree / "stages").glob(f"{name}-" + "?" * 10)
        shutil.copytree(stage, directory / "stages" / stage.name, symlinks=True)
    (level_2,) = (tree / "stages").glob("level-2-*")
    return directory / "stages" / level_2.name


@pytest.mark.slow
def test_a_killed_tree_resumes_its_level_and_ends_as_if_undisturbed(tree: Path, tmp_path: Path):
    """What is done of the undisturbed run is taken over up to level 2, which is killed and goes on."""
    level_2 = copy_until_level_2(tree, tmp_path / "run")
    command = [
        sys.executable,
        "-m",
        "xmc.train",
        "attention_xml",
        *SMALL,
        *TREE,
        f"run.dir={tmp_path / 'run'}",
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for_step(level_2, 25, process)
    finally:
        for member in [*psutil.Process(process.pid).children(recursive=True), process]:
            member.kill()
        process.wait()
    again = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "level-1: up to date" in again.stdout
    assert "level-2: goes on where it stopped" in again.stdout
    assert_same_networks(tree / "model" / "levels", tmp_path / "run" / "model" / "levels")


def wait_for_step(
    stage: Path, step: int, process: subprocess.Popen | None = None, seconds: float = 900
) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        lines = Tail(stage / "metrics.jsonl").lines()
        if lines and json.loads(lines[-1])["step"] >= step:
            return
        assert process is None or process.poll() is None, "the command ended too soon"
        time.sleep(0.02)
    raise AssertionError(f"step {step} of {stage.name} was not reached")


def holder(lock: Path) -> psutil.Process | None:
    """The job's process that holds the lock of a stage."""
    for process in psutil.process_iter():
        try:
            if "_Worker" in " ".join(process.cmdline()) and str(lock) in {
                f.path for f in process.open_files()
            }:
                return process
        except psutil.Error:  # another user's, or it has ended
            continue
    return None


@pytest.mark.slow
def test_a_tree_whose_driver_is_killed_resumes_its_own_level_only(tree: Path, tmp_path: Path, capfd):
    """Two trees at once. The first has done level 1, as the undisturbed tree, and is killed at level 2."""
    level_2 = copy_until_level_2(tree, tmp_path / "run")
    killed: list[int] = []

    def kill() -> None:
        wait_for_step(level_2, 25)
        victim = holder(level_2.with_name(f".{level_2.name}.lock"))
        assert victim is not None
        victim.kill()
        killed.append(victim.pid)

    thread = threading.Thread(target=kill)
    thread.start()
    small = "{seed: 2, tree: {height: 1}, train: {epochs: 1, average_from: 0}}"
    members = settings(tmp_path / "run", *TREE, f"members=[{{seed: 1}}, {small}]")
    run.train(members)
    thread.join()
    assert killed
    said = capfd.readouterr().out
    assert "2 members, 2 at a time" in said
    assert "member 0 failed" in said
    assert "member 0: level-2: goes on where it stopped" in said
    assert "member 0: level-1: starts" not in said
    assert "member 1 failed" not in said
    for stage in ("level-1", "candidates-1", "level-2"):
        assert said.count(f"member 1: {stage}: ") == 2, "it starts and it is done"
    # Undisturbed, as a member too: a tree that is alone has more threads, which sum in another order.
    resumed = level_2.rename(tmp_path / "resumed")
    run.train(members)
    assert_same_networks(level_2 / "network", resumed / "network")


def test_a_network_is_trained_once_though_its_stage_is_tried_again(tmp_path: Path, monkeypatch):
    """Level 1 ends before the clustering beside it does, which may fail."""
    attempts: list[Path] = []

    def train(config, build, settings, out: Path, *more: object, validate: bool) -> None:
        attempts.append(out)
        if len(attempts) == 1:
            raise RuntimeError("a machine is gone")

    monkeypatch.setattr(attention_xml, "train_network", train)
    once = partial(attention_xml._train_once, settings(tmp_path), None, tmp_path, {}, lambda rows: None)
    with pytest.raises(RuntimeError, match="gone"):
        once()
    once()
    once()
    assert len(attempts) == 2


def test_steps_of_levels_at_once_are_one_sequence(tmp_path: Path, capsys):
    homes = {level: tmp_path / f"level-{level}" for level in (1, 2)}
    logged: list[dict[str, float]] = []

    def trains(level: int, *steps: int) -> None:
        for step in steps:
            row = {"step": step, "time": 10.0 * step + level, "loss": level + step / 100, "rate": 1.0}
            append_line(homes[level] / "metrics.jsonl", json.dumps(row))

    trains(1, 1, 2)  # before the driver was killed
    append_line(homes[2] / "messages.txt", "old")
    with Progress("training", 8, "steps") as progress:
        together = attention_xml.Together(homes, logged.extend, progress)
        append_line(homes[2] / "messages.txt", "new")
        trains(2, 1, 2)
        trains(1, 3)
        together.show()
        (homes[1] / "metrics.jsonl").unlink()
        trains(1, 1, 2, 3, 4)  # goes on from its checkpoint
        together.show()
    assert [row["step"] for row in logged] == [1, 2, 3, 4, 5, 6]
    assert [row["loss"] for row in logged] == [1.01, 1.02, 2.01, 2.02, 1.03, 1.04]
    assert logged[2] == {"step": 3, "time": 12.0, "loss": 2.01, "level_2_loss": 2.01, "level_2_rate": 1.0}
    said = capsys.readouterr()
    assert said.out == "level 2: new\n"
    assert "6/8 steps" in said.err
    assert "level 1 at 4, level 2 at 2" in said.err


@pytest.mark.slow
def test_levels_at_once(ray_session: None, tmp_path: Path, capfd):
    words = [*TREE, "tree.height=1", "model.levels_at_once=true", "train.epochs=1", "train.average_from=0"]
    directory = run.train(settings(tmp_path / "run", *words))
    assert values(directory)["P@5"] > 2
    assert len(list((directory / "model" / "levels").iterdir())) == 2
    said = capfd.readouterr()
    assert "2 levels, 2 at a time" in said.out
    assert "level 1 at" in said.err
    one, two = logged_steps(directory, ["1", "2"])
    assert len(one) == len(two) > 1
    assert sorted(one + two) == list(range(1, 2 * len(one) + 1))


@pytest.mark.slow
def test_max_pooling_and_a_file_of_frozen_vectors(ray_session: None, tmp_path: Path):
    """Table 4's network without attention; and vectors that training leaves as they are."""
    vectors = tmp_path / "vectors.txt"
    drawn = np.random.default_rng(0).normal(size=(3, 24))
    lines = [f"{w} {' '.join(map(str, v))}\n" for w, v in zip(["game", "library", "the"], drawn, strict=True)]
    vectors.write_text("".join(lines))
    more = [
        "model.mode=flat",
        "model.attention=false",
        "words.vectors.trained=false",
        "train.epochs=1",
        "train.average_from=0",
    ]
    directory = run.train(settings(tmp_path / "run", *more, f"words.vectors.file={vectors}"))
    assert values(directory)["P@5"] > 3
    vocabulary = Vocabulary.load(directory / "model" / "vocabulary.parquet")
    (rows,) = (directory / "model" / "levels" / "1" / "rows").glob("words.*.safetensors")
    table = load_file(rows)["weight"]
    np.testing.assert_allclose(table[2 + vocabulary.words.index("library")], drawn[1], rtol=1e-5)
    with pytest.raises(InputError, match="attends to no words"):
        xmc.load(directory).explain(["a game"])


def test_siblings_of_the_true_parents_come_first():
    order, offsets = np.arange(64, dtype=np.int32), np.arange(0, 65, 2)
    grown = build_tree(LabelClusters.of(order, offsets), TreeConfig(branching=4))  # 1, 2, 8, 32, 64 nodes
    assert grown.level_sizes == (1, 2, 8, 32, 64)
    nodes, documents = np.array([5, 6, 17]), np.array([0, 0, 2])
    drawn = draw_siblings(grown, 3, nodes, documents, 3, 4, np.random.default_rng(0))
    assert sorted(drawn[0]) == [4, 5, 6, 7]
    assert sorted(drawn[2]) == [16, 17, 18, 19]
    assert ((drawn >= 0) & (drawn < 32)).all()
    wider = draw_siblings(grown, 3, nodes, documents, 3, 6, np.random.default_rng(0))
    assert sorted(wider[0][:4]) == [4, 5, 6, 7]
    again = draw_siblings(grown, 3, nodes, documents, 3, 6, np.random.default_rng(0))
    assert np.array_equal(wider, again)


def test_clipping_follows_the_norms():
    clip = AdaptiveClip(5.0)
    assert clip.limit == math.inf
    for norm in (0.1, 0.2, 0.3, 0.1):
        clip.saw(norm)
        assert clip.limit == math.inf, "the first steps are not clipped"
    clip.saw(0.2)
    assert clip.limit == pytest.approx(1.5)
    clip.saw(100.0)
    assert clip.limit == pytest.approx(3.0), "counts for twice the largest at most"
    clip.saw(100.0)
    clip.saw(100.0)
    assert clip.limit == pytest.approx(5.0), "and for 1 at most"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["engine.zero_stage=2", "train.workers=2"], "zero_stage=2"),
        (["model.attention=false", "model.mode=tree"], "flat"),
        (["model.candidates=0"], "candidates"),
        (["clusters.seed=3"], "follows from seed"),
        (["encoder.dropout=1"], "dropout"),
        (["words.vectors.width=0"], "width"),
    ],
)
def test_impossible_settings(words: list[str], message: str):
    with pytest.raises(InputError, match=message):
        config.load("attention_xml", words)


@pytest.mark.parametrize("preset", sorted(p.stem for p in config.PRESETS.glob("attention_xml*.yaml")))
def test_presets_are_valid_and_open_with_their_command(preset: str):
    assert config.load(preset).system == "attention_xml"
    first = (config.PRESETS / f"{preset}.yaml").read_text().splitlines()[0]
    assert first.startswith(f"# python -m xmc.train {preset}")


@pytest.mark.parametrize(
    ("num_labels", "branching", "height"), [(203, 4, 2), (203, 8, None), (64, 2, 3), (5, 8, 1)]
)
def test_level_1_is_known_before_the_tree_is(num_labels: int, branching: int, height: int | None):
    """What the first splits say of level 1 holds in the finished tree: that is what level 1 trains on meanwhile."""
    features = sp.random(num_labels, 40, 0.2, "csr", np.float32, np.random.default_rng(0))
    shape, clusters = TreeConfig(branching, height), ClusterConfig(max_leaf_size=8)
    heard: dict[int, np.ndarray] = {}
    grown = build_tree(cluster_labels(features, clusters, heard.__setitem__), shape)
    kept = kept_levels(count_clusters(num_labels, clusters), shape)
    assert len(kept) == grown.num_levels - 2
    for level, binary in enumerate(kept, start=1):
        np.testing.assert_array_equal(heard[binary], grown.ancestors(level))
