"""TF-IDF over a corpus on Ray, equal to scikit-learn's TfidfVectorizer with the same settings.

N-grams are never built as strings while counting: words become integers, an n-gram is the pair (its first n−1 words,
its last word) as one int64, and only the terms that survive are spelled out. Character n-grams, stop words and accents
are not handled.
"""

from __future__ import annotations

import json
import numbers
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import ray
from numba import njit
from safetensors.numpy import load_file, save_file
from scipy import sparse

from xmc.corpus.tokens import (
    MANIFEST,
    Sequences,
    Source,
    Texts,
    gather,
    read_manifest,
    read_texts,
    text_blocks,
)
from xmc.corpus.words import RUNS, count_values, count_words, split_words
from xmc.errors import InputError
from xmc.files import atomic_directory

_VERSION = 1
_SETTINGS = "tfidf.json"
_TERMS = "terms.parquet"
# A reduce task merges about this many n-gram counts at a time (16 bytes each, and its hash table beside them).
_COUNTS_PER_REDUCER = 20_000_000
_MAX_REDUCERS = 64  # on large clusters: every block sends a piece to every reduce task


@dataclass(frozen=True)
class TfidfConfig:
    # Terms are runs of ngram_min to ngram_max words.
    ngram_min: int = 1
    ngram_max: int = 1
    # A term is kept if at least / at most so many documents have it: a count, or as a float a share of all documents.
    min_df: int | float = 1
    max_df: int | float = 1.0
    # Keep only this many terms, those that occur most often; None keeps all.
    max_features: int | None = None
    # 1 + ln(count) instead of the count.
    sublinear_tf: bool = False
    lowercase: bool = True
    # What a word is. Patterns other than runs of word characters are split by `re`: slower.
    token_pattern: str = r"(?u)\b\w\w+\b"
    # Weigh terms by inverse document frequency, smoothed as if one more document had every term.
    use_idf: bool = True
    smooth_idf: bool = True
    # Length of each row: "l2", "l1" or None.
    norm: str | None = "l2"

    def __post_init__(self) -> None:
        if not 1 <= self.ngram_min <= self.ngram_max:
            raise InputError(
                f"ngram_min={self.ngram_min}, ngram_max={self.ngram_max}: need 1 ≤ ngram_min ≤ ngram_max"
            )
        for key, value, least in (("min_df", self.min_df, 1), ("max_df", self.max_df, 1)):
            count = isinstance(value, numbers.Integral)
            if isinstance(value, bool) or (value < least if count else not 0.0 <= value <= 1.0):
                raise InputError(
                    f"{key}={value}: a count of documents from {least}, or a share from 0.0 to 1.0"
                )
        if self.max_features is not None and self.max_features < 1:
            raise InputError(f"max_features={self.max_features}: must be at least 1, or null for all terms")
        if self.norm not in ("l1", "l2", None):
            raise InputError(f"norm={self.norm}: choose l2, l1 or null")
        try:
            groups = re.compile(self.token_pattern).groups
        except re.error as error:
            raise InputError(
                f"token_pattern={self.token_pattern!r}: not a regular expression ({error})"
            ) from None
        if groups > 1:
            raise InputError(
                f"token_pattern={self.token_pattern!r}: has {groups} groups; one at most is the word"
            )


# ---------------------------------------------------------------------------------------------- n-grams as integers


@njit(cache=True, nogil=True, inline="always")
def _slot(table: np.ndarray, key: int) -> int:
    """The slot of `key` in an open-addressed table of int64 keys (−1: free), or the free slot where it belongs."""
    mask = len(table) - 1
    mixed = np.uint64(key) * np.uint64(0x9E3779B97F4A7C15)
    slot: Any = np.int64((mixed ^ (mixed >> np.uint64(32))) & np.uint64(mask))
    while table[slot] != key and table[slot] != -1:
        slot = (slot + 1) & mask
    return slot


@njit(cache=True, nogil=True)
def _empty_table(num_keys: int) -> np.ndarray:
    """A free table that `num_keys` keys fill at most by half."""
    capacity = 16
    while capacity < 2 * num_keys:
        capacity *= 2
    return np.full(capacity, -1, np.int64)


