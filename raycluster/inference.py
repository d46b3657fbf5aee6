"""Runs a network over many documents through Ray Data: actors that each hold it, rows in their order.

Documents are labelled by a model (`label_documents`), or turned into vectors that land on disk (`write_vectors`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import ray
import ray.data
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from xmc.corpus.store import feature_matrix
from xmc.corpus.tokens import Sequences, read_manifest
from xmc.files import atomic_file
from xmc.labels.topk import TopK
from xmc.progress import Progress

# What an actor with a network reserves.
_ACTOR_CPUS = 0.5

# token ids of n documents → named arrays with n rows each
Network = Callable[[Sequences], dict[str, np.ndarray]]
# The same, from named arrays of the documents that another network made.
NextNetwork = Callable[[Sequences, dict[str, np.ndarray]], dict[str, np.ndarray]]


class _Labeller:
    """One actor: adds the columns label_ids and scores to a batch with `text`, or with features of its own."""

    def __init__(self, model: str, k: int, num_features: int | None, threads: int) -> None:
        import torch

        from xmc.model import load

        torch.set_num_threads(threads)
        self._model, self._k, self._num_features = load(model), k, num_features

    def __call__(self, batch: pa.Table) -> pa.Table:
        if self._num_features is None:
            top = self._model.top_k(batch.column("text").to_pylist(), self._k)
            kept = batch.drop_columns(["text"])
        else:
            top = self._model.top_k_of_features(feature_matrix(batch, self._num_features), self._k)
            kept = batch.drop_columns(["feature_ids", "feature_values"])
        return kept.append_column("label_ids", _lists(top.label_ids)).append_column(
            "scores", _lists(top.scores)
        )


def _lists(array: Any) -> pa.Array:
    return pa.FixedSizeListArray.from_arrays(pa.array(array.reshape(-1)), array.shape[1])


def label_documents(
    model: Path,
    documents: ray.data.Dataset,
    k: int,
    *,
    num_features: int | None = None,
    batch_size: int = 512,
    actors: int | None = None,
) -> ray.data.Dataset:
    """`documents` without `text` and with label_ids and scores (each k a row, −1 / −inf padded), best first.

    With `num_features` it is the columns feature_ids and feature_values that are read and taken off.
    """
    arguments = {"model": str(model), "k": k, "num_features": num_features}
    return _on_actors(documents, _Labeller, arguments, batch_size, "pyarrow", actors)


def _on_actors(
    rows: ray.data.Dataset,
    actor: type,
    arguments: dict[str, Any],
    batch_size: int,
    batch_format: str,
    actors: int | None = None,
) -> ray.data.Dataset:
    """`rows` mapped by `actors`, each with its share of all threads."""
    count = actors or default_actors()
    resources = ray.cluster_resources()
    threads = max(1, int(resources.get("CPU", 1) / count))
    return rows.map_batches(
        actor,
        fn_constructor_kwargs=arguments | {"threads": threads},
        batch_format=batch_format,
        batch_size=batch_size,
        compute=ray.data.ActorPoolStrategy(size=count),
        num_cpus=_ACTOR_CPUS,
        num_gpus=1 if int(resources.get("GPU", 0)) else 0,
    )


def default_actors() -> int:
    """One a GPU, or where there is none one a node."""
    nodes = sum(1 for node in ray.nodes() if node["Alive"])
    return int(ray.cluster_resources().get("GPU", 0)) or nodes


def reserved_cpus() -> float:
    """What labelling documents takes beside the tasks that read them."""
    return _ACTOR_CPUS * default_actors()


def to_top_k(table: pa.Table, k: int) -> TopK:
    """The predictions of a table that `label_documents` made."""
    flatten = lambda name: table.column(name).combine_chunks().flatten().to_numpy(zero_copy_only=False)  # noqa: E731
    return TopK(
        flatten("label_ids").astype("int32").reshape(-1, k),
        flatten("scores").astype("float32").reshape(-1, k),
    )


# ------------------------------------------------------------------------------------------------ vectors

# Documents of one file of vectors: what is lost at most when the stage is killed.
_PIECE = 4096


class _Embedder:
    """One actor: writes the vectors of pieces of token files."""

    def __init__(self, make: Callable[[], Network | NextNetwork], before: Path | None, threads: int) -> None:
        import torch

        torch.set_num_threads(threads)
        self._network: Callable[..., dict[str, np.ndarray]] = make()
        self._before = before

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        for tokens, start, stop, out in zip(
            batch["tokens"], batch["start"], batch["stop"], batch["out"], strict=True
        ):
            column = pq.read_table(tokens, columns=["input_ids"]).column(0).slice(start, stop - start)
            known = () if self._before is None else (load_file(self._before / Path(out).name),)
            arrays = self._network(Sequences.from_arrow(column), *known)
            with atomic_file(Path(out)) as temporary:
                save_file(arrays, temporary)
        return {"documents": batch["stop"] - batch["start"]}


def write_vectors(
    tokens: Path,
    make: Callable[[], Network | NextNetwork],
    out: Path,
    title: str,
    before: Path | None = None,
) -> None:
    """What `make()`, called in each actor, gives for all sequences of the directory `tokens`: safetensors files in
    `out` that `read_vectors` joins. Files that are there already are kept, so a killed stage goes on. The network of a
    `NextNetwork` is given what this function left in `before` for the same tokens.
    """
    manifest = read_manifest(tokens)
    pieces = [
        {
            "tokens": str(tokens / part["file"]),
            "start": start,
            "stop": min(start + _PIECE, part["rows"]),
            "out": str(out / f"{Path(part['file']).stem}-{start:09d}.safetensors"),
        }
        for part in manifest["parts"]
        for start in range(0, part["rows"], _PIECE)
    ]
    out.mkdir(parents=True, exist_ok=True)
    missing = [piece for piece in pieces if not Path(piece["out"]).exists()]
    if not missing:
        return
    rows = ray.data.from_items(missing, override_num_blocks=len(missing))
    with Progress(title, sum(p["stop"] - p["start"] for p in missing), "documents") as progress:
        done = _on_actors(rows, _Embedder, {"make": make, "before": before}, 1, "numpy")
        for batch in done.iter_batches(batch_size=None, batch_format="numpy"):
            progress.update(int(batch["documents"].sum()))


def read_vectors(directory: Path, part: int = 0, of_parts: int = 1) -> dict[str, np.ndarray]:
    """The arrays that `write_vectors` left, each of all documents in the order of the corpus; or of one of so many
    contiguous parts of them, as Ray Data gives its ranks."""
    files = [safe_open(path, "numpy") for path in sorted(directory.glob("*.safetensors"))]
    names = list(files[0].keys())
    ends = np.cumsum([0, *(file.get_slice(names[0]).get_shape()[0] for file in files)])
    first, last = int(ends[-1]) * part // of_parts, int(ends[-1]) * (part + 1) // of_parts
    # Each file's own rows of the part; of a part without documents the first file's none.
    slices = [
        (file, slice(max(first - begin, 0), min(last, end) - begin))
        for file, begin, end in zip(files, ends[:-1].tolist(), ends[1:].tolist(), strict=True)
        if begin < last and end > first
    ] or [(files[0], slice(0, 0))]
    return {name: np.concatenate([file.get_slice(name)[rows] for file, rows in slices]) for name in names}
