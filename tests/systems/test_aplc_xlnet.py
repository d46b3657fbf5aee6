"""APLC-XLNet from settings to labelled texts on the bundled sample, with a small random XLNet; killed and resumed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import scipy.sparse as sp
import torch
from safetensors.numpy import save_file

import xmc
from tests.systems.test_faults import network, same, wait_for_step
from xmc import config, run
from xmc.errors import InputError
from xmc.nn.heads.light_xml import LabelClusters
from xmc.nn.sharding import Ragged
from xmc.systems import aplc_xlnet
from xmc.systems.aplc_xlnet import _shrunk

SMALL = [
    "encoder.name=random:xlnet",
    "encoder.summary=token",
    "encoder.max_tokens=32",
    "model.hidden_width=32",
    "model.partition.fractions=[0.3, 0.3, 0.4]",
    "train.batch_size=32",
    "train.epochs=1",
    "train.workers=2",
    "train.checkpoint_steps=7",
    "train.label_rate=0.02",
]


def settings(directory: Path, *more: str) -> list[str]:
    return ["aplc_xlnet", *SMALL, f"run.dir={directory}", *more]


@pytest.fixture(scope="module")
def trained(ray_session: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    preset, *overrides = settings(tmp_path_factory.mktemp("runs") / "aplc")
    return run.train(config.load(preset, overrides))


@pytest.mark.slow
def test_a_run_leaves_a_model_and_what_its_layer_costs(trained: Path) -> None:
    (file,) = trained.glob("stages/evaluate-*/metrics.json")
    # So few steps teach a random encoder the frequencies (31 %); rows that never moved stay far below.
    assert json.loads(file.read_text())["values"]["P@1"] > 25
    found = xmc.load(trained).predict(["a strategy game", "x", "", "C library " * 10_000], k=4)
    assert [len(row) for row in found] == [4, 4, 4, 4]
    assert all(0 <= score <= 1 for row in found for _, score in row)
    assert all(row == sorted(row, key=lambda pair: -pair[1]) for row in found)
    (plan,) = trained.glob("stages/partition-*/plan.txt")
    assert "tail 2" in plan.read_text()
    (times,) = trained.glob("stages/label_layer-*/label_layer.json")
    layer = json.loads(times.read_text())
    assert layer["labels_timed"] == layer["labels"]
    assert layer["equation_14_ratio"] > 1


@pytest.mark.slow
def test_all_labels_together_are_in_the_order_of_fewer(trained: Path) -> None:
    model = xmc.load(trained)
    texts = ["a strategy game", "python bindings for a library", "documentation"]
    every = model.top_k(texts, len(model.label_names))
    assert (np.sort(every.label_ids, axis=1) == np.arange(len(model.label_names))).all()
    few = model.top_k(texts, 3)
    np.testing.assert_array_equal(few.label_ids, every.label_ids[:, :3])


@pytest.mark.slow
def test_a_killed_driver_resumes_to_the_same_network(trained: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "xmc.train", *settings(tmp_path / "run")]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for_step(tmp_path / "run", 16, process)
    finally:
        for member in [*psutil.Process(process.pid).children(recursive=True), process]:
            member.kill()
        process.wait()
    again = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "goes on where it stopped" in again.stdout
    assert "multiply-adds a batch of 32" in again.stdout
    assert "times as long (equation 14" in again.stdout
    assert same(network(trained), network(tmp_path / "run")) < 1e-5


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (["model.partition.fractions=[0.5, 0.4]"], "add up to 0.9"),
        (
            ["model.hidden_width=2", "model.partition.fractions=[0.25, 0.25, 0.25, 0.25]"],
            "leaves nothing for tail 2",
        ),
        (["model.head.projection=cubic"], "projection"),
        (["model.dropout=1.5"], r"model\.dropout"),
        (["train.hidden_rate=-1"], "hidden_rate"),
    ],
)
def test_impossible_settings_are_refused_before_anything_starts(values: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        config.load("aplc_xlnet", values)


def test_presets_have_the_papers_numbers() -> None:
    """Tables 2 and 3."""
    tables = {
        "eurlex_4k": (768, (0.5, 0.5), 512, (5e-5, 1e-4, 2e-3), 12, 8),
        "amazoncat_13k": (768, (0.5, 0.5), 192, (5e-5, 1e-4, 2e-3), 48, 8),
        "wiki10_31k": (768, (0.5, 0.5), 512, (1e-5, 1e-4, 1e-3), 12, 6),
        "wiki_500k": (768, (0.33, 0.33, 0.34), 256, (5e-5, 1e-4, 2e-3), 64, 12),
        "amazon_670k": (512, (0.25, 0.25, 0.25, 0.25), 128, (5e-5, 1e-4, 2e-3), 32, 25),
    }
    for name, wanted in tables.items():
        c = config.load(f"aplc_xlnet.{name}")
        rates = (c.train.encoder_rate, c.train.hidden_rate, c.train.label_rate)
        got = (
            c.model.hidden_width,
            c.model.partition.fractions,
            c.encoder.max_tokens,
            rates,
            c.train.batch_size,
            c.train.epochs,
        )
        assert got == wanted, name
        assert (c.model.head.decay, c.train.warmup, c.train.schedule) == (2.0, 0.0, "linear")
        assert (c.engine.clip_norm, c.corpus.valid_fraction) == (1.0, 0.0)


def partition_file(directory: Path) -> Path:
    """Labels 0 to 3 in the head, 4 and 5 in the first tail, 6 and 7 in the second."""
    cluster_of = np.array([0, 0, 0, 0, 1, 1, 2, 2], np.int32)
    save_file(
        {"cluster_of": cluster_of, "document_rates": np.array([0.5, 0.25])}, directory / aplc_xlnet.PARTITION
    )
    return directory / aplc_xlnet.PARTITION


def test_a_learner_has_its_tails_project_only_the_documents_that_need_them(tmp_path: Path) -> None:
    chosen = config.load("aplc_xlnet", SMALL)
    settings = aplc_xlnet.Settings(chosen.encoder, chosen.model, partition_file(tmp_path), chosen.seed)
    learner = aplc_xlnet.build(settings, torch.device("cpu"))
    assert isinstance(learner, aplc_xlnet.AplcLearner)
    assert learner.label_parts == ("tails",)
    module = learner.module
    assert all(hasattr(module, part) for part in learner.label_parts)
    ids = torch.ones(3, 4, dtype=torch.int64)
    # Documents 0 and 2 have a label of tail 1, none has one of tail 2.
    targets = Ragged(torch.tensor([0, 4, 1, 5]), torch.tensor([0, 2, 3, 4]))
    learner.before_forward(targets)
    _, logits, first, second = outputs = module(ids, torch.ones_like(ids))
    assert (len(logits), len(first), len(second)) == (3, 2, 0)
    learner.loss(outputs, targets, np.arange(3), lr=1e-3).backward()
    # It holds for one forward pass: validation then has all documents.
    assert [len(part) for part in module(ids, torch.ones_like(ids))] == [3, 3, 3, 3]


@pytest.mark.parametrize(("most_weights", "note"), [(2**24, ""), (4 * 32, ", timed with 4 of 8 labels")])
def test_the_measured_ratio_and_what_was_timed_are_told(
    most_weights: int,
    note: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    partition_file(tmp_path)
    labels = sp.csr_matrix(np.eye(8, dtype=np.float32))
    corpus = SimpleNamespace(label_matrix=lambda split: labels)
    monkeypatch.setattr(aplc_xlnet.shared_stages, "open_corpus", lambda given: corpus)
    monkeypatch.setattr(aplc_xlnet, "time_layers", lambda *given: aplc_xlnet.LayerTimes(0.002, 0.005))
    monkeypatch.setattr(aplc_xlnet, "_TIMED_WEIGHTS", most_weights)
    stage = aplc_xlnet.label_layer_stage(config.load("aplc_xlnet", SMALL))
    stage.run(tmp_path, {"partition": tmp_path})
    results = json.loads((tmp_path / aplc_xlnet.LAYER_TIMES).read_text())
    assert (results["step_seconds"], results["flat_step_seconds"]) == (0.002, 0.005)
    assert results["measured_ratio"] == pytest.approx(2.5)
    said = capsys.readouterr().out
    assert f"label layer{note}: 2.00 ms a step, a flat layer 5.00 ms: 2.50 times as long" in said


def test_a_layer_is_timed_in_its_proportions() -> None:
    clusters = LabelClusters.from_assignment(torch.arange(1000) % 10 // 4, 3)  # 400, 400 and 200 labels
    small, renamed = _shrunk(clusters, 100)
    assert small.offsets.tolist() == [0, 40, 80, 100]
    of_label = torch.searchsorted(small.offsets, renamed, right=True) - 1
    assert torch.equal(of_label, torch.arange(1000) % 10 // 4)
    assert torch.equal(renamed.unique(), torch.arange(100))
    same_size, names = _shrunk(clusters, 5000)
    assert torch.equal(same_size.offsets, clusters.offsets)
    assert torch.equal(names.sort().values, torch.arange(1000))