@njit(cache=True, nogil=True)
def _index(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A table of distinct keys, and the position in `keys` (int32) of the key in each slot."""
    table = _empty_table(len(keys))
    positions = np.empty(len(table), np.int32)
    for i in range(len(keys)):
        slot = _slot(table, keys[i])
        table[slot] = keys[i]
        positions[slot] = i
    return table, positions


class _Trie:
    """Numbers for n-grams. Node v < W is the word v; a longer n-gram is the node W + i of its entry i in `keys`.

    Its key is (node of the n-gram without its last word) · W + (last word). Equal n-grams, equal node.
    """

    def __init__(self, num_words: int, keys: np.ndarray) -> None:
        self.num_words = num_words
        self.keys = keys
        self.table, self.positions = _index(keys)

    def extended(self, keys: np.ndarray) -> _Trie:
        return _Trie(self.num_words, np.concatenate([self.keys, keys]))


@njit(cache=True, nogil=True)
def _ngram_keys(
    words: np.ndarray,
    offsets: np.ndarray,
    length: int,
    num_words: int,
    table: np.ndarray,
    positions: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Keys int64 of the runs of `length` words whose beginning is in the trie, and their offsets by text."""
    keys = np.empty(len(words), np.int64)
    key_offsets = np.zeros(len(offsets), np.int64)
    size = 0
    for text in range(len(offsets) - 1):
        end = offsets[text + 1]
        for i in range(offsets[text], end - length + 1):
            node = int(words[i])
            for j in range(i + 1, i + length):
                if node < 0 or words[j] < 0:
                    break
                key = node * num_words + words[j]
                if j == i + length - 1:
                    keys[size] = key
                    size += 1
                else:
                    slot = _slot(table, key)
                    node = num_words + positions[slot] if table[slot] == key else -1
        key_offsets[text + 1] = size
    return keys[:size], key_offsets


@njit(cache=True, nogil=True)
def _group(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The distinct keys by first occurrence (K,), and for each key its position among them, int32."""
    table = _empty_table(len(keys))
    ids = np.empty(len(table), np.int32)
    distinct = np.empty(len(keys), np.int64)
    groups = np.empty(len(keys), np.int32)
    size = 0
    for i in range(len(keys)):
        slot = _slot(table, keys[i])
        if table[slot] == -1:
            table[slot], ids[slot], distinct[size] = keys[i], size, keys[i]
            size += 1
        groups[i] = ids[slot]
    return distinct[:size].copy(), groups


# ---------------------------------------------------------------------------------------------- fit


@ray.remote
def _count_ngrams(
    split: tuple[pa.LargeStringArray, Sequences],
    words: pa.LargeStringArray,
    trie: _Trie,
    length: int,
    num_parts: int,
) -> Any:
    """Count a block's runs of `length` words that begin with a run of the trie; one result a reduce task."""
    local, sequences = split
    ids = pc.fill_null(pc.index_in(local, value_set=words), -1).to_numpy()[sequences.values]
    keys, offsets = _ngram_keys(ids, sequences.offsets, length, trie.num_words, trie.table, trie.positions)
    distinct, groups = _group(keys)
    counts = (distinct, *count_values(groups, offsets, len(distinct)))
    if num_parts == 1:
        return counts
    # Any mixture of the key's bits serves, so long as all blocks use the same and the parts are alike in size.
    mixed = (distinct.astype(np.uint64) * np.uint64(0xD6E8FEB86659FD93)) >> np.uint64(40)
    part = mixed % np.uint64(num_parts)
    return tuple(tuple(column[part == p] for column in counts) for p in range(num_parts))


@ray.remote
def _reduce_ngrams(min_count: float, *counts: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...]:
    """Sum the blocks' counts of one part's keys and keep those that enough documents have."""
    keys, documents, occurrences = _concatenate(counts)
    distinct, groups = _group(keys)
    # Sums of float64 are exact here: counts stay far below 2^53.
    documents = np.bincount(groups, documents, len(distinct)).astype(np.int64)
    occurrences = np.bincount(groups, occurrences, len(distinct)).astype(np.int64)
    kept = documents >= min_count
    return distinct[kept], documents[kept], occurrences[kept]


def _concatenate(results: Sequence[tuple[np.ndarray, ...]]) -> tuple[np.ndarray, ...]:
    """Column by column."""
    return tuple(np.concatenate(columns) for columns in zip(*results, strict=True))


@dataclass(frozen=True)
class _Ngrams:
    """n-grams of one length in their order as strings: words int32 (K, n), documents (K,), occurrences (K,)."""

    words: np.ndarray
    documents: np.ndarray
    occurrences: np.ndarray


def _count_longer(
    first: _Ngrams, words: pa.LargeStringArray, splits: list[ray.ObjectRef], ngram_max: int, min_count: float
) -> list[_Ngrams]:
    """Count on Ray the runs of 2 to ngram_max words that at least min_count documents have, length by length.

    A run is in no more documents than its parts are, so only what the shorter length left is extended.
    """
    num_words, found = len(words), [first]
    num_parts = max(
        min(int(ray.cluster_resources().get("CPU", 1)), _MAX_REDUCERS),
        int(first.occurrences.sum()) // _COUNTS_PER_REDUCER,
    )
    trie, start, shared_words = _Trie(num_words, np.empty(0, np.int64)), 0, ray.put(words)
    for length in range(2, ngram_max + 1):
        task, shared_trie = _count_ngrams.options(num_returns=num_parts), ray.put(trie)
        mapped = [task.remote(split, shared_words, shared_trie, length, num_parts) for split in splits]
        by_part = [mapped] if num_parts == 1 else list(zip(*mapped, strict=True))
        keys, documents, occurrences = _concatenate(
            gather([_reduce_ngrams.remote(min_count, *refs) for refs in by_part])
        )
        order = np.argsort(keys)  # prefixes are numbered in their order, hence so are their extensions
        prefix, last = np.divmod(keys[order], max(num_words, 1))
        ids = np.column_stack([found[-1].words[prefix - start], last.astype(np.int32)])
        found.append(_Ngrams(ids, documents[order], occurrences[order]))
        start = num_words + len(trie.keys)  # node of the first n-gram of this length
        trie = trie.extended(keys[order])
    return found


def _select(
    found: list[_Ngrams], max_count: float, max_features: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """The terms to keep, in order: their words int32 (D, n) (−1 after the last) and document counts (D,)."""
    width = found[-1].words.shape[1]
    padded = [
        np.pad(level.words, ((0, 0), (0, width - level.words.shape[1])), constant_values=-1)
        for level in found
    ]
    words = np.concatenate(padded)
    documents = np.concatenate([level.documents for level in found])
    occurrences = np.concatenate([level.occurrences for level in found])
    # Words are numbered by code point and a space sorts before every word character: this is the strings' order.
    order = np.lexsort(words.T[::-1]) if width > 1 else np.arange(len(words))
    order = order[documents[order] <= max_count]
    if max_features is not None and len(order) > max_features:
        # scikit-learn cuts among equally frequent terms by an unstable sort of float64: only the same sort agrees.
        most = (-occurrences[order].astype(np.float64)).argsort()[:max_features]
        order = order[np.sort(most)]
    return words[order], documents[order]


def _spell(words: pa.LargeStringArray, ids: np.ndarray) -> pa.LargeStringArray:
    """The strings (D,) of n-grams given as word ids (D, n) padded with −1."""
    columns = [words.take(pa.array(column, mask=column < 0)) for column in ids.T]
    if len(columns) == 1:
        return columns[0]
    return pc.binary_join_element_wise(*columns, pa.scalar(" ", pa.large_string()), null_handling="skip")


def _fit(source: Source, config: TfidfConfig) -> tuple[Tfidf, list[ray.ObjectRef]]:
    """Fit, and return the split texts of each block beside the result."""
    counts, splits = count_words(source, config.token_pattern, config.lowercase)
    if not len(counts.words):
        raise InputError("TF-IDF: no document has a word; check the texts and token_pattern")
    _refuse_spaces(counts.words, config)
    min_count = _count_of(config.min_df, counts.num_texts)
    max_count = _count_of(config.max_df, counts.num_texts)
    if max_count < min_count:
        raise InputError(
            f"min_df={config.min_df} asks for {min_count:g} documents or more and max_df={config.max_df} for "
            f"{max_count:g} or fewer, of {counts.num_texts}: nothing can be both"
        )
    frequent = np.flatnonzero(counts.documents >= min_count)
    words = counts.words.take(pa.array(frequent))
    first = _Ngrams(
        np.arange(len(frequent), dtype=np.int32)[:, None],
        counts.documents[frequent],
        counts.occurrences[frequent],
    )
    found = _count_longer(first, words, splits, config.ngram_max, min_count)[config.ngram_min - 1 :]
    ids, documents = _select(found, max_count, config.max_features)
    if not len(ids):
        raise InputError(
            f"TF-IDF: no term is left after min_df={config.min_df} and max_df={config.max_df} over "
            f"{counts.num_texts} documents; lower min_df or raise max_df"
        )
    return Tfidf(config, _spell(words, ids), documents, counts.num_texts), splits


def _count_of(limit: int | float, num_documents: int) -> float:
    """min_df or max_df as a number of documents; a share is not rounded."""
    return limit if isinstance(limit, numbers.Integral) else limit * num_documents


def _refuse_spaces(words: pa.LargeStringArray, config: TfidfConfig) -> None:
    """Words with spaces would make an n-gram's string ambiguous and its place in the order another one."""
    if config.ngram_max == 1 or config.token_pattern in RUNS:
        return
    spaced = words.filter(pc.match_substring_regex(words, r"[\x00-\x20]"))
    if len(spaced):
        raise InputError(
            f"token_pattern={config.token_pattern!r} finds {spaced[0].as_py()!r}: with ngram_max={config.ngram_max} "
            "words must not contain spaces or control characters"
        )


def fit(source: Source, config: TfidfConfig) -> Tfidf:
    """Learn terms and document frequencies from the texts of `source` on Ray, in one pass over them."""
    return _fit(source, config)[0]


def fit_transform(source: Source, config: TfidfConfig, out_dir: Path) -> Tfidf:
    """`fit`, then write the matrix of the same texts as `Tfidf.transform` does, without splitting them again."""
    tfidf, splits = _fit(source, config)
    _write_matrix(splits, tfidf, out_dir)
    return tfidf


# ---------------------------------------------------------------------------------------------- transform


@njit(cache=True, nogil=True)
def _vectorise(
    words: np.ndarray,
    offsets: np.ndarray,
    ngram_max: int,
    num_words: int,
    table: np.ndarray,
    positions: np.ndarray,
    features: np.ndarray,
    weights: np.ndarray,
    sublinear: bool,
    power: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """CSR rows (indptr, indices, data), unsorted, of texts given as word ids (−1: in no term).

    features (nodes,): column of a trie's node or −1; weights (D,): idf; power: norm 1 or 2, 0 for none.
    """
    indptr = np.zeros(len(offsets), np.int64)
    indices = np.empty(len(words) * ngram_max, np.int32)
    data = np.empty(len(words) * ngram_max, np.float32)
    counts = np.zeros(len(weights), np.int32)
    size = 0
    for text in range(len(offsets) - 1):
        begin, end = size, offsets[text + 1]
        for i in range(offsets[text], end):
            node = int(words[i])
            j = i + 1
            while node >= 0:
                feature = features[node]
                if feature >= 0:
                    if counts[feature] == 0:
                        indices[size] = feature
                        size += 1
                    counts[feature] += 1
                if j == end or j == i + ngram_max or words[j] < 0:
                    break
                key = node * num_words + words[j]
                slot = _slot(table, key)
                node = num_words + positions[slot] if table[slot] == key else -1
                j += 1
        total = 0.0
        for k in range(begin, size):
            feature = indices[k]
            count = np.float64(counts[feature])
            counts[feature] = 0
            value = (1.0 + np.log(count) if sublinear else count) * weights[feature]
            total += value if power == 1 else value * value
            data[k] = value
        if power > 0 and total > 0.0:
            scale = 1.0 / (total if power == 1 else np.sqrt(total))
            for k in range(begin, size):
                data[k] *= scale
        indptr[text + 1] = size
    return indptr, indices[:size].copy(), data[:size].copy()


class Tfidf:
    """A fitted TF-IDF: `terms` large_string (D,) in column order, `documents` int64 (D,) that have each.

    Transforming texts needs no Ray; transforming a corpus runs on it.
    """

    def __init__(
        self, config: TfidfConfig, terms: pa.LargeStringArray, documents: np.ndarray, num_documents: int
    ) -> None:
        self.config = config
        self.terms = terms
        self.documents = documents
        self.num_documents = num_documents
        self._words, self._trie, self._features = _build_trie(terms, config.ngram_max)

    @property
    def num_features(self) -> int:
        """D."""
        return len(self.terms)

    @property
    def idf(self) -> np.ndarray:
        """float64 (D,): ln(documents / documents with the term) + 1, or ones."""
        if not self.config.use_idf:
            return np.ones(len(self.terms))
        smooth = int(self.config.smooth_idf)
        return np.log((self.num_documents + smooth) / (self.documents + smooth)) + 1.0

    @cached_property
    def _word_ids(self) -> dict[str, int]:
        return {word: i for i, word in enumerate(self._words.to_pylist())}

    def __getstate__(self) -> dict[str, Any]:
        """To a Ray task go the arrays; each process makes its own dictionary."""
        return {key: value for key, value in self.__dict__.items() if key != "_word_ids"}

    def transform_texts(self, texts: Texts) -> sparse.csr_matrix:
        """Texts → float32 (N×D) with sorted indices."""
        split = split_words(texts, self.config.token_pattern, self.config.lowercase)
        return self._transform(split.words, split.sequences)

    def _transform(self, words: Sequence[str], sequences: Sequences) -> sparse.csr_matrix:
        known = np.fromiter((self._word_ids.get(word, -1) for word in words), np.int32, count=len(words))
        indptr, indices, data = _vectorise(
            known[sequences.values],
            sequences.offsets,
            self.config.ngram_max,
            self._trie.num_words,
            self._trie.table,
            self._trie.positions,
            self._features,
            self.idf,
            self.config.sublinear_tf,
            {"l1": 1, "l2": 2, None: 0}[self.config.norm],
        )
        matrix = sparse.csr_matrix((data, indices, indptr), shape=(len(sequences), self.num_features))
        matrix.sort_indices()
        return matrix

    def transform(self, source: Source, out_dir: Path) -> None:
        """Write the matrix of all texts of `source` on Ray, one file a shard; `load_matrix` reads it."""
        _write_matrix(text_blocks(source), self, out_dir)

    def save(self, directory: Path) -> None:
        """Write settings (JSON) and terms (Parquet) as a directory."""
        settings = {"version": _VERSION, "num_documents": self.num_documents, "settings": asdict(self.config)}
        with atomic_directory(Path(directory)) as temporary:
            pq.write_table(pa.table({"term": self.terms, "documents": self.documents}), temporary / _TERMS)
            (temporary / _SETTINGS).write_text(json.dumps(settings, indent=1) + "\n")

    @classmethod
    def load(cls, directory: Path) -> Tfidf:
        path = Path(directory) / _SETTINGS
        if not path.exists():
            raise InputError(f"{path}: no such file; {directory} is not a saved TF-IDF")
        saved = json.loads(path.read_text())
        if saved["version"] != _VERSION:
            raise InputError(
                f"{path}: version {saved['version']}, but this program reads {_VERSION}; fit it again"
            )
        table = pq.read_table(Path(directory) / _TERMS)
        terms = table["term"].cast(pa.large_string()).combine_chunks()
        return cls(
            TfidfConfig(**saved["settings"]), terms, table["documents"].to_numpy(), saved["num_documents"]
        )


def _build_trie(terms: pa.LargeStringArray, ngram_max: int) -> tuple[pa.LargeStringArray, _Trie, np.ndarray]:
    """The words of all terms (W,), the trie of the terms over them, and the column of each node or −1 (int32)."""
    if ngram_max == 1:  # a term is a word, even one with a space in it
        return terms, _Trie(len(terms), np.empty(0, np.int64)), np.arange(len(terms), dtype=np.int32)
    split = pc.split_pattern(terms, " ")
    lengths = pc.list_value_length(split).to_numpy()
    encoded = pc.list_flatten(split).dictionary_encode()
    words, flat = encoded.dictionary, encoded.indices.to_numpy()
    starts = np.cumsum(lengths) - lengths
    nodes = flat[starts].astype(np.int64)
    keys, features = [], [np.full(len(words), -1, np.int32)]
    features[0][nodes[lengths == 1]] = np.flatnonzero(lengths == 1)
    num_nodes = len(words)
    for length in range(2, ngram_max + 1):
        rows = np.flatnonzero(lengths >= length)
        level, inverse = np.unique(
            nodes[rows] * len(words) + flat[starts[rows] + length - 1], return_inverse=True
        )
        nodes[rows] = num_nodes + inverse
        ends = lengths[rows] == length
        columns = np.full(len(level), -1, np.int32)
        columns[inverse[ends]] = rows[ends]
        keys.append(level)
        features.append(columns)
        num_nodes += len(level)
    return words, _Trie(len(words), np.concatenate(keys)), np.concatenate(features)


# ---------------------------------------------------------------------------------------------- matrices on disk


@ray.remote
def _transform_block(block: Any, tfidf: Tfidf, path: Path) -> tuple[int, int]:
    """Write one part: `block` is a shard, an Arrow table, or (words, Sequences) that fit has split already."""
    if isinstance(block, tuple):
        words, sequences = block
        matrix = tfidf._transform(words.to_pylist(), sequences)
    else:
        matrix = tfidf.transform_texts(read_texts(block))
    save_file({"indptr": matrix.indptr, "indices": matrix.indices, "data": matrix.data}, path)
    return matrix.shape[0], matrix.nnz


def _write_matrix(blocks: Sequence[Any], tfidf: Tfidf, out_dir: Path) -> None:
    shared = ray.put(tfidf)
    with atomic_directory(Path(out_dir).resolve()) as temporary:
        names = [f"part-{i:05d}.safetensors" for i in range(len(blocks))]
        sizes = gather(
            [
                _transform_block.remote(block, shared, temporary / name)
                for block, name in zip(blocks, names, strict=True)
            ]
        )
        manifest = {
            "num_features": tfidf.num_features,
            "rows": sum(rows for rows, _ in sizes),
            "values": sum(values for _, values in sizes),
            "parts": [{"file": name, "rows": size[0]} for name, size in zip(names, sizes, strict=True)],
        }
        (temporary / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")


def load_matrix(directory: Path) -> sparse.csr_matrix:
    """The matrix that `Tfidf.transform` wrote: float32 (N×D), rows in corpus order."""
    manifest = read_manifest(directory)
    indptr = np.zeros(manifest["rows"] + 1, np.int64)
    indices = np.empty(manifest["values"], np.int32)
    data = np.empty(manifest["values"], np.float32)
    row = value = 0
    for part in manifest[
        "parts"
    ]:  # one part at a time: the whole matrix and one part is all the memory it takes
        arrays = load_file(Path(directory) / part["file"])
        rows, values = part["rows"], len(arrays["data"])
        indptr[row + 1 : row + rows + 1] = arrays["indptr"][1:].astype(np.int64) + value
        indices[value : value + values] = arrays["indices"]
        data[value : value + values] = arrays["data"]
        row, value = row + rows, value + values
    return sparse.csr_matrix((data, indices, indptr), shape=(manifest["rows"], manifest["num_features"]))
