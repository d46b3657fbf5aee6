"""Words of texts as integers: splitting, counting over a corpus on Ray, and the vocabulary of the word-vector systems.

TF-IDF counts its words with the same code. Sub-words and word vectors are not here.
"""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import ray
from numba import njit

from xmc.corpus.tokens import Sequences, Source, Texts, gather, read_texts, text_blocks, vocabulary_hash
from xmc.errors import InputError
from xmc.files import atomic_file

# Patterns that mean "runs of at least so many word characters": those are split by a compiled kernel, any other
# pattern by `re`, ten times slower. The first is scikit-learn's default.
RUNS = {r"(?u)\b\w\w+\b": 2, r"\b\w\w+\b": 2, r"(?u)\b\w+\b": 1, r"\b\w+\b": 1, r"\w+": 1}
_CHARS_AT_ONCE = 1 << 23  # 32 MB of code points: bounds the memory of splitting a large shard
_NUM_CODE_POINTS = 0x110000

PAD_ID = 0
UNKNOWN_ID = 1


# ---------------------------------------------------------------------------------------------- splitting


@dataclass(frozen=True)
class WordSequences:
    """N texts as words: `words` are the W distinct ones, `sequences` holds indices into them, text by text."""

    words: list[str]
    sequences: Sequences


def split_words(texts: Texts, pattern: str, lowercase: bool) -> WordSequences:
    """Split texts into words exactly as `re.findall(pattern, text.lower())` does."""
    texts = texts.to_pylist() if isinstance(texts, pa.Array | pa.ChunkedArray) else list(texts)
    if lowercase:
        texts = [text.lower() for text in texts]
    if pattern not in RUNS:
        return _split_by_pattern(texts, re.compile(pattern))
    chunks = [_split_runs(chunk, RUNS[pattern]) for chunk in _chunks(texts)]
    return chunks[0] if len(chunks) == 1 else _join(chunks)


def _chunks(texts: list[str]) -> Iterator[list[str]]:
    """Consecutive texts with at most _CHARS_AT_ONCE characters together (or one longer text)."""
    ends = np.cumsum([len(text) for text in texts])
    start = 0
    while start == 0 or start < len(texts):
        before = ends[start - 1] if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, before + _CHARS_AT_ONCE, side="right")))
        yield texts[start:stop]
        start = stop


def _join(chunks: Sequence[WordSequences]) -> WordSequences:
    """One vocabulary for several chunks."""
    ids: defaultdict[str, int] = defaultdict(lambda: len(ids))
    values, lengths = [], []
    for chunk in chunks:
        mapped = np.fromiter((ids[word] for word in chunk.words), np.int32, count=len(chunk.words))
        values.append(mapped[chunk.sequences.values])
        lengths.append(chunk.sequences.lengths)
    return WordSequences(list(ids), Sequences(np.concatenate(values), _offsets(np.concatenate(lengths))))


def _split_by_pattern(texts: list[str], pattern: re.Pattern[str]) -> WordSequences:
    ids: defaultdict[str, int] = defaultdict(lambda: len(ids))
    rows = [[ids[word] for word in pattern.findall(text)] for text in texts]
    return WordSequences(list(ids), Sequences.from_lists(rows))


def _split_runs(texts: list[str], min_chars: int) -> WordSequences:
    chars = np.frombuffer("".join(texts).encode("utf-32-le", "surrogatepass"), np.uint32)
    char_offsets = _offsets(np.fromiter(map(len, texts), np.int64, count=len(texts)))
    values, offsets, starts, sizes = _runs(chars, char_offsets, _is_word_char(), min_chars)
    # Each distinct word becomes a string once, however often it occurs.
    ends = np.cumsum(sizes)
    begins = ends - sizes
    positions = np.repeat(starts - begins, sizes) + np.arange(ends[-1] if len(ends) else 0)
    together = chars[positions].tobytes().decode("utf-32-le", "surrogatepass")
    words = [together[begin:end] for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)]
    return WordSequences(words, Sequences(values, offsets))


def _offsets(lengths: np.ndarray) -> np.ndarray:
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


@functools.cache
def _is_word_char() -> np.ndarray:
    r"""bool (code points,): what `\w` matches, asked of `re` itself."""
    text = np.arange(_NUM_CODE_POINTS, dtype="<u4").tobytes().decode("utf-32-le", "surrogatepass")
    table = np.zeros(_NUM_CODE_POINTS, np.bool_)
    for run in re.finditer(r"\w+", text):
        table[run.start() : run.end()] = True
    return table


