"""Stages of teacher knowledge: vectors of documents and of label descriptions, neighbours, and the documents' scopes.

All of it is Ray tasks over shards; files that are there already are kept, so a killed stage goes on. What a model needs
to look up a new text in the same way is left in the directories, for `Teacher.load`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import ray
import scipy.sparse as sp
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from raycluster.inference import Network, read_vectors, write_vectors
from raycluster.stages import Stage
from xmc.corpus.store import Corpus
from xmc.corpus.tokens import Encoder, Sequences, gather, read_manifest, write_sequences
from xmc.errors import InputError
from xmc.files import atomic_file, atomic_write_text
from xmc.labels.hierarchy import Hierarchy
from xmc.labels.neighbours import NeighbourConfig, NeighbourIndex, recall, search_shards
from xmc.labels.teacher import (
    ScopeConfig,
    Teacher,
    build_scopes,
    common_groups,
    sequence_keys,
    shard_path,
    shard_paths,
)
from xmc.systems.shared_stages import load_clusters, open_corpus
from xmc.systems.vectors import VECTORS

# Columns of the documents' scopes, which a training batch carries.
NODES, WEIGHTS = "scope_nodes", "scope_weights"
RECALL_FILE, EMBEDDER = "recall.json", "embedder"
# Pieces of vectors that one search task takes on at most: it reads every shard of the index once for them.
_PIECES_A_TASK = 8


@dataclass(frozen=True)
class TeacherConfig:
    neighbours: NeighbourConfig = field(default_factory=lambda: NeighbourConfig(index="ivf"))
    scope: ScopeConfig = field(default_factory=ScopeConfig)
    # What stands above a label: the label file's parents; clusters of labels; none. auto: parents where there are any,
    # else clusters.
    hierarchy: Literal["auto", "parents", "clusters", "none"] = "auto"
    # Words of a label's description that are read, from its beginning.
    label_words: int = 16
    # Training documents of one shard of the index: bounds the memory of a task to some four times their vectors.
    shard_rows: int = 200_000
    # Training documents on which the index is compared with exact search; each costs as many products as train is long.
    recall_queries: int = 256

    def __post_init__(self) -> None:
        for key in ("label_words", "shard_rows", "recall_queries"):
            if getattr(self, key) < 1:
                raise InputError(f"teacher.{key} is {getattr(self, key)}; it must be at least 1")
        if self.neighbours.seed != NeighbourConfig().seed:
            raise InputError("teacher.neighbours.seed follows from seed: set that")


# Makes the encoder of texts to ids, and in an actor the network from ids to vectors, from the stages' directories.
MakeEncoder = Callable[[Mapping[str, Path]], Encoder]
MakeNetwork = Callable[[Mapping[str, Path]], Network]


def vectors_stage(
    make: MakeNetwork,
    save: Callable[[Mapping[str, Path], Path], None],
    settings: Mapping[str, Any],
    inputs: tuple[str, ...],
) -> Stage:
    """Vectors of the training and validation documents, by which neighbours are found, from the stage `tokens`.

    `save(inputs, directory)` keeps the network that makes them.
    """

    def run(out: Path, given: Mapping[str, Path]) -> None:
        resolved = {key: path.resolve() for key, path in given.items()}
        for split in _splits(resolved["tokens"]):
            write_vectors(
                resolved["tokens"] / split,
                partial(make, resolved),
                out.resolve() / split,
                f"vectors of {split}",
            )
        save(resolved, out / EMBEDDER)

    return Stage("vectors", settings, run, inputs, resumes=True)


# ------------------------------------------------------------------------------------------------ nodes


def hierarchy_kind(config: TeacherConfig, corpus: Corpus) -> str:
    """What `auto` means for a corpus."""
    if config.hierarchy != "auto":
        return config.hierarchy
    parents = corpus.labels.parents[: corpus.num_labels]
    return "parents" if parents.null_count < len(parents) else "clusters"


def nodes_stage(
    config: TeacherConfig,
    kind: str,
    encoder: MakeEncoder,
    make: MakeNetwork,
    settings: Mapping[str, Any],
    inputs: tuple[str, ...],
) -> Stage:
    """The hierarchy's nodes (names, parents) and a vector each: the mean of its description, or of its labels'."""

    def run(out: Path, given: Mapping[str, Path]) -> None:
        resolved = {key: path.resolve() for key, path in given.items()}
        corpus = open_corpus(resolved)
        hierarchy = _hierarchy(kind, corpus, resolved)
        save_file({"parent": hierarchy.parent}, out / "parent.safetensors")
        pq.write_table(pa.table({"name": hierarchy.names}), out / "names.parquet")
        texts = _descriptions(kind, hierarchy, corpus, config.label_words)
        pq.write_table(pa.table({"text": texts}), out / "texts.parquet")
        write_sequences([out / "texts.parquet"], encoder(resolved), out.resolve() / "tokens")
        pieces = out.resolve() / "vectors"
        write_vectors(out.resolve() / "tokens", partial(make, resolved), pieces, "vectors of labels")
        if kind == "clusters":
            _add_means(hierarchy, pieces)

    own = {"kind": kind, "label_words": config.label_words}
    return Stage("nodes", {**settings, **own}, run, inputs, resumes=True)


def _hierarchy(kind: str, corpus: Corpus, given: Mapping[str, Path]) -> Hierarchy:
    labels, num_labels = corpus.labels, corpus.num_labels
    if kind == "parents":
        return Hierarchy.from_parents(labels.names, labels.parents, num_labels)
    if kind == "clusters":
        clusters = load_clusters(given["clusters"] / "clusters.safetensors")
        return Hierarchy.from_clusters(labels.names[:num_labels], clusters.cluster_of)
    nobody = pa.nulls(num_labels, pa.string())
    return Hierarchy.from_parents(labels.names[:num_labels], nobody, num_labels)


def _descriptions(kind: str, hierarchy: Hierarchy, corpus: Corpus, num_words: int) -> pa.Array:
    """The first words of what describes each node; clusters have no description."""
    labels = corpus.labels
    if kind == "parents":
        # Parents without a row of their own are described by their names.
        texts = pa.concat_arrays([labels.texts, hierarchy.names[len(labels.texts) :]])
    else:
        texts = labels.texts[: corpus.num_labels]
    words = pc.utf8_split_whitespace(pc.utf8_trim_whitespace(texts), max_splits=num_words)
    return pc.binary_join(pc.list_slice(words, 0, num_words), " ")


def _add_means(hierarchy: Hierarchy, pieces: Path) -> None:
    """One more piece: of each cluster the mean of its labels' vectors."""
    piece = pieces / "part-00001-clusters.safetensors"
    piece.unlink(missing_ok=True)
    vectors = read_vectors(pieces)[VECTORS]
    rows = hierarchy.parent[: hierarchy.num_labels] - hierarchy.num_labels
    shape = (hierarchy.num_nodes - hierarchy.num_labels, hierarchy.num_labels)
    members = sp.csr_matrix((np.ones(len(rows), np.float32), (rows, np.arange(len(rows)))), shape=shape)
    means = (members @ vectors) / np.maximum(np.bincount(rows, minlength=shape[0]), 1)[:, None]
    with atomic_file(piece) as temporary:
        save_file({VECTORS: means.astype(np.float32)}, temporary)


