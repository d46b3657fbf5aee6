"""Opening a corpus: damage is told, not passed on."""

from __future__ import annotations

import json
import shutil

import pytest

from tests.corpus.inputs import document, write_jsonl
from xmc.corpus import Corpus, CorpusConfig, build
from xmc.errors import InputError


@pytest.fixture(scope="module")
def built(tmp_path_factory, ray_session):
    path = tmp_path_factory.mktemp("store")
    write_jsonl(path / "all.jsonl", map(document, range(30)))
    return build(path / "all.jsonl", path / "c", CorpusConfig(valid_fraction=0, rows_per_shard=7)).path


@pytest.fixture
def copy(built, tmp_path):
    return shutil.copytree(built, tmp_path / "copy")


def test_whole(built):
    corpus = Corpus.open(built)
    assert corpus.num_documents("train") == 30
    assert corpus.dataset("train", ["id"]).take_all() == [{"id": f"d{n}"} for n in range(30)]
    assert corpus.texts("train").to_pylist()[29] == "text number 29"
    with pytest.raises(InputError, match="no split 'test'; there are train"):
        corpus.label_matrix("test")
    with pytest.raises(InputError, match="no features"):
        corpus.features("train")


def test_nothing_there(tmp_path):
    with pytest.raises(InputError, match=r"no corpus there \(manifest.json is missing\)"):
        Corpus.open(tmp_path)


def test_manifest_cut_short(copy):
    manifest = copy / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:100])
    with pytest.raises(InputError, match="damaged"):
        Corpus.open(copy)


def test_other_version(copy):
    manifest = json.loads((copy / "manifest.json").read_text())
    (copy / "manifest.json").write_text(json.dumps(manifest | {"format_version": 99}))
    with pytest.raises(InputError, match="format version"):
        Corpus.open(copy)


@pytest.mark.parametrize("name", ["labels.parquet", "train/part-00002.parquet"])
def test_missing_file(copy, name):
    (copy / name).unlink()
    with pytest.raises(InputError, match=f"{name}: missing"):
        Corpus.open(copy)


def test_damaged_shard(copy):
    shard = copy / "train" / "part-00001.parquet"
    shard.write_bytes(shard.read_bytes()[:50])
    with pytest.raises(InputError, match=r"part-00001.parquet: damaged"):
        Corpus.open(copy).label_matrix("train")
