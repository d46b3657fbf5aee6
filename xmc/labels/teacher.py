"""Teacher knowledge: the labels that a text's nearest training texts have, and where those stand in the hierarchy.

That list is the text's semantic scope: a prior that is its own, where a clustering gives all texts the same. It is
looked up the same way for training documents and for new texts, but that a training document's own labels must not
reach it: its group says whom it may not ask. Where vectors come from is the caller's business; no network is here.

Choices that the paper (Wang et al. 2022) leaves open, with their alternatives:
- A label of a neighbour is in the scope whether it has a parent or not; the paper's Algorithm 1 would leave out labels
  without one, its text would not.
- The paper's set has no order and no bound. Here every node has votes: the similarities of the neighbours that have it
  (or a label below it). The `max_nodes` with most votes stay, strongest first, or by id as the paper's loop goes
  (`order`); a node's share of all votes is its weight.
- Parents alone, as the paper argues, or more levels or none (`levels_up`).
- The paper also asks validation texts; here train alone is asked, so that validation tells what new texts will meet.
- A label's description is its text in the label file, or its name; the paper makes up words for labels without any,
  from their documents' features as Parabel does.

Legend: N training documents, Q queries, L labels, V nodes of the hierarchy (the first L are the labels), k neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import scipy.sparse as sp
from numba import njit, prange
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file
from scipy.sparse.csgraph import connected_components

from xmc.errors import InputError
from xmc.labels.hierarchy import NO_PARENT
from xmc.labels.neighbours import NO_NEIGHBOUR, NeighbourIndex, search_shards

# A neighbour at a right angle, or beyond, still has a small vote.
_LEAST_VOTE = 1e-3


@dataclass(frozen=True)
class ScopeConfig:
    # Nodes (labels and their ancestors) of a text at most. Each costs about as much as a word of the text.
    max_nodes: int = 32
    # Levels above a label that come with it: 1, its parent (the paper); 0, none.
    levels_up: int = 1
    # votes: the nodes that most neighbours have come first; id: by label id.
    order: Literal["votes", "id"] = "votes"

    def __post_init__(self) -> None:
        if self.max_nodes < 1:
            raise InputError(f"scope.max_nodes is {self.max_nodes}; a scope needs at least one")
        if self.levels_up < 0:
            raise InputError(f"scope.levels_up is {self.levels_up}; it must not be negative")


@dataclass(frozen=True)
class Scopes:
    """Q lists of nodes with weights in (0, 1]: those of text i lie at offsets[i] : offsets[i+1] of both arrays (n,)."""

    nodes: NDArray[np.int32]
    weights: NDArray[np.float32]
    offsets: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.offsets) - 1


@dataclass(frozen=True)
class Knowledge:
    """What was read for Q texts: neighbours (Q, k) as rows of train, −1 padding; similarities (Q, k); scopes."""

    neighbours: NDArray[np.int64]
    similarities: NDArray[np.float32]
    scopes: Scopes


@dataclass(frozen=True)
class Teacher:
    """Training documents that can be asked: their index in shards of consecutive rows, labels (N × L) and hierarchy."""

    shards: tuple[NeighbourIndex, ...]
    labels: sp.csr_matrix
    parent: NDArray[np.int32]
    """(V,) each node's parent, −1 for none."""
    config: ScopeConfig
    document_ids: pa.Array
    """(N,) string."""
    node_names: pa.Array
    """(V,) string."""

    def look_up(self, vectors: NDArray[np.float32], exclude: NDArray | None = None) -> Knowledge:
        """What is known of texts with these vectors (Q, d). exclude: (Q,) the group that a training document is of."""
        neighbours, similarities = search_shards(self.shards, vectors, exclude)
        scopes = build_scopes(neighbours, similarities, self.labels, self.parent, self.config)
        return Knowledge(neighbours, similarities, scopes)

    def save(self, path: Path) -> None:
        """Write all but the shards, which `path`/index holds already or `NeighbourIndex.save` puts there."""
        path.mkdir(parents=True, exist_ok=True)
        arrays = {
            "indptr": self.labels.indptr.astype(np.int64),
            "indices": self.labels.indices.astype(np.int32),
        }
        save_file(arrays | {"parent": self.parent}, path / "labels.safetensors")
        pq.write_table(pa.table({"id": self.document_ids}), path / "documents.parquet")
        pq.write_table(pa.table({"name": self.node_names}), path / "nodes.parquet")

    @classmethod
    def load(cls, path: Path, config: ScopeConfig, num_labels: int) -> Teacher:
        try:
            arrays = load_file(path / "labels.safetensors")
            document_ids = pq.read_table(path / "documents.parquet").column("id").combine_chunks()
            node_names = pq.read_table(path / "nodes.parquet").column("name").combine_chunks()
        except (OSError, ValueError) as error:
            raise InputError(f"{path}: no teacher knowledge ({error}); train the model again") from error
        ones = np.ones(len(arrays["indices"]), np.float32)
        shape = (len(document_ids), num_labels)
        labels = sp.csr_matrix((ones, arrays["indices"], arrays["indptr"]), shape=shape)
        shards = tuple(NeighbourIndex.load(shard) for shard in shard_paths(path))
        return cls(shards, labels, arrays["parent"], config, document_ids, node_names)


