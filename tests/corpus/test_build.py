"""Whole builds: ids, splits, policies for bad rows, determinism, and builds that die."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from tests.corpus.inputs import document, write_jsonl
from xmc.corpus import Corpus, CorpusConfig, build, sample_path
from xmc.corpus.__main__ import default_directory, describe
from xmc.errors import InputError

pytestmark = pytest.mark.usefixtures("ray_session")


def contents(corpus: Corpus, split: str) -> list[dict]:
    names = corpus.labels.names.to_pylist()
    rows = corpus.dataset(split).take_all()
    return [
        {
            "id": row["id"],
            "text": row["text"],
            "labels": sorted(names[at] for at in row["label_ids"]),
            "unseen": row["num_unseen"],
        }
        for row in rows
    ]


@pytest.fixture(scope="module")
def groups(tmp_path_factory, ray_session):
    """400 documents in 80 groups with a test part that has unseen labels, and a label file."""
    path = tmp_path_factory.mktemp("groups")
    rng = np.random.default_rng(0)
    rows = [
        {
            "id": f"d{n:03}",
            "text": f"document {n} of words",
            "labels": [f"label {k}" for k in rng.choice(30, 3, replace=False)] + ["all"] * (1 + n % 2),
            "group": f"g{n % 80}",
        }
        for n in range(400)
    ]
    test = [
        {"id": "t0", "text": "one", "labels": ["all", "new", "newer", "new"]},
        {"id": "t1", "text": "two words", "labels": ["newest"]},
        {"id": "t2", "text": "three words here", "labels": []},
        {"id": "t3", "text": "four", "labels": ["all"]},
    ]
    write_jsonl(path / "train.jsonl", rows)
    write_jsonl(path / "test.jsonl", test)
    write_jsonl(path / "labels.jsonl", [{"label": "all", "text": "everything", "parent": "root"}])
    return path, rows


class TestResult:
    def test_counts_ids_and_unseen_labels(self, groups, tmp_path):
        path, rows = groups
        corpus = build(path, tmp_path / "c", CorpusConfig(valid_fraction=0.2))
        manifest = corpus.manifest
        assert corpus.splits == ["train", "valid", "test"]
        assert corpus.num_documents("train") + corpus.num_documents("valid") == 400
        assert corpus.num_labels == 31
        assert manifest["unseen_test_labels"] == 3
        assert manifest["unseen_test_assignments"] == 3
        assert manifest["repeated_labels"] == 200 + 1
        test = manifest["splits"]["test"]
        assert (test["assignments"], test["without_labels"], test["without_known_label"]) == (5, 1, 1)
        assert corpus.num_unseen("test").tolist() == [2, 1, 0, 0]
        names = corpus.labels.names.to_pylist()
        assert names[:31] == sorted({label for row in rows for label in row["labels"]})
        assert names[31:] == ["root"]
        at = names.index("all")
        assert corpus.labels.texts[at].as_py() == "everything"
        assert corpus.labels.parent_ids[at] == 31
        assert corpus.labels.train_frequency[at] == 400
        matrix = corpus.label_matrix("train")
        assert matrix.shape == (corpus.num_documents("train"), 31)
        assert matrix.sum() == 4 * corpus.num_documents("train")
        assert matrix[:, at].sum() == corpus.num_documents("train")
        by_id = {row["id"]: sorted(set(row["labels"])) for row in rows}
        for split in ("train", "valid"):
            found = contents(corpus, split)
            assert [row["id"] for row in found] == sorted(row["id"] for row in found)
            assert all(row["labels"] == by_id[row["id"]] for row in found)
        assert "test labels that train never saw: 3 (3 assignments, 60.0%" in describe(corpus)

    def test_groups_do_not_straddle_splits(self, groups, tmp_path):
        path, rows = groups
        config = CorpusConfig(valid_fraction=0.2, test_fraction=0.2)
        corpus = build(path / "train.jsonl", tmp_path / "c", config)
        group_of = {row["id"]: row["group"] for row in rows}
        found = {split: {group_of[name] for name in corpus.ids(split).to_pylist()} for split in corpus.splits}
        assert sum(map(len, found.values())) == 80
        assert all(5 < len(found[split]) < 30 for split in ("valid", "test"))
        other = build(path / "train.jsonl", tmp_path / "d", CorpusConfig(valid_fraction=0.2, seed=1))
        assert {group_of[name] for name in other.ids("valid").to_pylist()} != found["valid"]
        with pytest.raises(InputError, match="test_fraction"):
            build(path, tmp_path / "e", config)

    def test_blocks_and_shards_change_nothing_but_files(self, groups, tmp_path):
        path, _ = groups
        one = build(path, tmp_path / "one")
        many = build(path, tmp_path / "many", CorpusConfig(rows_per_shard=37, block_bytes=1500))
        assert len(many.shards("train")) > 10
        assert [shard.name for shard in many.shards("train")][:2] == [
            "part-00000.parquet",
            "part-00001.parquet",
        ]
        assert max(shard["documents"] for shard in many.manifest["splits"]["train"]["shards"]) <= 37
        assert one.manifest["content_hash"] == many.manifest["content_hash"]
        assert one.labels.table.equals(many.labels.table)
        for split in one.splits:
            assert one.ids(split).to_pylist() == many.ids(split).to_pylist()
            assert (one.label_matrix(split) != many.label_matrix(split)).nnz == 0
        assert contents(many, "train") == contents(one, "train")

    def test_content_hash_sees_a_changed_word(self, tmp_path):
        hashes = set()
        for number, text in enumerate(["a word", "a ward"]):
            path = write_jsonl(tmp_path / f"{number}.jsonl", [document(1), document(2, text=text)])
            config = CorpusConfig(valid_fraction=0)
            hashes.add(build(path, tmp_path / f"c{number}", config).manifest["content_hash"])
        assert len(hashes) == 2

    def test_sparse_features(self, tmp_path):
        source = tmp_path / "in"
        source.mkdir()
        (source / "train.txt").write_text("3 4 5\n0,3 0:1.5 3:2\n3 1:0.25\n4 2:1\n")
        (source / "test.txt").write_text("2 4 5\n3,1 1:7 2:8\n 0:1\n")
        corpus = build(source, tmp_path / "c", CorpusConfig(valid_fraction=0))
        assert corpus.num_features == 4
        assert corpus.labels.names.to_pylist() == ["0", "3", "4"]
        expected = [[1.5, 0, 0, 2], [0, 0.25, 0, 0], [0, 0, 1, 0]]
        np.testing.assert_array_equal(corpus.features("train").toarray(), expected)
        np.testing.assert_array_equal(corpus.label_matrix("test").toarray(), [[0, 1, 0], [0, 0, 0]])
        assert corpus.num_unseen("test").tolist() == [1, 0]
        assert corpus.texts("train").to_pylist() == [None, None, None]

    def test_sample(self, tmp_path):
        assert sum(file.stat().st_size for file in sample_path().iterdir()) < 1_000_000
        corpus = build(sample_path(), tmp_path / "c")
        assert 1_650 < corpus.num_documents("train") + corpus.num_documents("valid") < 1_750
        assert corpus.num_documents("test") == 300
        assert corpus.manifest["bad_rows"] == {}
        assert (corpus.labels.parent_ids[: corpus.num_labels] >= corpus.num_labels).all()
        assert default_directory("sample").as_posix() == "runs/corpus/sample"


BAD = [
    document(1),
    {"id": "d2", "labels": ["a"]},
    {"id": "d3", "text": "t", "labels": []},
    b'{"id": "d4", "text": "\xff", "labels": ["a"]}',
    b'{"id": "d5", "text"',
    document(6, labels=["a\nb"]),
    document(7, text=7.5),
    document(1, labels=["only in the duplicate"]),
    document(9),
]
BAD_KINDS = {
    "no text": 1,
    "no labels": 1,
    "not UTF-8": 1,
    "broken JSON": 1,
    "bad label": 1,
    "wrong type": 1,
    "duplicate id": 2,
    "parent cycle": 1,
    "duplicate label row": 1,
}


@pytest.fixture
def bad(tmp_path):
    path = tmp_path / "in"
    write_jsonl(path / "train.jsonl", BAD)
    write_jsonl(path / "test.jsonl", [document(9, text="leaked from train"), document(20)])
    label_rows = [("l0", "l1"), ("l1", "l0"), ("l0", None)]
    write_jsonl(path / "labels.jsonl", [{"label": name, "parent": parent} for name, parent in label_rows])
    return path


class TestBadRows:
    def test_error_lists_them_and_writes_nothing(self, bad, tmp_path):
        with pytest.raises(InputError) as caught:
            build(bad, tmp_path / "c", CorpusConfig(valid_fraction=0))
        message = str(caught.value)
        assert "10 bad rows" in message
        assert "train.jsonl:2: no text" in message
        assert "train.jsonl:4: not UTF-8" in message
        assert "train.jsonl:8: duplicate id: 'd1' (first at train.jsonl:1)" in message
        assert "test.jsonl:1: duplicate id: 'd9' (first at train.jsonl:9)" in message
        assert "labels.jsonl:2: parent cycle: l0 → l1 → l0" in message
        assert "labels.jsonl:3: duplicate label row: 'l0' (first at line 1)" in message
        assert "on_bad_row=quarantine" in message
        assert "unlabelled=keep" in message
        assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]

    def test_error_lists_the_first_ten(self, tmp_path):
        path = write_jsonl(tmp_path / "all.jsonl", [document(n, text="") for n in range(25)])
        with pytest.raises(InputError, match=r"25 bad rows(.|\n)*jsonl:10: no text\n  … and 15 more"):
            build(path, tmp_path / "c")

    @pytest.mark.parametrize("policy", ["skip", "quarantine"])
    def test_the_rest_is_built(self, bad, tmp_path, policy):
        corpus = build(bad, tmp_path / "c", CorpusConfig(valid_fraction=0, on_bad_row=policy))
        assert corpus.manifest["bad_rows"] == BAD_KINDS
        assert corpus.ids("train").to_pylist() == ["d1", "d9"]
        assert corpus.ids("test").to_pylist() == ["d20"]
        assert corpus.labels.names.to_pylist() == ["l0", "l1"]
        assert corpus.labels.parents.to_pylist() == ["l1", None]
        assert corpus.labels.train_frequency.tolist() == [1, 1]
        assert corpus.num_unseen("test").tolist() == [1]
        summary = describe(corpus)
        assert "bad rows: 10" in summary
        assert "1 × no text (first: train.jsonl:2: no text)" in summary
        quarantine = corpus.path / "quarantine.jsonl"
        assert quarantine.exists() == (policy == "quarantine")
        if policy == "quarantine":
            entries = [json.loads(line) for line in quarantine.read_text().splitlines()]
            places = [(entry["file"], entry["line"]) for entry in entries]
            assert places == [
                *(("train.jsonl", line) for line in (2, 3, 4, 5, 6, 7, 8)),
                ("test.jsonl", 1),
                ("labels.jsonl", 2),
                ("labels.jsonl", 3),
            ]
            assert entries[3]["raw"] == '{"id": "d5", "text"'
            assert entries[2]["raw"] == '{"id": "d4", "text": "\\xff", "labels": ["a"]}'
            assert json.loads(entries[6]["raw"])["labels"] == ["only in the duplicate"]
            assert entries[7]["reason"] == "duplicate id: 'd9' (first at train.jsonl:9)"

    def test_headers_that_disagree(self, tmp_path):
        source = tmp_path / "in"
        source.mkdir()
        (source / "train.txt").write_text("5 4 5\n0 0:1\n1 1:1\n")
        (source / "test.txt").write_text("1 6 5\n0 5:1\n")
        with pytest.raises(InputError) as caught:
            build(source, tmp_path / "c", CorpusConfig(valid_fraction=0))
        assert "train.txt:1: header: says 5 documents, the file has 2" in str(caught.value)
        assert "test.txt:1: header: says D=6 and L=5, that of train says 4 and 5" in str(caught.value)
        assert "test.txt:2: index out of range: feature 5" in str(caught.value)
        corpus = build(source, tmp_path / "c", CorpusConfig(valid_fraction=0, on_bad_row="skip"))
        assert corpus.splits == ["train"]
        assert corpus.manifest["bad_rows"] == {"header": 2, "index out of range": 1}

    def test_empty_inputs(self, tmp_path):
        (tmp_path / "empty.jsonl").write_text("\n\n")
        with pytest.raises(InputError, match="the input is empty"):
            build(tmp_path / "empty.jsonl", tmp_path / "c")
        (tmp_path / "empty.jsonl").write_text("")
        with pytest.raises(InputError, match="the input is empty"):
            build(tmp_path / "empty.jsonl", tmp_path / "c")
        path = write_jsonl(tmp_path / "bad.jsonl", [document(1, text="")])
        with pytest.raises(InputError, match="no usable training documents"):
            build(path, tmp_path / "c", CorpusConfig(on_bad_row="skip"))
        path = write_jsonl(tmp_path / "group.jsonl", [document(n, group="one") for n in range(3)])
        with pytest.raises(InputError, match="lower valid_fraction"):
            build(path, tmp_path / "c", CorpusConfig(valid_fraction=0.999))
        assert not (tmp_path / "c").exists()


class TestBuildingAgain:
    def test_up_to_date_or_built_anew(self, tmp_path):
        path = write_jsonl(tmp_path / "all.jsonl", map(document, range(40)))
        told: list[str] = []
        first = build(path, tmp_path / "c", report=told.append)
        assert not any("up to date" in line for line in told)
        stamp = (first.path / "manifest.json").stat().st_mtime_ns
        build(path, tmp_path / "c", report=told.append)
        assert told[-1].endswith("up to date")
        assert (first.path / "manifest.json").stat().st_mtime_ns == stamp
        write_jsonl(path, map(document, range(41)))
        assert build(path, tmp_path / "c").manifest["content_hash"] != first.manifest["content_hash"]
        again = build(path, tmp_path / "c", CorpusConfig(valid_fraction=0.5))
        assert again.num_documents("valid") > 5
        assert sorted(entry.name for entry in tmp_path.iterdir()) == ["all.jsonl", "c"]

    def test_other_directories_are_left_alone(self, tmp_path):
        path = write_jsonl(tmp_path / "all.jsonl", [document(1)])
        (tmp_path / "mine").mkdir()
        (tmp_path / "mine" / "thesis.tex").write_text("years of work")
        with pytest.raises(InputError, match="is not a corpus"):
            build(path, tmp_path / "mine")
        corpus = build(path, tmp_path / "c", CorpusConfig(valid_fraction=0))
        with pytest.raises(InputError, match="built corpus already"):
            build(corpus.path, tmp_path / "d")

    def test_stale_leftovers_go_and_living_builds_stay(self, tmp_path):
        import fcntl

        path = write_jsonl(tmp_path / "all.jsonl", [document(1)])
        dead, living, fresh = (tmp_path / f".c.{name}.tmp" for name in ("dead", "living", "fresh"))
        for directory in (dead, living, fresh):
            directory.mkdir()
        (dead / ".building").touch()
        with open(living / ".building", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            build(path, tmp_path / "c", CorpusConfig(valid_fraction=0))
        assert (dead.exists(), living.exists(), fresh.exists()) == (False, True, True)


KILLED_BUILD = """
import sys, time
from importlib import import_module
from raycluster import session
from xmc.corpus import build
module = import_module("xmc.corpus.build")
session.connect(num_cpus=1)
def slow(directory, shards):
    print("writing", directory, flush=True)
    time.sleep(600)
module._number_shards = slow
build(sys.argv[1], sys.argv[2])
"""


@pytest.mark.slow
def test_killed_build_leaves_nothing_that_looks_finished(tmp_path):
    path = write_jsonl(tmp_path / "all.jsonl", map(document, range(40)))
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED_BUILD, str(path), str(tmp_path / "c")],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    line = next(line for line in process.stdout if line.startswith("writing"))
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    left = [entry.name for entry in tmp_path.iterdir() if entry.name.startswith(".c.")]
    assert left
    assert left[0] in line
    assert not (tmp_path / "c").exists()
    assert list(tmp_path.rglob("manifest.json")) == []
    with pytest.raises(InputError, match="no corpus there"):
        Corpus.open(tmp_path / "c")
    deadline = time.monotonic() + 30
    while any(entry.name.startswith(".c.") for entry in tmp_path.iterdir()) and time.monotonic() < deadline:
        corpus = build(path, tmp_path / "c")
    assert sum(map(corpus.num_documents, corpus.splits)) == 40
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["all.jsonl", "c"]