@njit(cache=True, nogil=True)
def _runs(
    chars: np.ndarray, char_offsets: np.ndarray, is_word: np.ndarray, min_chars: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Find the runs of word characters in each text and number the distinct ones by first occurrence.

    Returns values int32 (T,), offsets int64 (N+1,), and each distinct word's first position and size in `chars`.
    """
    num_texts = len(char_offsets) - 1
    offsets = np.zeros(num_texts + 1, np.int64)
    num_runs = 0
    for text in range(num_texts):  # count first: the arrays below then fit exactly
        i, end = char_offsets[text], char_offsets[text + 1]
        while i < end:
            if not is_word[chars[i]]:
                i += 1
                continue
            start = i
            while i < end and is_word[chars[i]]:
                i += 1
            num_runs += i - start >= min_chars
        offsets[text + 1] = num_runs

    capacity = 16
    while capacity < 2 * num_runs:
        capacity *= 2
    slots = np.full(capacity, -1, np.int32)
    hashes = np.empty(num_runs, np.uint64)
    starts = np.empty(num_runs, np.int64)
    sizes = np.empty(num_runs, np.int64)
    values = np.empty(num_runs, np.int32)
    num_words = 0
    run = 0
    for text in range(num_texts):
        i, end = char_offsets[text], char_offsets[text + 1]
        while i < end:
            if not is_word[chars[i]]:
                i += 1
                continue
            start = i
            code = np.uint64(14695981039346656037)
            while i < end and is_word[chars[i]]:
                code = (code ^ np.uint64(chars[i])) * np.uint64(1099511628211)
                i += 1
            size = i - start
            if size < min_chars:
                continue
            slot = np.int64((code ^ (code >> np.uint64(32))) & np.uint64(capacity - 1))
            while True:
                word = slots[slot]
                if word < 0:
                    word = num_words
                    slots[slot] = word
                    hashes[word], starts[word], sizes[word] = code, start, size
                    num_words += 1
                    break
                if hashes[word] == code and sizes[word] == size:
                    first = starts[word]
                    same = True
                    for j in range(size):
                        if chars[first + j] != chars[start + j]:
                            same = False
                            break
                    if same:
                        break
                slot = (slot + 1) & (capacity - 1)
            values[run] = word
            run += 1
    return values, offsets, starts[:num_words].copy(), sizes[:num_words].copy()


@njit(cache=True, nogil=True)
def count_values(values: np.ndarray, offsets: np.ndarray, num_words: int) -> tuple[np.ndarray, np.ndarray]:
    """Of each value below num_words: the texts that have it, and its occurrences; int64 (W,) each."""
    documents = np.zeros(num_words, np.int64)
    occurrences = np.zeros(num_words, np.int64)
    last = np.full(num_words, -1, np.int64)
    for text in range(len(offsets) - 1):
        for i in range(offsets[text], offsets[text + 1]):
            word = values[i]
            occurrences[word] += 1
            if last[word] != text:
                last[word] = text
                documents[word] += 1
    return documents, occurrences


# ---------------------------------------------------------------------------------------------- counting on Ray


@dataclass(frozen=True)
class WordCounts:
    """The distinct words of a corpus by code point: `words` large_string (W,), document and occurrence counts (W,)."""

    words: pa.LargeStringArray
    documents: np.ndarray
    occurrences: np.ndarray
    num_texts: int


@ray.remote(num_returns=2)
def _count_block(block: Path | pa.Table, pattern: str, lowercase: bool) -> tuple[Any, Any]:
    split = split_words(read_texts(block), pattern, lowercase)
    documents, occurrences = count_values(split.sequences.values, split.sequences.offsets, len(split.words))
    words = pa.array(split.words, pa.large_string())
    table = pa.table({"word": words, "documents": documents, "occurrences": occurrences})
    return (table, len(split.sequences)), (words, split.sequences)


def count_words(source: Source, pattern: str, lowercase: bool) -> tuple[WordCounts, list[ray.ObjectRef]]:
    """Count the words of a corpus, block by block on Ray.

    Also returns, per block, a reference to (its words, its Sequences over them), so that who needs the texts again
    need not split them again; Ray moves them to disk when memory is short, and drops them with the reference.
    """
    refs = [_count_block.remote(block, pattern, lowercase) for block in text_blocks(source)]
    merged, pending, num_texts = _EMPTY_COUNTS, [], 0
    for counted, _ in refs:
        ((table, rows),) = gather([counted])
        num_texts += rows
        pending.append(table)
        # Merging whenever the new words outnumber the known ones keeps the driver at twice the vocabulary.
        if sum(map(len, pending)) > len(merged):
            merged, pending = _merge([merged, *pending]), []
    merged = _merge([merged, *pending]).sort_by("word")  # by UTF-8 bytes, which is by code point
    counts = WordCounts(
        merged["word"].combine_chunks(),
        merged["documents"].to_numpy(),
        merged["occurrences"].to_numpy(),
        num_texts,
    )
    return counts, [split for _, split in refs]


_EMPTY_COUNTS = pa.table(
    {
        "word": pa.array([], pa.large_string()),
        "documents": pa.array([], pa.int64()),
        "occurrences": pa.array([], pa.int64()),
    }
)


def _merge(tables: Sequence[pa.Table]) -> pa.Table:
    grouped = (
        pa.concat_tables(tables).group_by("word").aggregate([("documents", "sum"), ("occurrences", "sum")])
    )
    return grouped.select(["word", "documents_sum", "occurrences_sum"]).rename_columns(
        _EMPTY_COUNTS.column_names
    )


# ---------------------------------------------------------------------------------------------- vocabulary


@dataclass(frozen=True)
class WordsConfig:
    # Most ids of the vocabulary, with padding (0) and the unknown word (1); the most frequent words are kept.
    vocabulary_size: int = 500_000
    # Words of a document that are kept, from its beginning.
    max_words: int = 500

    def __post_init__(self) -> None:
        if self.vocabulary_size < 3:
            raise InputError(
                f"vocabulary_size={self.vocabulary_size}: must be at least 3 (padding, unknown, a word)"
            )
        if self.max_words < 1:
            raise InputError(f"max_words={self.max_words}: must be at least 1")


WORD_PATTERN = r"\w+"


class Vocabulary:
    """Lower-cased words by falling frequency; ids: 0 padding, 1 unknown, then the words.

    It is an encoder: `tokens.write_sequences(source, vocabulary, out_dir)` encodes a whole corpus.
    """

    pad_id = PAD_ID

    def __init__(self, words: Sequence[str], config: WordsConfig) -> None:
        self.words = list(words)
        self.config = config
        self._ids = {word: i for i, word in enumerate(self.words, start=UNKNOWN_ID + 1)}

    def __len__(self) -> int:
        """Number of ids: rows of a table of word vectors."""
        return len(self.words) + UNKNOWN_ID + 1

    def encode_texts(self, texts: Texts) -> Sequences:
        """N texts → N sequences of 1 to max_words ids; a text without words is one unknown word."""
        split = split_words(texts, WORD_PATTERN, lowercase=True)
        ids = np.fromiter(
            (self._ids.get(word, UNKNOWN_ID) for word in split.words), np.int32, count=len(split.words)
        )
        lengths = np.minimum(split.sequences.lengths, self.config.max_words)
        starts = split.sequences.offsets[:-1]
        offsets = _offsets(np.maximum(lengths, 1))
        values = np.full(offsets[-1], UNKNOWN_ID, np.int32)
        # Position of every kept word in the split texts, and where it goes: alike but for cut and empty texts.
        within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        values[np.repeat(offsets[:-1], lengths) + within] = ids[
            split.sequences.values[np.repeat(starts, lengths) + within]
        ]
        return Sequences(values, offsets)

    def describe(self) -> dict[str, Any]:
        return {
            "settings": asdict(self.config),
            "vocabulary_size": len(self),
            "vocabulary_hash": vocabulary_hash(self.words),
            "padding_side": "right",
        }

    def save(self, path: Path) -> None:
        """Write one Parquet file: the words in id order, the settings in its metadata."""
        settings = {f"xmc.{key}": str(value) for key, value in asdict(self.config).items()}
        table = pa.table({"word": pa.array(self.words, pa.large_string())}).replace_schema_metadata(settings)
        with atomic_file(Path(path)) as temporary:
            pq.write_table(table, temporary)

    @classmethod
    def load(cls, path: Path) -> Vocabulary:
        if not Path(path).exists():
            raise InputError(f"{path}: no such vocabulary; fit one first")
        table = pq.read_table(path)
        metadata = {key.decode(): value.decode() for key, value in (table.schema.metadata or {}).items()}
        try:
            config = WordsConfig(int(metadata["xmc.vocabulary_size"]), int(metadata["xmc.max_words"]))
            return cls(table["word"].to_pylist(), config)
        except KeyError as error:
            raise InputError(f"{path}: not a vocabulary of words ({error} is missing)") from None


def fit_vocabulary(source: Source, config: WordsConfig) -> Vocabulary:
    """The most frequent words of a corpus, counted on Ray; equally frequent ones by code point."""
    counts, _ = count_words(source, WORD_PATTERN, lowercase=True)
    kept = np.argsort(-counts.occurrences, kind="stable")[: config.vocabulary_size - UNKNOWN_ID - 1]
    return Vocabulary(counts.words.take(pa.array(kept)).to_pylist(), config)
