"""TF-IDF against scikit-learn on awkward texts and settings, at several numbers of blocks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
from scipy import sparse
from sklearn.feature_extraction.text import TfidfVectorizer

from xmc.corpus.tfidf import Tfidf, TfidfConfig, fit, fit_transform, load_matrix
from xmc.errors import InputError

_WORDS = """
    the The of neural NEURAL network Netz Straße STRASSE ΣΊΣΥΦΟΣ σίσυφος İstanbul istanbul naïve café cafe\u0301
    数据 挖掘 数据挖掘 данные ДАННЫЕ x1 x_2 _ a ab abc ab_c don't 3d 42 ٣٤ ﬁne 𝒜𝓁𝑔 \U0001f600ok z
""".split()  # noqa: SIM905


def _texts(num_texts: int, seed: int) -> list[str]:
    """Zipf-distributed words of several scripts with odd separators; every 17th text is empty."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 40, num_texts)
    chance = 1.0 / np.arange(1, len(_WORDS) + 1)
    separators = np.array([" ", "  ", "\n", ", ", "-", "\u00a0", "."])
    texts = []
    for i, length in enumerate(lengths):
        words = rng.choice(_WORDS, length, p=chance / chance.sum())
        texts.append("".join(np.char.add(words, rng.choice(separators, length))) if i % 17 else "")
    return [*texts, "!?", "qqq zzz www", "a b c"]


def _shards(texts: list[str], directory: Path, num_shards: int) -> list[Path]:
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for i, rows in enumerate(np.array_split(np.arange(len(texts)), num_shards)):
        paths.append(directory / f"part-{i:05d}.parquet")
        pq.write_table(pa.table({"text": pa.array([texts[row] for row in rows], pa.string())}), paths[-1])
    return paths


def _vectorizer(config: TfidfConfig) -> TfidfVectorizer:
    return TfidfVectorizer(
        ngram_range=(config.ngram_min, config.ngram_max),
        min_df=config.min_df,
        max_df=config.max_df,
        max_features=config.max_features,
        sublinear_tf=config.sublinear_tf,
        lowercase=config.lowercase,
        token_pattern=config.token_pattern,
        use_idf=config.use_idf,
        smooth_idf=config.smooth_idf,
        norm=config.norm,
    )


def _assert_equal(ours: sparse.csr_matrix, theirs: sparse.csr_matrix) -> None:
    assert ours.shape == theirs.shape
    assert ours.dtype == np.float32
    assert ours.has_sorted_indices
    difference = abs(ours - theirs)
    scale = max(1.0, abs(theirs).max())
    assert difference.nnz == 0 or difference.max() <= 1e-6 * scale
    assert ours.nnz == theirs.nnz


CONFIGS = [
    TfidfConfig(),
    TfidfConfig(ngram_max=2, min_df=2, sublinear_tf=True, max_features=60),
    TfidfConfig(ngram_max=3, min_df=0.02, max_df=0.4),
    TfidfConfig(ngram_min=2, ngram_max=3, min_df=3, max_df=30, max_features=101, sublinear_tf=True),
    TfidfConfig(ngram_max=2, max_features=700, lowercase=False, smooth_idf=False),
    TfidfConfig(ngram_max=2, use_idf=False, norm="l1", token_pattern=r"(?u)\b\w+\b"),
    TfidfConfig(ngram_max=2, min_df=2, norm=None, token_pattern=r"[^\W\d_]+"),
    TfidfConfig(token_pattern=r"(\w+)[ ,]", max_df=0.9),
]


@pytest.mark.parametrize("config", CONFIGS, ids=range(len(CONFIGS)))
def test_equals_scikit_learn(ray_session: None, tmp_path: Path, config: TfidfConfig) -> None:
    train, test = _texts(300, seed=1), _texts(90, seed=2)
    theirs = _vectorizer(config)
    expected = theirs.fit_transform(train)
    ours = fit_transform(_shards(train, tmp_path / "train", 3), config, tmp_path / "X")
    assert ours.terms.to_pylist() == theirs.get_feature_names_out().tolist()
    if config.use_idf:
        np.testing.assert_allclose(ours.idf, theirs.idf_, rtol=1e-12)
    _assert_equal(load_matrix(tmp_path / "X"), expected)
    _assert_equal(ours.transform_texts(test), theirs.transform(test))
    # The matrix of the training texts is the same when they come anew.
    _assert_equal(ours.transform_texts(pa.array(train)), expected)


