"""Nearest neighbours by cosine through faiss, leaving out a query's own document and its duplicates.

Builds, searches, measures and keeps one index; where the vectors come from is the caller's business.

Shapes: N indexed vectors, Q queries, d width, k neighbours.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import faiss
import numpy as np
from numba import njit, prange
from numpy.typing import NDArray

from xmc.errors import InputError
from xmc.files import atomic_directory

INDEXES = ("exact", "hnsw", "ivf")
NO_NEIGHBOUR = -1
NO_GROUP = -1
# Entries of one answer of the index, so that queries from large groups do not fill the memory.
_LARGEST_ANSWER = 2**24


@dataclass(frozen=True)
class NeighbourConfig:
    """Which index is built and how hard it looks."""

    # Neighbours a query.
    num_neighbours: int = 10
    # exact: N comparisons a query, fine up to some 100,000 vectors. ivf: builds fast, reads about √N · probes / 4
    # vectors a query, some recall lost. hnsw: its search grows least with N, but one thread builds it, slowly.
    index: str = "exact"
    # hnsw: links a vector (memory), and how many candidates are kept while building and while searching (time).
    hnsw_links: int = 32
    hnsw_build_candidates: int = 100
    hnsw_search_candidates: int = 128
    # ivf: number of lists (None: 4 √N), and how many of them a query reads; more reads, more recall.
    ivf_lists: int | None = None
    ivf_probes: int = 32
    # Seed of ivf's clustering and of hnsw's levels.
    seed: int = 0

    def __post_init__(self) -> None:
        if self.index not in INDEXES:
            raise InputError(f"neighbours.index is {self.index!r}; choose one of {', '.join(INDEXES)}")
        for name in (
            "num_neighbours",
            "hnsw_links",
            "hnsw_build_candidates",
            "hnsw_search_candidates",
            "ivf_lists",
            "ivf_probes",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"neighbours.{name} is {value}; it must be at least 1")


class NeighbourIndex:
    """An index of N vectors, each in a group; a search can leave out one group a query.

    Groups are how a document is kept from being its own neighbour, or its duplicate's: give duplicates one group.

    Example:
        groups = duplicate_groups(vectors)
        index = NeighbourIndex.build(vectors, NeighbourConfig(num_neighbours=5), groups)
        ids, similarities = index.search(vectors, exclude=groups)
    """

    def __init__(
        self, index: Any, groups: NDArray[np.int64], vector_of: NDArray[np.int64], config: NeighbourConfig
    ) -> None:
        """index: faiss' index of the U distinct vectors; groups: (N,); vector_of: (N,) each row's distinct vector."""
        self.config = config
        self.groups = groups
        self._index = index
        self._vector_of = vector_of
        # Each distinct vector's rows, rising.
        self._members = np.argsort(vector_of, kind="stable")
        self._member_indptr = np.concatenate([[0], np.cumsum(np.bincount(vector_of))])

    @classmethod
    def build(
        cls, vectors: NDArray[np.float32], config: NeighbourConfig, groups: NDArray | None = None
    ) -> NeighbourIndex:
        """Index vectors (N, d). groups: (N,) numbers ≥ 0; without them every vector is a group of its own, by its row.

        The result depends on the seed alone: hnsw, whose graph depends on the order of insertion, is built by one
        thread; ivf and exact use all.
        """
        unit_Nd = _normalised(vectors)
        num_vectors = len(unit_Nd)
        if not num_vectors:
            raise InputError("there are no vectors to index; a neighbour search needs at least one document")
        group_N = np.arange(num_vectors) if groups is None else np.asarray(groups, np.int64)
        if group_N.shape != (num_vectors,) or group_N.min() < 0:
            raise ValueError(f"groups must be {num_vectors} numbers of at least 0, one a vector")
        # Copies of one vector link only to each other in a graph and cut it apart: the index holds each vector once.
        vector_of, first_rows = _distinct(unit_Nd)
        unit_Ud = unit_Nd if len(first_rows) == num_vectors else unit_Nd[first_rows]
        index = _empty_index(len(unit_Ud), unit_Ud.shape[1], config)
        with _threads(1 if config.index == "hnsw" else None):
            if not index.is_trained:
                index.train(unit_Ud)
            index.add(unit_Ud)
        return cls(index, group_N, vector_of, config)

    def __len__(self) -> int:
        return len(self.groups)

    def search(
        self, queries: NDArray[np.float32], exclude: NDArray | None = None
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Ids (Q, k) and cosines (Q, k) of the nearest, best first, ties by id; −1 and −inf where there are fewer.

        exclude: (Q,) the group to leave out for each query, −1 for none.
        """
        unit_Qd = _normalised(queries)
        k = self.config.num_neighbours
        exclude_Q = np.full(len(unit_Qd), NO_GROUP) if exclude is None else np.asarray(exclude, np.int64)
        ids_Qk = np.full((len(unit_Qd), k), NO_NEIGHBOUR, np.int64)
        similarities_Qk = np.full((len(unit_Qd), k), -np.inf, np.float32)
        needed_Q = k + self._sizes_of(exclude_Q)
        open_rows = np.arange(len(unit_Qd))
        asked = (
            k + 1
        )  # enough where the excluded group is one vector; only queries from larger groups ask again
        while open_rows.size:
            asked = min(asked, self._index.ntotal)
            for rows in np.array_split(open_rows, math.ceil(open_rows.size * asked / _LARGEST_ANSWER)):
                ids_Qk[rows], similarities_Qk[rows] = self._search(unit_Qd[rows], exclude_Q[rows], asked)
            full = ids_Qk[open_rows, -1] != NO_NEIGHBOUR
            exhausted = np.minimum(needed_Q[open_rows], self._index.ntotal) <= asked
            open_rows = open_rows[~(full | exhausted)]
            asked *= 2
        return ids_Qk, similarities_Qk

    def _search(
        self, unit_Qd: NDArray[np.float32], exclude_Q: NDArray[np.int64], asked: int
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """(Q, k) ids and cosines from the `asked` nearest distinct vectors."""
        similarities, found = self._index.search(unit_Qd, asked)
        order = np.lexsort((found, -similarities), axis=1)
        return _expand(
            np.take_along_axis(found, order, axis=1),
            np.take_along_axis(similarities, order, axis=1),
            self._member_indptr,
            self._members,
            self.groups,
            exclude_Q,
            self.config.num_neighbours,
        )

    def save(self, path: Path) -> None:
        """Write a directory: index.faiss, groups.npy, vector_of.npy, config.json."""
        with atomic_directory(path) as directory:
            faiss.write_index(self._index, str(directory / "index.faiss"))
            np.save(directory / "groups.npy", self.groups)
            np.save(directory / "vector_of.npy", self._vector_of)
            (directory / "config.json").write_text(json.dumps(asdict(self.config), indent=2) + "\n")

    @classmethod
    def load(cls, path: Path) -> NeighbourIndex:
        try:
            config = NeighbourConfig(**json.loads((path / "config.json").read_text()))
            groups = np.load(path / "groups.npy", allow_pickle=False)
            vector_of = np.load(path / "vector_of.npy", allow_pickle=False)
            return cls(faiss.read_index(str(path / "index.faiss")), groups, vector_of, config)
        except (OSError, RuntimeError, TypeError, json.JSONDecodeError) as error:
            raise InputError(f"{path}: no neighbour index ({error}); build it again") from None

    @cached_property
    def _group_sizes(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The groups, rising, and how many rows each has."""
        known, counts = np.unique(self.groups, return_counts=True)
        return known, counts

    def _sizes_of(self, groups: NDArray[np.int64]) -> NDArray[np.int64]:
        """How many indexed rows each of these groups has."""
        known, counts = self._group_sizes
        at = np.minimum(np.searchsorted(known, groups), len(known) - 1)
        return np.where(known[at] == groups, counts[at], 0)


def search_shards(
    shards: Iterable[NeighbourIndex], queries: NDArray[np.float32], exclude: NDArray | None = None
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """`NeighbourIndex.search` over indexes of consecutive runs of rows: ids count through all of them.

    A generator that loads one index at a time bounds the memory by the largest.
    """
    first, found = 0, []
    for shard in shards:
        ids_Qk, similarities_Qk = shard.search(queries, exclude)
        found.append((np.where(ids_Qk == NO_NEIGHBOUR, NO_NEIGHBOUR, ids_Qk + first), similarities_Qk))
        found = [_best_of(found, shard.config.num_neighbours)]
        first += len(shard)
    return found[0]


def _best_of(
    found: list[tuple[NDArray[np.int64], NDArray[np.float32]]], k: int
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """The k best (Q, k) of several answers for the same queries, ties by id."""
    ids, similarities = (np.concatenate(part, axis=1) for part in zip(*found, strict=True))
    order = np.lexsort((ids, -similarities), axis=1)[:, :k]
    return np.take_along_axis(ids, order, axis=1), np.take_along_axis(similarities, order, axis=1)


def duplicate_groups(vectors: NDArray[np.float32]) -> NDArray[np.int64]:
    """(N,) the same number for vectors (N, d) that are equal to the bit."""
    return _distinct(vectors)[0]


def recall(found: NDArray[np.int64], exact: NDArray[np.int64]) -> float:
    """Share of the exact neighbours (Q, k) that are among the found ones (Q, k); padding counts nowhere."""
    stride = max(int(found.max(initial=0)), int(exact.max(initial=0))) + 1
    base = np.arange(len(found), dtype=np.int64)[:, None] * stride
    wanted = (exact + base)[exact != NO_NEIGHBOUR]
    return float(np.isin(wanted, (found + base)[found != NO_NEIGHBOUR]).mean()) if wanted.size else 1.0


def measure_recall(
    index: NeighbourIndex,
    vectors: NDArray[np.float32],
    queries: NDArray[np.float32],
    exclude: NDArray | None = None,
) -> float:
    """Recall@k of an index of these vectors (N, d) against exact search, on queries (Q, d). Costs Q × N comparisons."""
    exact_config = NeighbourConfig(num_neighbours=index.config.num_neighbours)
    exact = NeighbourIndex.build(vectors, exact_config, index.groups)
    return recall(index.search(queries, exclude)[0], exact.search(queries, exclude)[0])


def _normalised(vectors: NDArray) -> NDArray[np.float32]:
    """A float32 copy (N, d) of unit rows, so that inner products are cosines; zero rows stay zero."""
    if vectors.ndim != 2:
        raise ValueError(f"vectors must be (N, d), not {vectors.shape}")
    unit_Nd = np.array(vectors, np.float32, order="C")
    if not np.isfinite(unit_Nd).all():
        raise InputError("a vector has a value that is not finite; the encoder that made it diverged")
    faiss.normalize_L2(unit_Nd)
    return unit_Nd


def _distinct(vectors: NDArray) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(N,) each row's distinct vector, and the first row of each; numbered by first appearance."""
    rows = np.ascontiguousarray(vectors) + 0.0  # −0 becomes 0
    keys = rows.view(np.dtype((np.void, rows.dtype.itemsize * rows.shape[1]))).ravel()
    _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
    order = np.argsort(first)
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    return rank[inverse], first[order]


def _empty_index(num_vectors: int, width: int, config: NeighbourConfig) -> Any:
    index: Any
    if config.index == "exact":
        return faiss.IndexFlatIP(width)
    if config.index == "hnsw":
        index = faiss.IndexHNSWFlat(width, config.hnsw_links, faiss.METRIC_INNER_PRODUCT)
        index.hnsw.efConstruction = config.hnsw_build_candidates
        index.hnsw.efSearch = config.hnsw_search_candidates
        index.hnsw.rng = faiss.RandomGenerator(config.seed)  # type: ignore[attr-defined]
        return index
    num_lists = min(config.ivf_lists or math.ceil(4 * math.sqrt(num_vectors)), num_vectors)
    index = faiss.IndexIVFFlat(faiss.IndexFlatIP(width), width, num_lists, faiss.METRIC_INNER_PRODUCT)
    index.cp.seed = config.seed
    index.cp.min_points_per_centroid = 1  # few vectors are no mistake here
    index.nprobe = min(config.ivf_probes, num_lists)
    return index


@njit(parallel=True, cache=True, nogil=True)
def _expand(
    found_Qa: NDArray,
    similarities_Qa: NDArray,
    member_indptr: NDArray,
    members: NDArray,
    groups: NDArray,
    exclude_Q: NDArray,
    k: int,
) -> tuple[NDArray, NDArray]:
    """The first k rows behind each query's found vectors that are not of its excluded group, padded."""
    num_queries, asked = found_Qa.shape
    ids_Qk = np.full((num_queries, k), NO_NEIGHBOUR, np.int64)
    out_Qk = np.full((num_queries, k), -np.inf, np.float32)
    for i in prange(num_queries):
        count = 0
        for j in range(asked):
            vector = found_Qa[i, j]
            if vector < 0:
                continue
            for at in range(member_indptr[vector], member_indptr[vector + 1]):
                if count == k:
                    break
                if groups[members[at]] != exclude_Q[i]:
                    ids_Qk[i, count] = members[at]
                    out_Qk[i, count] = similarities_Qa[i, j]
                    count += 1
    return ids_Qk, out_Qk


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    """Give faiss so many threads for a while; None leaves it as it is."""
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(count or before)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(before)
