"""Labels many documents through Ray Data: actors that each hold the model, rows in their order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import ray
import ray.data

from xmc.labels.topk import TopK


class _Labeller:
    """One actor: adds the columns label_ids and scores to a batch with `text`."""

    def __init__(self, model: str, k: int, threads: int) -> None:
        import torch

        from xmc.model import load

        torch.set_num_threads(threads)
        self._model, self._k = load(model), k

    def __call__(self, batch: pa.Table) -> pa.Table:
        top = self._model.top_k(batch.column("text").to_pylist(), self._k)
        kept = batch.drop_columns(["text"])
        return kept.append_column("label_ids", _lists(top.label_ids)).append_column(
            "scores", _lists(top.scores)
        )


def _lists(array: Any) -> pa.Array:
    return pa.FixedSizeListArray.from_arrays(pa.array(array.reshape(-1)), array.shape[1])


def label_documents(
    model: Path, documents: ray.data.Dataset, k: int, batch_size: int = 512, actors: int | None = None
) -> ray.data.Dataset:
    """`documents` without `text` and with label_ids and scores (each k a row, −1 / −inf padded), best first."""
    resources = ray.cluster_resources()
    gpus = int(resources.get("GPU", 0))
    nodes = sum(1 for node in ray.nodes() if node["Alive"])
    count = actors or gpus or nodes
    threads = max(1, int(resources.get("CPU", 1) / count))
    return documents.map_batches(
        _Labeller,
        fn_constructor_kwargs={"model": str(model), "k": k, "threads": threads},
        batch_format="pyarrow",
        batch_size=batch_size,
        compute=ray.data.ActorPoolStrategy(size=count),
        num_cpus=0.5,
        num_gpus=1 if gpus else 0,
    )


def to_top_k(table: pa.Table, k: int) -> TopK:
    """The predictions of a table that `label_documents` made."""
    flatten = lambda name: table.column(name).combine_chunks().flatten().to_numpy(zero_copy_only=False)  # noqa: E731
    return TopK(
        flatten("label_ids").astype("int32").reshape(-1, k),
        flatten("scores").astype("float32").reshape(-1, k),
    )
