"""Splitting into words against `re`, the vocabulary's frequencies, and encoded shards."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from xmc.corpus import words
from xmc.corpus.tokens import load_sequences, read_manifest, write_sequences
from xmc.corpus.words import RUNS, Vocabulary, WordsConfig, fit_vocabulary, split_words
from xmc.errors import InputError


def _spelled(split: words.WordSequences) -> list[list[str]]:
    return [[split.words[i] for i in split.sequences[row]] for row in range(len(split.sequences))]


def _random_texts(num_texts: int) -> list[str]:
    """Any code points, with word characters, marks and spaces often enough to make words of them."""
    rng = np.random.default_rng(0)
    common = [ord(c) for c in "aAbBzZ09_ \n\t.,-'ΣσςİıßǅÀé\u0301\u200d\u00a0\u2028中文٣²½"]
    points = np.where(
        rng.random(num_texts * 30) < 0.7,
        rng.choice(common, num_texts * 30),
        rng.integers(0, 0x110000, num_texts * 30),
    ).astype("<u4")
    text = points.tobytes().decode("utf-32-le", "surrogatepass")
    ends = np.sort(rng.integers(0, len(text), num_texts - 1))
    return [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]


@pytest.mark.parametrize("pattern", [*RUNS, r"[a-zA-Z]+\d?"])
@pytest.mark.parametrize("lowercase", [True, False])
def test_splits_as_re_does(pattern: str, lowercase: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = _random_texts(2000)
    expected = [re.findall(pattern, text.lower() if lowercase else text) for text in texts]
    assert any(expected)
    assert _spelled(split_words(texts, pattern, lowercase)) == expected
    monkeypatch.setattr(words, "_CHARS_AT_ONCE", 1000)  # many chunks must join to the same
    assert _spelled(split_words(texts, pattern, lowercase)) == expected


def test_splits_nothing() -> None:
    assert _spelled(split_words([], r"\w+", True)) == []
    assert _spelled(split_words(["", "!"], r"\w+", True)) == [[], []]


def _shards(texts: list[str], directory: Path, num_shards: int) -> list[Path]:
    paths = []
    for i, rows in enumerate(np.array_split(np.arange(len(texts)), num_shards)):
        paths.append(directory / f"part-{i:05d}.parquet")
        pq.write_table(pa.table({"text": pa.array([texts[row] for row in rows], pa.string())}), paths[-1])
    return paths


def test_vocabulary_by_frequency(ray_session: None, tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    texts = [" ".join(f"W{i}" for i in rng.zipf(1.3, 50).clip(max=500)) for _ in range(80)]
    counts = Counter(word for text in texts for word in text.lower().split())
    by_frequency = sorted(counts, key=lambda word: (-counts[word], word))
    for num_shards in (1, 3):
        shards = _shards(texts, tmp_path, num_shards)
        assert fit_vocabulary(shards, WordsConfig()).words == by_frequency
        small = fit_vocabulary(shards, WordsConfig(vocabulary_size=20))
        assert small.words == by_frequency[:18]
        assert len(small) == 20


def test_encoded_shards(ray_session: None, tmp_path: Path) -> None:
    texts = ["b a b", "", "Unseen, A!", "...", "a " * 9, "b"]
    vocabulary = fit_vocabulary(_shards(["b b b a a c", "b"], tmp_path, 2), WordsConfig(4, max_words=5))
    assert vocabulary.words == ["b", "a"]
    manifest = write_sequences(_shards(texts, tmp_path, 3), vocabulary, tmp_path / "ids")
    got = load_sequences(tmp_path / "ids")
    expected = [[2, 3, 2], [1], [1, 3], [1], [3] * 5, [2]]
    assert [got[i].tolist() for i in range(len(got))] == expected
    assert manifest == read_manifest(tmp_path / "ids")
    assert (manifest["rows"], manifest["tokens"], manifest["pad_id"]) == (6, 13, 0)
    assert [part["rows"] for part in manifest["parts"]] == [2, 2, 2]


def test_save_and_load(tmp_path: Path) -> None:
    vocabulary = Vocabulary(["wort", "文", "x\ny"], WordsConfig(100, 7))
    vocabulary.save(tmp_path / "words.parquet")
    loaded = Vocabulary.load(tmp_path / "words.parquet")
    assert loaded.words == vocabulary.words
    assert loaded.config == vocabulary.config
    assert loaded.encode_texts(["文 Wort neu"])[0].tolist() == [3, 2, 1]
    with pytest.raises(InputError, match="no such vocabulary"):
        Vocabulary.load(tmp_path / "other.parquet")
    pq.write_table(pa.table({"word": ["a"]}), tmp_path / "foreign.parquet")
    with pytest.raises(InputError, match="not a vocabulary"):
        Vocabulary.load(tmp_path / "foreign.parquet")


@pytest.mark.parametrize("wrong", [{"vocabulary_size": 2}, {"max_words": 0}])
def test_wrong_settings(wrong: dict) -> None:
    with pytest.raises(InputError, match=next(iter(wrong))):
        WordsConfig(**wrong)