def node_pieces(nodes: Path) -> Iterator[tuple[int, np.ndarray]]:
    """(first node, vectors) piece by piece of the stage `nodes`."""
    first = 0
    for path in sorted((nodes / "vectors").glob("*.safetensors")):
        vectors = load_file(path)[VECTORS]
        yield first, vectors
        first += len(vectors)


def num_nodes(nodes: Path) -> int:
    """V of the stage `nodes`."""
    return pq.read_metadata(nodes / "names.parquet").num_rows


# ------------------------------------------------------------------------------------------------ neighbours


def neighbours_stage(config: TeacherConfig, seed: int) -> Stage:
    """The index of train in shards, each document's neighbours, and the recall of the index."""

    def run(out: Path, given: Mapping[str, Path]) -> None:
        resolved = {key: path.resolve() for key, path in given.items()}
        groups = training_groups(open_corpus(resolved), resolved["tokens"])
        seeded = replace(config.neighbours, seed=seed)
        find_neighbours(resolved["vectors"], groups, seeded, config.shard_rows, out.resolve())
        found = measure_recall(resolved["vectors"] / "train", groups, out.resolve(), config, seed)
        atomic_write_text(out / RECALL_FILE, json.dumps(found))
        print(
            f"  recall@{config.neighbours.num_neighbours} of the {config.neighbours.index} index is "
            f"{found['recall']:.3f} on {found['queries']} documents, against exact search",
            flush=True,
        )

    settings = {
        "neighbours": asdict(config.neighbours),
        "shard_rows": config.shard_rows,
        "recall_queries": config.recall_queries,
        "seed": seed,
    }
    return Stage("neighbours", settings, run, ("corpus", "tokens", "vectors"), resumes=True)


