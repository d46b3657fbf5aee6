"""Feeds a training group: Ray Data gives each rank its own rows, which it shuffles by seed and cuts into batches.

The order of an epoch depends on seed, epoch and number of ranks alone, so a resumed run sees the same batches. A
rank holds its share of the token ids in memory (4 bytes a token): that makes the shuffle a true one and leaves the
machine's cores to training. Legend: b documents of a batch, T its longest sequence.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import ray
import ray.data
import ray.train

from xmc.corpus.tokens import Sequences, pad_batch

# Documents of this many batches are sorted by length together: enough for batches of nearly equal lengths,
# few enough that an epoch stays well mixed.
_BATCHES_A_WINDOW = 64
_PREFETCHED = 4


@dataclass(frozen=True)
class Batch:
    """b documents: their places among the rank's rows (b,), input_ids and attention_mask int64 (b × T), their label ids
    as one ragged list, and what further lists a document has, by column: (b × longest), zeros behind."""

    rows: np.ndarray
    input_ids: np.ndarray
    attention_mask: np.ndarray
    label_ids: np.ndarray
    label_offsets: np.ndarray
    lists: Mapping[str, np.ndarray] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.input_ids)


@ray.remote
def _join(tokens: Path, documents: Path, lists: Path | None) -> pa.Table:
    """The rows of one shard: input_ids and label_ids, from the token file and the corpus file of the same rows, and the
    columns of a file of further lists."""
    table = pq.read_table(tokens, columns=["input_ids"])
    table = table.append_column("label_ids", pq.read_table(documents, columns=["label_ids"]).column(0))
    if lists is not None:
        further = pq.read_table(lists)
        for name in further.column_names:
            table = table.append_column(name, further.column(name))
    return table


def labelled_tokens(
    token_files: Sequence[Path], corpus_files: Sequence[Path], list_files: Sequence[Path] | None = None
) -> ray.data.Dataset:
    """A dataset of input_ids with label_ids, from row-aligned shards; with `list_files`, also of the columns of lists
    (numbers) that they hold."""
    lists = [None] * len(token_files) if list_files is None else list_files
    triples = zip(token_files, corpus_files, lists, strict=True)
    return ray.data.from_arrow_refs([_join.remote(*files) for files in triples])


def pad_lists(lists: Sequences, rows: np.ndarray) -> np.ndarray:
    """(n × longest) the lists of n rows with zeros behind them, at least one wide; whole numbers become int64."""
    starts, lengths = lists.offsets[rows], lists.lengths[rows]
    columns = np.arange(max(int(lengths.max(initial=0)), 1))
    kept = columns < lengths[:, None]
    whole = np.issubdtype(lists.values.dtype, np.integer)
    padded = np.zeros(kept.shape, np.int64 if whole else lists.values.dtype)
    padded[kept] = lists.values[(starts[:, None] + columns)[kept]]
    return padded


class SplitByRank(ray.train.DataConfig):
    """Gives rank r the r-th contiguous share of the rows. Ray Train's own streaming split gives rows to whoever asks
    first, which no second run repeats."""

    def configure(
        self,
        datasets: dict[str, Any],
        world_size: int,
        worker_handles: Any,
        worker_node_ids: Any,
        **kwargs: Any,
    ) -> list[dict[str, Any]]:
        output: list[dict[str, Any]] = [{} for _ in range(world_size)]
        for name, dataset in datasets.items():
            rows = dataset.count()
            bounds = [rows * rank // world_size for rank in range(1, world_size)]
            shares = dataset.split_at_indices(bounds) if bounds else [dataset]
            for rank, share in enumerate(shares):
                output[rank][name] = share.iterator()
        return output


class RankRows:
    """This rank's documents, and the batches of any epoch."""

    def __init__(
        self, table: pa.Table, batch_size: int, num_steps: int, seed: int, pad_id: int, padding_side: str
    ):
        """`num_steps` batches of at most `batch_size` make an epoch: the same number on every rank."""
        self._tokens = Sequences.from_arrow(table.column("input_ids"))
        self._labels = Sequences.from_arrow(table.column("label_ids"))
        known = ("input_ids", "label_ids")
        self._lists = {name: _lists(table.column(name)) for name in table.column_names if name not in known}
        self._lengths = self._tokens.lengths
        self._window = batch_size * _BATCHES_A_WINDOW
        self.num_steps = num_steps
        self._seed = seed
        self._pad_id, self._padding_side = pad_id, padding_side

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def labels(self) -> Sequences:
        """The label ids of each document."""
        return self._labels

    def epoch(self, epoch: int, first: int = 0) -> Iterator[Batch]:
        """The epoch's batches from number `first` on, prepared ahead by a thread."""
        plan = self.plan(epoch)
        ready: queue.Queue[Batch | BaseException | None] = queue.Queue(_PREFETCHED)
        stopped = threading.Event()

        def put(item: Batch | BaseException | None) -> None:
            while not stopped.is_set():
                with contextlib.suppress(queue.Full):
                    ready.put(item, timeout=0.1)
                    break

        def prepare() -> None:
            try:
                for rows in plan[first:]:
                    put(self._batch(rows))
                put(None)
            except BaseException as error:  # shown where the batch was wanted
                put(error)

        threading.Thread(target=prepare, daemon=True).start()
        try:
            while (item := ready.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            stopped.set()

    def by_length(self) -> Iterator[Batch]:
        """All documents once, as many batches as an epoch has, those of similar length together: less padding."""
        for rows in np.array_split(np.argsort(self._lengths, kind="stable"), self.num_steps):
            yield self._batch(rows)

    def plan(self, epoch: int) -> list[np.ndarray]:
        """The rows of each batch of an epoch: shuffled, then sorted by length within windows, batches shuffled.

        Batches at the same place are of similar length on every rank: all cut the same way and draw the same order.
        """
        own = np.random.default_rng([self._seed, epoch, 1 + len(self)])
        order = own.permutation(len(self))
        for start in range(0, len(order), self._window):
            window = order[start : start + self._window]
            window[:] = window[np.argsort(self._lengths[window], kind="stable")]
        batches = np.array_split(order, self.num_steps)
        common = np.random.default_rng([self._seed, epoch, 0])
        return [batches[i] for i in common.permutation(self.num_steps)]

    def _batch(self, rows: np.ndarray) -> Batch:
        input_ids, mask = pad_batch([self._tokens[row] for row in rows], self._pad_id, self._padding_side)
        labels = [self._labels[row] for row in rows]
        offsets = np.zeros(len(rows) + 1, np.int64)
        np.cumsum([len(ids) for ids in labels], out=offsets[1:])
        flat = np.concatenate(labels).astype(np.int64) if labels else np.zeros(0, np.int64)
        lists = {name: pad_lists(column, rows) for name, column in self._lists.items()}
        return Batch(rows, input_ids, mask, flat, offsets, lists)


def _lists(column: pa.ChunkedArray) -> Sequences:
    """The lists of a column, numbers as they are."""
    offsets = np.zeros(len(column) + 1, np.int64)
    np.cumsum(pc.list_value_length(column).to_numpy(), out=offsets[1:])
    return Sequences(pc.list_flatten(column).to_numpy(), offsets)


def rank_table(name: str) -> pa.Table:
    """All rows that Ray Data gives this rank of the dataset `name`."""
    shard = ray.train.get_dataset_shard(name)
    blocks = list(shard.iter_batches(batch_size=None, batch_format="pyarrow"))
    return pa.concat_tables(blocks) if blocks else pa.table({"input_ids": [], "label_ids": []})
