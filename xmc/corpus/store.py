"""A built corpus on disk: opens it, checks that it is whole, and hands out its parts. Builds nothing."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import ray.data
import scipy.sparse as sp

from xmc.corpus.ordered import ordered_data
from xmc.corpus.rows import flat
from xmc.errors import InputError

FORMAT_VERSION = 2
MANIFEST = "manifest.json"
LABEL_FILE = "labels.parquet"


@dataclass(frozen=True)
class LabelTable:
    """Labels by position: the first `num_labels` are those of train, the position being the label id; the rest
    (labels that train never saw, inner nodes) serve the hierarchy only."""

    table: pa.Table
    num_labels: int

    @property
    def names(self) -> pa.Array:
        return self._column("name")

    @property
    def texts(self) -> pa.Array:
        """What describes the label; its name where the input said nothing more."""
        return self._column("text")

    @property
    def parents(self) -> pa.Array:
        """The parent's name, null for none."""
        return self._column("parent")

    @cached_property
    def parent_ids(self) -> np.ndarray:
        """Position of each row's parent in this table, −1 for none: (rows,) int64."""
        return pc.fill_null(pc.index_in(self.parents, self.names), -1).to_numpy().astype(np.int64)

    @property
    def train_frequency(self) -> np.ndarray:
        """Documents of train (with validation) that have the label: (rows,) int64."""
        return self._column("train_frequency").to_numpy()

    def _column(self, name: str) -> pa.Array:
        column = self.table[name].combine_chunks()
        return column if isinstance(column, pa.Array) else pa.concat_arrays(column.chunks)


@dataclass(frozen=True)
class Corpus:
    """A corpus directory. N documents of a split, L labels, D features."""

    path: Path
    manifest: dict[str, Any]

    @classmethod
    def open(cls, path: str | Path) -> Corpus:
        """Open a finished corpus; an InputError says what is missing or damaged."""
        path = Path(path)
        corpus = cls(path, read_manifest(path))
        missing = [file for file in corpus._files() if not file.is_file()]
        if missing:
            raise InputError(f"{missing[0]}: missing, though the manifest lists it; build the corpus again")
        return corpus

    def _files(self) -> list[Path]:
        return [self.path / LABEL_FILE, *(shard for split in self.splits for shard in self.shards(split))]

    @property
    def num_labels(self) -> int:
        return self.manifest["num_labels"]

    @property
    def num_features(self) -> int | None:
        """D where documents come with sparse features, else None."""
        return self.manifest["num_features"]

    @property
    def splits(self) -> list[str]:
        return list(self.manifest["splits"])

    @cached_property
    def labels(self) -> LabelTable:
        return LabelTable(_read(self.path / LABEL_FILE), self.num_labels)

    def num_documents(self, split: str) -> int:
        return self._split(split)["documents"]

    def shards(self, split: str) -> list[Path]:
        """The Parquet files in the order of their documents."""
        return [self.path / split / shard["name"] for shard in self._split(split)["shards"]]

    def dataset(self, split: str, columns: list[str] | None = None) -> ray.data.Dataset:
        """The split as a Ray dataset, in order."""
        with ordered_data():
            return ray.data.read_parquet(
                [str(shard.resolve()) for shard in self.shards(split)], columns=columns
            )

    def ids(self, split: str) -> pa.ChunkedArray:
        """(N,) string."""
        return self._read_columns(split, "id")["id"]

    def groups(self, split: str) -> pa.ChunkedArray:
        """(N,) string, null for documents that belong to none. A split made by the build divides no group."""
        return self._read_columns(split, "group")["group"]

    def texts(self, split: str) -> pa.ChunkedArray:
        """(N,) string, null where the input has features only."""
        return self._read_columns(split, "text")["text"]

    @cached_property
    def has_text(self) -> bool:
        """Whether training documents come with text; else they have features only."""
        first = self.shards("train")[:1]
        return any(_read(shard, ["text"])["text"].null_count < 1 for shard in first)

    def num_unseen(self, split: str) -> np.ndarray:
        """Labels of each document that train never saw: (N,) int32."""
        return self._read_columns(split, "num_unseen")["num_unseen"].to_numpy()

    def label_matrix(self, split: str) -> sp.csr_matrix:
        """(N × L) float32 of ones."""
        indices, lengths = flat(self._read_columns(split, "label_ids")["label_ids"])
        return _csr(np.ones(len(indices), dtype=np.float32), indices.to_numpy(), lengths, self.num_labels)

    def features(self, split: str) -> sp.csr_matrix:
        """(N × D) float32."""
        if self.num_features is None:
            raise InputError(
                f"{self.path}: documents have text and no features; make them with xmc.corpus.tfidf"
            )
        return feature_matrix(self._read_columns(split, "feature_ids", "feature_values"), self.num_features)

    def _split(self, split: str) -> dict[str, Any]:
        try:
            return self.manifest["splits"][split]
        except KeyError:
            raise InputError(f"{self.path}: no split {split!r}; there are {', '.join(self.splits)}") from None

    def _read_columns(self, split: str, *columns: str) -> pa.Table:
        return pa.concat_tables([_read(shard, list(columns)) for shard in self.shards(split)])


def feature_matrix(table: pa.Table, num_features: int) -> sp.csr_matrix:
    """(N × D) float32 of the columns feature_ids and feature_values."""
    indices, lengths = flat(table["feature_ids"])
    values, _ = flat(table["feature_values"])
    return _csr(values.to_numpy(), indices.to_numpy(), lengths, num_features)


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a corpus directory, of a version that this program reads."""
    file = path / MANIFEST
    try:
        manifest = json.loads(file.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(
            f"{path}: no corpus there ({MANIFEST} is missing); build one: python -m xmc.corpus INPUT -o {path}"
        ) from None
    except ValueError as error:
        raise InputError(f"{file}: damaged ({error}); build the corpus again") from None
    if not isinstance(manifest, dict) or manifest.get("format_version") != FORMAT_VERSION:
        raise InputError(f"{file}: not a corpus of format version {FORMAT_VERSION}; build the corpus again")
    return manifest


def _read(path: Path, columns: list[str] | None = None) -> pa.Table:
    try:
        # Not through the dataset machinery, which would read meaning into directory names.
        return pq.ParquetFile(path).read(columns)
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{path}: damaged or missing ({error}); build the corpus again") from None


def _csr(data: np.ndarray, indices: np.ndarray, lengths: np.ndarray, width: int) -> sp.csr_matrix:
    indptr = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=indptr[1:])
    # scipy wants one index type for both: 64 bits only where there are so many entries.
    kind = np.int32 if indptr[-1] < np.iinfo(np.int32).max else np.int64
    matrix = sp.csr_matrix((data, indices.astype(kind), indptr.astype(kind)), shape=(len(lengths), width))
    matrix.has_sorted_indices = bool(width)
    return matrix