def shard_path(path: Path, number: int) -> Path:
    """Where a teacher's directory has the index of a run of rows."""
    return path / "index" / f"part-{number:05d}"


def shard_paths(path: Path) -> list[Path]:
    """All of them, in the order of their rows."""
    return sorted((path / "index").glob("part-*"))


# --- whom not to ask ------------------------------------------------------------------------------------------------


def sequence_keys(values: NDArray[np.int32], offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    """(N,) a 63-bit hash of each id sequence values[offsets[i]:offsets[i+1]]: texts that read the same have the same.

    Vectors would not do: the same text differs in its last bits with the batch in which it was encoded.
    """
    return _hash_sequences(values, offsets)


def common_groups(*keys: NDArray[np.int64]) -> NDArray[np.int64]:
    """(N,) the same number for documents that share one of their keys (each (N,)), directly or through others."""
    num_documents = len(keys[0])
    columns, first = [], num_documents
    for key in keys:
        values, codes = np.unique(key, return_inverse=True)
        columns.append(codes + first)
        first += len(values)
    rows = np.tile(np.arange(num_documents), len(keys))
    edges = sp.coo_matrix(
        (np.ones(len(rows), np.int8), (rows, np.concatenate(columns))), shape=(first, first)
    )
    return connected_components(edges, directed=False)[1][:num_documents].astype(np.int64)


@njit(parallel=True, cache=True, nogil=True)
def _hash_sequences(values: NDArray, offsets: NDArray) -> NDArray:
    keys = np.empty(len(offsets) - 1, np.int64)
    for i in prange(len(keys)):
        key = np.uint64(0x9E3779B97F4A7C15) ^ np.uint64(offsets[i + 1] - offsets[i])
        for at in range(offsets[i], offsets[i + 1]):
            # splitmix64's mixing of the state and the next id
            key = key + np.uint64(0x9E3779B97F4A7C15) + np.uint64(np.int64(values[at]))
            key = (key ^ (key >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            key = (key ^ (key >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            key = key ^ (key >> np.uint64(31))
        keys[i] = np.int64(key >> np.uint64(1))
    return keys


# --- scopes ---------------------------------------------------------------------------------------------------------


def build_scopes(
    neighbours: NDArray[np.int64],
    similarities: NDArray[np.float32],
    labels: sp.csr_matrix,
    parent: NDArray[np.int32],
    config: ScopeConfig,
) -> Scopes:
    """The scopes of Q texts from their neighbours (Q, k; −1 padding) with cosines (Q, k), which have `labels` (N × L).

    A neighbour votes once for each node that it has: its labels, and `levels_up` ancestors of each.
    """
    nodes, weights, counts = _vote(
        neighbours,
        similarities,
        labels.indptr,
        labels.indices,
        parent,
        config.levels_up,
        config.max_nodes,
        config.order == "id",
    )
    kept = np.arange(config.max_nodes) < counts[:, None]
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    return Scopes(nodes[kept], weights[kept], offsets)


@njit(parallel=True, cache=True, nogil=True)
def _vote(
    neighbours: NDArray,
    similarities: NDArray,
    indptr: NDArray,
    indices: NDArray,
    parent: NDArray,
    levels_up: int,
    most: int,
    by_id: bool,
) -> tuple[NDArray, NDArray, NDArray]:
    """Nodes (Q, most), weights (Q, most) and how many there are (Q,)."""
    num_queries, k = neighbours.shape
    nodes_Qm = np.zeros((num_queries, most), np.int32)
    weights_Qm = np.zeros((num_queries, most), np.float32)
    counts = np.zeros(num_queries, np.int64)
    for i in prange(num_queries):
        room = 0
        total = 0.0
        for j in range(k):
            n = neighbours[i, j]
            if n != NO_NEIGHBOUR:
                room += (indptr[n + 1] - indptr[n]) * (levels_up + 1)
                total += max(float(similarities[i, j]), _LEAST_VOTE)
        # One key a vote, (node, neighbour): sorted, votes for a node stand together and repeated ones are neighbours.
        keys = np.empty(room, np.int64)
        count = 0
        for j in range(k):
            n = neighbours[i, j]
            if n == NO_NEIGHBOUR:
                continue
            for at in range(indptr[n], indptr[n + 1]):
                node = np.int64(indices[at])
                for _ in range(levels_up + 1):
                    keys[count] = node * k + j
                    count += 1
                    node = np.int64(parent[node])
                    if node == NO_PARENT:
                        break
        keys = np.sort(keys[:count])
        found = np.empty(count, np.int64)
        votes = np.empty(count, np.float64)
        num_found = 0
        for c in range(count):
            if c > 0 and keys[c] == keys[c - 1]:
                continue
            node = keys[c] // k
            vote = max(float(similarities[i, keys[c] % k]), _LEAST_VOTE)
            if num_found > 0 and found[num_found - 1] == node:
                votes[num_found - 1] += vote
            else:
                found[num_found] = node
                votes[num_found] = vote
                num_found += 1
        chosen = np.argsort(-votes[:num_found], kind="mergesort")[:most]
        if by_id:
            chosen = np.sort(chosen)
        counts[i] = len(chosen)
        for c in range(len(chosen)):
            nodes_Qm[i, c] = found[chosen[c]]
            weights_Qm[i, c] = votes[chosen[c]] / total
    return nodes_Qm, weights_Qm, counts