def training_groups(corpus: Corpus, tokens: Path) -> np.ndarray:
    """(N,) training documents of one number may not teach each other: those that read the same, and those of one group
    (which no split divides), as new texts have nobody of their own group to ask."""
    parts = read_manifest(tokens / "train")["parts"]
    keys = np.concatenate(gather([_keys_of.remote(tokens / "train" / part["file"]) for part in parts]))
    names = corpus.groups("train")
    encoded = names.combine_chunks().dictionary_encode(null_encoding="mask").indices
    # A document without a group is alone.
    alone = np.arange(len(names)) + len(names)
    codes = np.where(encoded.is_null().to_numpy(zero_copy_only=False), alone, encoded.fill_null(0).to_numpy())
    return common_groups(keys, codes)


@ray.remote
def _keys_of(tokens: Path) -> np.ndarray:
    sequences = Sequences.from_arrow(pq.read_table(tokens, columns=["input_ids"]).column(0))
    return sequence_keys(sequences.values, sequences.offsets)


def find_neighbours(
    vectors: Path, groups: np.ndarray, config: NeighbourConfig, shard_rows: int, out: Path
) -> None:
    """Index vectors/train in shards below `out`, and leave each document's neighbours in `out`/found, piece by piece.

    groups: (N,) of train; the other splits of `vectors` look up without exclusion.
    """
    build, search = ray.remote(num_cpus=1)(_build_shard), ray.remote(num_cpus=1)(_search_pieces)
    given = ray.put(groups)
    runs = list(_runs(list_pieces(vectors / "train"), shard_rows))
    todo = [(number, run) for number, run in enumerate(runs) if not shard_path(out, number).exists()]
    gather([build.remote(run, given, config, shard_path(out, number)) for number, run in todo])
    tasks = []
    for split in _splits(vectors):
        (out / "found" / split).mkdir(parents=True, exist_ok=True)
        exclude = given if split == "train" else None
        missing = [
            piece for piece in list_pieces(vectors / split) if not found_path(out, split, piece[0]).exists()
        ]
        cpus = int(ray.cluster_resources().get("CPU", 1))
        step = min(max(len(missing) // (2 * cpus), 1), _PIECES_A_TASK)
        for start in range(0, len(missing), step):
            tasks.append(search.remote(missing[start : start + step], out, split, exclude))
    gather(tasks)


# A file of vectors: path, first row of the split, last + 1.
Piece = tuple[Path, int, int]


def list_pieces(vectors: Path) -> list[Piece]:
    """The files of a split's vectors in the order of their rows."""
    pieces, first = [], 0
    for path in sorted(vectors.glob("*.safetensors")):
        with safe_open(path, framework="np") as file:
            rows = file.get_slice(VECTORS).get_shape()[0]
        pieces.append((path, first, first + rows))
        first += rows
    return pieces


def _runs(pieces: Sequence[Piece], shard_rows: int) -> Iterator[list[Piece]]:
    """Consecutive pieces of at most `shard_rows` rows together (or one larger piece)."""
    run: list[Piece] = []
    for piece in pieces:
        if run and piece[2] - run[0][1] > shard_rows:
            yield run
            run = []
        run.append(piece)
    if run:
        yield run


def load_pieces(pieces: Sequence[Piece]) -> np.ndarray:
    """(n × d) the vectors of consecutive pieces."""
    return np.concatenate([load_file(path)[VECTORS] for path, _, _ in pieces])


def _build_shard(pieces: list[Piece], groups: np.ndarray, config: NeighbourConfig, out: Path) -> None:
    NeighbourIndex.build(load_pieces(pieces), config, groups[pieces[0][1] : pieces[-1][2]]).save(out)


def _search_pieces(pieces: list[Piece], out: Path, split: str, groups: np.ndarray | None) -> None:
    exclude = (
        np.concatenate([groups[start:stop] for _, start, stop in pieces]) if groups is not None else None
    )
    # One shard in memory at a time.
    shards = (NeighbourIndex.load(path) for path in shard_paths(out))
    ids, similarities = search_shards(shards, load_pieces(pieces), exclude)
    row = 0
    for path, start, stop in pieces:
        part = slice(row, row + stop - start)
        with atomic_file(found_path(out, split, path)) as temporary:
            save_file({"ids": ids[part], "similarities": similarities[part]}, temporary)
        row = part.stop


def found_path(neighbours: Path, split: str, piece: Path) -> Path:
    """Where the neighbours of a piece's documents are: ids (n, k) and similarities (n, k)."""
    return neighbours / "found" / split / piece.name


def measure_recall(
    vectors: Path, groups: np.ndarray, out: Path, config: TeacherConfig, seed: int
) -> dict[str, float]:
    """The share of exact neighbours that were found, on some of the training documents."""
    pieces = list_pieces(vectors)
    count = min(config.recall_queries, pieces[-1][2])
    rows = np.sort(np.random.default_rng(seed).choice(pieces[-1][2], count, replace=False))
    exact = ray.remote(num_cpus=1)(_search_exactly)
    asked = np.concatenate([load_file(p)[VECTORS][rows[(rows >= a) & (rows < b)] - a] for p, a, b in pieces])
    found = np.concatenate(
        [
            load_file(found_path(out, "train", p))["ids"][rows[(rows >= a) & (rows < b)] - a]
            for p, a, b in pieces
        ]
    )
    runs = list(_runs(pieces, config.shard_rows))
    k = config.neighbours.num_neighbours
    (wanted,) = gather([exact.remote(runs, groups, asked, groups[rows], k)])
    return {"recall": recall(found, wanted), "queries": count}


def _search_exactly(
    runs: list[list[Piece]], groups: np.ndarray, asked: np.ndarray, exclude: np.ndarray, k: int
) -> np.ndarray:
    """(Q, k) ids of the true neighbours."""
    config = NeighbourConfig(num_neighbours=k)
    shards = (NeighbourIndex.build(load_pieces(run), config, groups[run[0][1] : run[-1][2]]) for run in runs)
    return search_shards(shards, asked, exclude)[0]


# ------------------------------------------------------------------------------------------------ scopes


def scopes_stage(config: ScopeConfig) -> Stage:
    """The scopes of training and validation documents, row for row as in `tokens`, and the teacher's own files."""

    def run(out: Path, given: Mapping[str, Path]) -> None:
        resolved = {key: path.resolve() for key, path in given.items()}
        corpus, nodes = open_corpus(resolved), resolved["nodes"]
        labels = corpus.label_matrix("train")
        parent = load_file(nodes / "parent.safetensors")["parent"]
        names = pq.read_table(nodes / "names.parquet").column("name").combine_chunks()
        ids = corpus.ids("train").combine_chunks()
        Teacher((), labels, parent, config, ids, names).save(out / "teacher")
        task, shared = ray.remote(num_cpus=1)(_write_scopes), ray.put((labels, parent))
        tasks = []
        for split in _splits(resolved["tokens"]):
            (out / split).mkdir()
            for part in read_manifest(resolved["tokens"] / split)["parts"]:
                stem = Path(part["file"]).stem
                found = sorted((resolved["neighbours"] / "found" / split).glob(f"{stem}-*.safetensors"))
                tasks.append(task.remote(found, shared, config, out.resolve() / split / part["file"]))
        gather(tasks)

    return Stage("scopes", asdict(config), run, ("corpus", "tokens", "nodes", "neighbours"))


def _write_scopes(
    found: list[Path], shared: tuple[sp.csr_matrix, np.ndarray], config: ScopeConfig, path: Path
) -> None:
    parts = [load_file(file) for file in found]
    ids, similarities = (np.concatenate([part[key] for part in parts]) for key in ("ids", "similarities"))
    scopes = build_scopes(ids, similarities, *shared, config)
    offsets = pa.array(scopes.offsets.astype(np.int32))
    columns = {
        NODES: pa.ListArray.from_arrays(offsets, pa.array(scopes.nodes)),
        WEIGHTS: pa.ListArray.from_arrays(offsets, pa.array(scopes.weights)),
    }
    pq.write_table(pa.table(columns), path)


def _splits(directory: Path) -> list[str]:
    """Of train and valid, those that a directory of tokens or vectors has."""
    return [split for split in ("train", "valid") if (directory / split).is_dir()]