def test_blocks_do_not_matter(ray_session: None, tmp_path: Path) -> None:
    config, texts = TfidfConfig(ngram_max=3, min_df=2, max_features=150), _texts(200, seed=3)
    theirs = _vectorizer(config).fit(texts)
    for num_shards in (1, 2, 7):
        shards = _shards(texts, tmp_path / f"{num_shards}", num_shards)
        ours = fit(shards, config)
        assert ours.terms.to_pylist() == theirs.get_feature_names_out().tolist()
        ours.transform(shards, tmp_path / "X")
        _assert_equal(load_matrix(tmp_path / "X"), theirs.transform(texts))


def test_dataset(ray_session: None, tmp_path: Path) -> None:
    config, texts = TfidfConfig(ngram_max=2), _texts(100, seed=4)
    rows = [{"id": str(i), "text": text} for i, text in enumerate(texts)]
    dataset = ray.data.from_items(rows, override_num_blocks=5)
    fit_transform(dataset, config, tmp_path / "X")
    _assert_equal(load_matrix(tmp_path / "X"), _vectorizer(config).fit_transform(texts))


def test_ties_at_max_features(ray_session: None, tmp_path: Path) -> None:
    """Hundreds of terms are equally frequent at the cut; the same ones stay."""
    rng = np.random.default_rng(5)
    texts = [" ".join(f"w{i:03d}" for i in rng.permutation(400)[:100]) for _ in range(60)]
    for limit in (7, 150, 390):
        config = TfidfConfig(max_features=limit)
        ours = fit(_shards(texts, tmp_path, 2), config)
        assert ours.terms.to_pylist() == _vectorizer(config).fit(texts).get_feature_names_out().tolist()


def test_few_texts_at_a_time(ray_session: None, tmp_path: Path) -> None:
    """One text and none: what a server gets."""
    ours = fit(_shards(["good old text", "new text"], tmp_path, 1), TfidfConfig())
    assert ours.transform_texts([]).shape == (0, 4)
    assert ours.transform_texts(["nothing known"]).nnz == 0
    row = ours.transform_texts(["Text, text \ud800 good"])
    assert row.shape == (1, 4)
    assert row.nnz == 2


def test_save_and_load(ray_session: None, tmp_path: Path) -> None:
    config, texts = TfidfConfig(ngram_max=3, min_df=2, sublinear_tf=True), _texts(100, seed=6)
    ours = fit(_shards(texts, tmp_path, 2), config)
    ours.save(tmp_path / "saved")
    ours.save(tmp_path / "saved")  # replaces the former
    loaded = Tfidf.load(tmp_path / "saved")
    assert loaded.config == config
    expected = ours.transform_texts(texts)
    got = loaded.transform_texts(texts)
    assert (got != expected).nnz == 0
    assert got.nnz == expected.nnz > 0
    with pytest.raises(InputError, match="not a saved TF-IDF"):
        Tfidf.load(tmp_path / "elsewhere")


def test_unfinished_matrix_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not a finished"):
        load_matrix(tmp_path)


@pytest.mark.parametrize(
    ("texts", "config", "message"),
    [
        (["!", ""], TfidfConfig(), "no document has a word"),
        (["one two", "three"], TfidfConfig(min_df=2), "no term is left"),
        (["one two", "three"], TfidfConfig(min_df=2, max_df=1), "nothing can be both"),
        (["one two,three"], TfidfConfig(ngram_max=2, token_pattern="[^,]+"), "must not contain spaces"),
        ([None, None], TfidfConfig(), "has no text"),
    ],
)
def test_what_cannot_be_fitted(
    ray_session: None, tmp_path: Path, texts: list, config: TfidfConfig, message: str
) -> None:
    with pytest.raises(InputError, match=message) as raised:
        fit(_shards(texts, tmp_path, 1), config)
    assert type(raised.value) is InputError  # not the wrapped one of a Ray worker


def test_features_instead_of_text(ray_session: None, tmp_path: Path) -> None:
    pq.write_table(pa.table({"feature_ids": [[1, 2]]}), tmp_path / "part-00000.parquet")
    with pytest.raises(InputError, match="has no text"):
        fit([tmp_path / "part-00000.parquet"], TfidfConfig())
    with pytest.raises(InputError, match="has no text"):
        fit(ray.data.from_items([{"feature_ids": [1]}]), TfidfConfig())
    with pytest.raises(InputError, match="no shards"):
        fit([], TfidfConfig())


@pytest.mark.parametrize(
    "wrong",
    [
        {"ngram_min": 2},
        {"ngram_min": 0},
        {"min_df": 0},
        {"min_df": 1.5},
        {"max_df": -0.1},
        {"max_features": 0},
        {"norm": "max"},
        {"token_pattern": "("},
        {"token_pattern": "(a)(b)"},
    ],
)
def test_wrong_settings(wrong: dict) -> None:
    with pytest.raises(InputError, match=next(iter(wrong))):
        TfidfConfig(**wrong)
