"""The teacher's stages on a corpus with copies and groups: whom a document may ask, and what a second run repeats."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.corpus.inputs import write_jsonl
from xmc.corpus import Corpus, CorpusConfig, build
from xmc.corpus.words import WordsConfig, fit_vocabulary
from xmc.labels.neighbours import NeighbourConfig, search_shards
from xmc.labels.neighbours import NeighbourIndex as Index
from xmc.labels.teacher import ScopeConfig, build_scopes, shard_paths
from xmc.systems import teaching
from xmc.systems.shared_stages import write_splits
from xmc.systems.vectors import VECTORS

FAMILIES, SIBLINGS = 8, 3
NEIGHBOURS = NeighbourConfig(num_neighbours=4)


@pytest.fixture(scope="module")
def made(ray_session: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[Corpus, Path, Path]:
    """A corpus, its words and its vectors. Siblings of a group are near each other and alone share a label; the first
    document of each group stands in train a second time, under no group, and a third time in test."""
    home = tmp_path_factory.mktemp("teaching")
    rows = [
        {"id": f"{f}-{s}", "text": f"w{f} s{s}", "labels": [f"own {f}"], "group": f"g{f}"}
        for f in range(FAMILIES)
        for s in range(SIBLINGS)
    ]
    copies = [{k: v for k, v in row.items() if k != "group"} | {"id": f"{row['id']} again"} for row in rows]
    write_jsonl(home / "train.jsonl", rows + copies[::SIBLINGS])
    write_jsonl(home / "test.jsonl", [row | {"id": f"test {row['id']}"} for row in copies[::SIBLINGS]])
    corpus = build(home, home / "corpus", CorpusConfig(valid_fraction=0.0))
    vocabulary = fit_vocabulary(corpus.shards("train"), WordsConfig())
    write_splits(corpus, vocabulary, home / "tokens")
    return corpus, home / "tokens", home / "vectors"


def vectors_of(corpus: Corpus, split: str) -> np.ndarray:
    """Near for siblings, the same for copies but in their last bits."""
    random = np.random.default_rng(0)
    family, sibling = random.normal(size=(FAMILIES, 16)), random.normal(size=(SIBLINGS, 16))
    places = [tuple(int(word[1:]) for word in text.as_py().split()) for text in corpus.texts(split)]
    made = np.stack([family[f] + 0.2 * sibling[s] for f, s in places])
    return (made * (1 + 1e-6 * np.arange(len(made)))[:, None]).astype(np.float32)


def scopes_of(corpus: Corpus, vectors: Path, groups: np.ndarray, out: Path) -> list[set[int]]:
    """The labels that each training document is taught."""
    (vectors / "train").mkdir(parents=True, exist_ok=True)
    for number, part in enumerate(np.array_split(vectors_of(corpus, "train"), 3)):
        save_file({VECTORS: part}, vectors / "train" / f"part-00000-{number}.safetensors")
    teaching.find_neighbours(vectors, groups, NEIGHBOURS, 12, out)
    parts = [load_file(path) for path in sorted((out / "found" / "train").glob("*.safetensors"))]
    ids, near = (np.concatenate([part[key] for part in parts]) for key in ("ids", "similarities"))
    labels = corpus.label_matrix("train")
    parent = np.full(labels.shape[1], -1, np.int32)
    scopes = build_scopes(ids, near, labels, parent, ScopeConfig())
    return [set(part.tolist()) for part in np.split(scopes.nodes, scopes.offsets[1:-1])]


def test_nobody_is_taught_by_itself_its_copy_or_its_group(made, tmp_path: Path):
    corpus, tokens, vectors = made
    own = corpus.label_matrix("train").indices  # one label a document
    groups = teaching.training_groups(corpus, tokens)

    def taught_their_own(guard: np.ndarray, name: str) -> int:
        return sum(
            label in scope
            for label, scope in zip(own, scopes_of(corpus, vectors, guard, tmp_path / name), strict=True)
        )

    assert taught_their_own(groups, "guarded") == 0
    # Each part of the guard is needed: with the document itself alone, or its copies alone, all labels leak.
    assert taught_their_own(np.arange(len(own)), "itself") == len(own)
    keys = np.unique([text.as_py() for text in corpus.texts("train")], return_inverse=True)[1]
    assert taught_their_own(keys, "copies") == len(own)


def test_a_test_document_asks_train_alone_and_may_ask_its_copy(made, tmp_path: Path):
    corpus, tokens, vectors = made
    scopes_of(corpus, vectors, teaching.training_groups(corpus, tokens), tmp_path)
    shards = [Index.load(path) for path in shard_paths(tmp_path)]
    found, _ = search_shards(shards, vectors_of(corpus, "test"))
    train, test = corpus.texts("train"), corpus.texts("test")
    assert found.max() < len(train)
    assert all(train[int(row[0])] == text for row, text in zip(found, test, strict=True))


def test_what_was_lost_is_found_again(made, tmp_path: Path):
    corpus, tokens, vectors = made
    groups = teaching.training_groups(corpus, tokens)
    before = scopes_of(corpus, vectors, groups, tmp_path)
    kept, lost = sorted((tmp_path / "found" / "train").glob("*.safetensors"))[:2]
    time = kept.stat().st_mtime_ns
    lost.unlink()
    assert scopes_of(corpus, vectors, groups, tmp_path) == before
    assert lost.exists()
    assert kept.stat().st_mtime_ns == time
