"""Builds a corpus: an input of any known format becomes Parquet shards, a label table and a manifest, through
Ray Data and in the input's order. The directory appears whole or not at all."""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import importlib.metadata
import itertools
import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import ray
from ray.data import Datasink, Datasource, ReadTask
from ray.data.block import BlockMetadata

from raycluster import session
from xmc.corpus.bad_rows import MOST_LISTED, BadRow, BadRows, kind_of, quarantine_line
from xmc.corpus.label_table import check_label_rows, make_label_table, merge_counts
from xmc.corpus.ordered import ordered_data
from xmc.corpus.readers import find_reader
from xmc.corpus.readers.source import Chunk, Source
from xmc.corpus.rows import LINE_BITS, SPLIT_OF_PART, TEST, VALID_OF_TRAIN, finish, flat, lists, quote_row
from xmc.corpus.settings import CorpusConfig
from xmc.corpus.store import FORMAT_VERSION, LABEL_FILE, MANIFEST, Corpus, read_manifest
from xmc.errors import InputError
from xmc.files import atomic_directory

Report = Callable[[str], None]

QUARANTINE = "quarantine.jsonl"
_LOCK = ".building"
_STALE_SECONDS = 3600


def build(
    path: str | Path, out: str | Path, config: CorpusConfig | None = None, report: Report | None = None
) -> Corpus:
    """Build the corpus of the input `path` in the directory `out`, or return it where it is up to date.

    `report` is called with a line of text whenever there is something new to tell.
    """
    # Tasks run in directories of their own: the input's path must not depend on this one.
    path, out, config = Path(path).resolve(), Path(out), config or CorpusConfig()
    report = report or (lambda line: None)
    if (path / MANIFEST).is_file():
        raise InputError(f"{path}: is a built corpus already; use it as it is")
    if out.exists() and not (out.is_dir() and ((out / MANIFEST).is_file() or not any(out.iterdir()))):
        raise InputError(f"{out}: exists and is not a corpus; give another directory, or remove it")
    reader = find_reader(path)
    known_by = fingerprint(path, config)
    if _is_current(out, known_by):
        report(f"{out}: up to date")
        return Corpus.open(out)
    session.connect()
    source = reader.open_source(path, config)
    _check_splits(source, config)
    _remove_stale(out)
    with ordered_data(config.block_bytes):
        _Build(source, config, known_by, report).run(out)
    return Corpus.open(out)


def _check_splits(source: Source, config: CorpusConfig) -> None:
    if config.test_fraction and any(chunk.origin.split == "test" for chunk in source.chunks):
        raise InputError(f"{source.root}: has a test part of its own; leave test_fraction at 0")


def fingerprint(path: str | Path, config: CorpusConfig) -> str:
    """What a corpus of this input and these settings is known by: changes when an input file or a setting does.

    Looks at names, sizes and times of files, and needs no Ray.
    """
    path = Path(path)
    patterns = ("*", "train/*", "valid/*", "test/*", "labels/*")
    found = (
        [path] if path.is_file() else [file for pattern in patterns for file in sorted(path.glob(pattern))]
    )
    files = [
        [str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns]
        for file in found
        if file.is_file()
    ]
    state = [FORMAT_VERSION, find_reader(path).FORMAT, files, _settings(config)]
    return hashlib.blake2b(json.dumps(state).encode(), digest_size=16).hexdigest()


def _settings(config: CorpusConfig) -> dict[str, Any]:
    """The settings that shape a corpus; a subclass may have others."""
    return {field.name: getattr(config, field.name) for field in dataclasses.fields(CorpusConfig)}


def _is_current(out: Path, known_by: str) -> bool:
    try:
        return read_manifest(out)["source"]["fingerprint"] == known_by and bool(Corpus.open(out))
    except (InputError, KeyError):
        return False


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Hold a lock in a directory under construction: the system drops it when this process dies."""
    with open(directory / _LOCK, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    (directory / _LOCK).unlink()


def _remove_stale(out: Path) -> None:
    """Remove what builds of `out` that died have left beside it."""
    for directory in out.parent.glob(f".{out.name}.*.tmp"):
        try:
            with open(directory / _LOCK) as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue  # a living build
        except OSError:
            # Not locked yet, or about to be renamed: only age tells it from a dead one.
            if time.time() - directory.stat().st_mtime < _STALE_SECONDS:
                continue
        shutil.rmtree(directory, ignore_errors=True)


class Chunks(Datasource):
    """The chunks of a source as Ray Data reads them: one task a chunk, checked rows out."""

    def __init__(self, chunks: list[Chunk], config: CorpusConfig) -> None:
        super().__init__()
        self.chunks = chunks
        self.config = config

    def estimate_inmemory_data_size(self) -> int | None:
        return None

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: Any = None
    ) -> list[ReadTask]:
        nothing_known = BlockMetadata(num_rows=None, size_bytes=None, input_files=None, exec_stats=None)
        return [ReadTask(partial(_read_rows, chunk, self.config), nothing_known) for chunk in self.chunks]


def _read_rows(chunk: Chunk, config: CorpusConfig) -> Iterator[pa.Table]:
    for records in chunk.read():
        yield finish(records, chunk.origin, config)


@dataclass
class _Summary:
    """What the driver learns of all rows before anything is written."""

    bad: BadRows
    rows_of_file: Counter[int]
    train_labels: pa.Table  # key, count
    test_labels: pa.Table  # key, count
    row_keys: np.ndarray  # of the usable rows, in reading order
    ids: pa.ChunkedArray  # of the same rows


class _Build:
    """One build: reads all rows into the object store (which spills to disk), looks at them, writes them."""

    def __init__(self, source: Source, config: CorpusConfig, known_by: str, report: Report) -> None:
        self.source = source
        self.config = config
        self.known_by = known_by
        self.report = report
        self.bad = BadRows()
        self.bad_labels: list[tuple[BadRow, str | None]] = []
        self.first_row_of: dict[int, int] = {}  # of rows that repeat an id: the row that has it first

    def run(self, out: Path) -> None:
        started = time.monotonic()
        label_rows = self._check_label_file()
        rows = self._read()
        no_duplicates = ray.put(np.zeros(0, dtype=np.int64))
        summary = self._summarise(rows, no_duplicates)
        duplicates = self._find_duplicates(summary)
        duplicates_ref = ray.put(duplicates) if len(duplicates) else no_duplicates
        self._judge(summary)
        if len(duplicates):
            summary = self._summarise(rows, duplicates_ref)
        if len(summary.row_keys) == 0 or summary.train_labels.num_rows == 0:
            raise InputError(
                f"{self.source.root}: no usable training documents with labels; nothing to build"
            )
        keys, labels = make_label_table(summary.train_labels, label_rows)
        self.report(f"writing {len(summary.row_keys):,} documents, {len(keys):,} labels")
        with atomic_directory(out) as directory, _locked(directory):
            sink = _Shards(directory, ray.put(keys), duplicates_ref, self.config, self.source.num_features)
            rows.write_datasink(sink)
            pq.write_table(labels, directory / LABEL_FILE, compression="zstd")
            if self.config.on_bad_row == "quarantine" and self.bad.total:
                self._write_quarantine(rows, duplicates_ref, directory / QUARANTINE)
            manifest = self._manifest(summary, keys, labels, _number_shards(directory, sink.shards))
            _write_synced(directory / MANIFEST, json.dumps(manifest, indent=2) + "\n")
        self.report(f"built in {time.monotonic() - started:.1f} s")

    def _read(self) -> ray.data.Dataset:
        if not self.source.chunks:
            raise InputError(f"{self.source.root}: the input is empty")
        dataset = ray.data.read_datasource(
            Chunks(self.source.chunks, self.config), override_num_blocks=len(self.source.chunks)
        )
        blocks: list[ray.ObjectRef] = []
        num_rows = 0
        for bundle in dataset.iter_internal_ref_bundles():
            if bundle.num_rows():
                blocks += bundle.block_refs
                num_rows += bundle.num_rows()
                self.report(f"read {num_rows:,} documents")
        if not blocks:
            raise InputError(f"{self.source.root}: the input is empty")
        return ray.data.from_arrow_refs(blocks)

    def _check_label_file(self) -> pa.Table | None:
        """The usable rows of the label file; the others are noted."""
        if self.source.labels is None:
            return None
        rows = check_label_rows(self.source.labels.table)
        wrong = rows.filter(pc.is_valid(rows["problem"]))
        for row in wrong.select(["line", "problem", "raw", "name", "parent"]).to_pylist():
            bad = self._bad_row((self.source.labels.file << LINE_BITS) | row["line"], row["problem"])
            self.bad.add(bad)
            self.bad_labels.append(
                (bad, row["raw"] or json.dumps({"label": row["name"], "parent": row["parent"]}))
            )
        # A cycle is cut at one of its links; the label itself and its text are as good as any.
        cut = pc.fill_null(pc.starts_with(rows["problem"], "parent cycle"), False)
        parents = pc.if_else(cut, pa.scalar(None, pa.string()), rows["parent"])
        rows = rows.set_column(rows.schema.get_field_index("parent"), "parent", parents)
        return rows.filter(pc.or_(cut, pc.is_null(rows["problem"])))

    def _summarise(self, rows: ray.data.Dataset, duplicates: ray.ObjectRef) -> _Summary:
        tables = rows.map_batches(
            _summarise_block, batch_size=None, batch_format="pyarrow", fn_args=[duplicates]
        )
        blocks = [block for batch in tables.iter_batches(batch_size=None, batch_format="pyarrow")
                  for block in batch.to_batches()]  # fmt: skip
        table = pa.Table.from_batches(blocks)
        bad = BadRows()
        for row in table.select(["first_bad", "bad_kinds", "bad_counts"]).to_pylist():
            first = [self._bad_row(entry["row"], entry["problem"]) for entry in row["first_bad"]]
            bad.add_counted(first, dict(zip(row["bad_kinds"], row["bad_counts"], strict=True)))
        files: Counter[int] = Counter()
        for row in table.select(["files", "file_rows"]).to_pylist():
            files.update(dict(zip(row["files"], row["file_rows"], strict=True)))
        return _Summary(
            bad=bad,
            rows_of_file=files,
            train_labels=_merge(table, "train"),
            test_labels=_merge(table, "test"),
            row_keys=flat(table["rows"])[0].to_numpy(),
            ids=pa.chunked_array([flat(chunk)[0] for chunk in table["ids"].chunks], pa.string()),
        )

    def _find_duplicates(self, summary: _Summary) -> np.ndarray:
        """Keys of the rows whose id an earlier row has: sorted int64."""
        code_of = summary.ids.combine_chunks().dictionary_encode().indices.to_numpy()
        _, first, inverse = np.unique(code_of, return_index=True, return_inverse=True)
        first_of = first[inverse]
        repeats = np.flatnonzero(first_of < np.arange(len(code_of)))
        earlier = summary.row_keys[first_of[repeats]].tolist()
        self.first_row_of = dict(zip(summary.row_keys[repeats].tolist(), earlier, strict=True))
        listed = [
            self._duplicate(summary.row_keys[at], summary.ids[int(at)].as_py())
            for at in repeats[:MOST_LISTED]
        ]
        if listed:
            self.bad.add_counted(listed, {kind_of(listed[0].reason): len(repeats)})
        return np.sort(summary.row_keys[repeats])

    def _duplicate(self, key: int, name: str) -> BadRow:
        first = self._bad_row(self.first_row_of[int(key)], "")
        return self._bad_row(key, f"duplicate id: {name!r} (first at {first.file}:{first.line})")

    def _judge(self, summary: _Summary) -> None:
        """Collect all that is wrong with the input; stop where the settings say so."""
        self.bad.add_counted(summary.bad.first, dict(summary.bad.counts))
        for problem in self.source.problems:
            self.bad.add(self._bad_row((problem.file << LINE_BITS) | problem.line, problem.reason))
        for file, expected in self.source.expected_rows.items():
            found = summary.rows_of_file[file]
            if found != expected:
                reason = f"header: says {expected:,} documents, the file has {found:,}"
                self.bad.add(self._bad_row((file << LINE_BITS) | 1, reason))
        if self.bad.total and self.config.on_bad_row == "error":
            raise self.bad.stop(self.source.root)

    def _bad_row(self, key: int, reason: str) -> BadRow:
        path = self.source.files[int(key) >> LINE_BITS]
        name = path.name if path == self.source.root else path.relative_to(self.source.root).as_posix()
        return BadRow(int(key), name, int(key) & ((1 << LINE_BITS) - 1), reason)

    def _write_quarantine(self, rows: ray.data.Dataset, duplicates: ray.ObjectRef, path: Path) -> None:
        selected = rows.map_batches(
            _select_bad, batch_size=None, batch_format="pyarrow", fn_args=[duplicates]
        )
        with open(path, "w", encoding="utf-8") as file:
            for batch in selected.iter_batches(batch_size=None, batch_format="pyarrow"):
                for row in batch.to_pylist():
                    bad = (
                        self._bad_row(row["row"], row["problem"])
                        if row["problem"]
                        else self._duplicate(row["row"], row["id"])
                    )
                    file.write(quarantine_line(bad, row["raw"]))
            for bad, raw in self.bad_labels:
                file.write(quarantine_line(bad, raw))

    def _manifest(
        self, summary: _Summary, keys: pa.Array, labels: pa.Table, shards: list[dict[str, Any]]
    ) -> dict[str, Any]:
        unseen = pc.invert(pc.is_in(summary.test_labels["key"], keys))
        splits = {}
        for split in ("train", "valid", "test"):
            own = [shard for shard in shards if shard["split"] == split]
            if own:
                splits[split] = _describe_split(own)
        if "train" not in splits:
            raise InputError(f"{self.source.root}: all of train went to validation; lower valid_fraction")
        return {
            "format_version": FORMAT_VERSION,
            "xmc_version": importlib.metadata.version("xmc"),
            "num_labels": len(keys),
            "num_features": self.source.num_features,
            "splits": splits,
            "unseen_test_labels": int(pc.sum(unseen).as_py() or 0),
            "unseen_test_assignments": splits.get("test", {}).get("unseen_assignments", 0),
            "repeated_labels": sum(shard["repeated"] for shard in shards),
            "bad_rows": dict(self.bad.counts.most_common()),
            "bad_row_examples": self.bad.summary(),
            "on_bad_row": self.config.on_bad_row,
            "notes": self.source.notes,
            "settings": _settings(self.config),
            "source": {
                "path": str(self.source.root.resolve()),
                "format": self.source.format,
                "files": [path.name for path in self.source.files],
                "fingerprint": self.known_by,
            },
            "content_hash": _content_hash(shards, labels),
        }


def _usable(block: pa.Table, duplicates: np.ndarray) -> pa.Table:
    """The rows that go into the corpus."""
    block = block.filter(pc.is_null(block["problem"]))
    if len(duplicates):
        block = block.filter(pa.array(~np.isin(block["row"].to_numpy(), duplicates)))
    return block


def _select_bad(block: pa.Table, duplicates: ray.ObjectRef) -> pa.Table:
    """Key, id, problem and raw form of the rows that do not; the problem of duplicates is null."""
    repeats = pa.array(np.isin(block["row"].to_numpy(), ray.get(duplicates)))
    bad = block.filter(pc.or_(pc.is_valid(block["problem"]), repeats))
    raw = [quoted or quote_row(bad.slice(at, 1)) for at, quoted in enumerate(bad["raw"].to_pylist())]
    return bad.select(["row", "id", "problem"]).append_column("raw", pa.array(raw, pa.string()))


def _summarise_block(block: pa.Table, duplicates: ray.ObjectRef) -> pa.Table:
    """One row that tells the driver what a block holds: its bad rows, ids and label counts."""
    bad = block.filter(pc.is_valid(block["problem"])).select(["row", "problem"]).to_pylist()
    kinds = Counter(kind_of(row["problem"]) for row in bad)
    files = Counter((block["row"].to_numpy() >> LINE_BITS).tolist())
    usable = _usable(block, ray.get(duplicates))
    parts = usable["part"].to_numpy()
    train_keys, train_counts = _count_labels(usable.filter(pa.array(parts <= VALID_OF_TRAIN)))
    test_keys, test_counts = _count_labels(usable.filter(pa.array(parts == TEST)))
    return pa.table(
        {
            "first_bad": pa.array(
                [bad[:MOST_LISTED]], pa.list_(pa.struct([("row", pa.int64()), ("problem", pa.string())]))
            ),
            "bad_kinds": pa.array([list(kinds)], pa.list_(pa.string())),
            "bad_counts": pa.array([list(kinds.values())], pa.list_(pa.int64())),
            "files": pa.array([list(files)], pa.list_(pa.int64())),
            "file_rows": pa.array([list(files.values())], pa.list_(pa.int64())),
            "rows": _one_list(usable["row"]),
            "ids": _one_list(usable["id"]),
            "train_keys": _one_list(train_keys),
            "train_counts": _one_list(train_counts),
            "test_keys": _one_list(test_keys),
            "test_counts": _one_list(test_counts),
        }
    )


def _one_list(values: pa.Array | pa.ChunkedArray) -> pa.ListArray:
    if isinstance(values, pa.ChunkedArray):
        values = pa.concat_arrays(values.chunks) if values.num_chunks else pa.array([], values.type)
    return lists(values, np.array([len(values)]))


def _count_labels(rows: pa.Table) -> tuple[pa.Array, pa.Array]:
    counted = pc.value_counts(flat(rows["labels"])[0])
    return counted.field("values"), counted.field("counts")


def _merge(table: pa.Table, split: str) -> pa.Table:
    keys, counts = table[f"{split}_keys"].chunks, table[f"{split}_counts"].chunks
    return merge_counts([flat(chunk)[0] for chunk in keys], [flat(chunk)[0] for chunk in counts])


class _Shards(Datasink):
    """Writes rows as Parquet files, one task a file or a few, named after their first row until all are there."""

    def __init__(
        self,
        directory: Path,
        keys: ray.ObjectRef,
        duplicates: ray.ObjectRef,
        config: CorpusConfig,
        num_features: int | None,
    ) -> None:
        self.directory = directory.resolve()
        self.keys = keys
        self.duplicates = duplicates
        self.rows_per_shard = config.rows_per_shard
        self.has_features = num_features is not None
        self.shards: list[dict[str, Any]] = []

    @property
    def min_rows_per_write(self) -> int:
        return self.rows_per_shard

    def on_write_start(self, schema: pa.Schema | None = None) -> None:
        for split in set(SPLIT_OF_PART):
            (self.directory / split).mkdir(exist_ok=True)

    def write(self, blocks: Iterable[pa.Table], ctx: Any) -> list[dict[str, Any]]:
        keys, duplicates = ray.get([self.keys, self.duplicates])
        rows = _usable(pa.concat_tables(blocks), duplicates)
        parts = rows["part"].to_numpy()
        shards = []
        for split in dict.fromkeys(SPLIT_OF_PART):
            codes = [part for part, name in enumerate(SPLIT_OF_PART) if name == split]
            own = rows.filter(pa.array(np.isin(parts, codes))).combine_chunks()
            for piece in _even_slices(own, self.rows_per_shard):
                shards.append(self._write_shard(piece, split, keys))
        return shards

    def _write_shard(self, rows: pa.Table, split: str, keys: pa.Array) -> dict[str, Any]:
        label_ids, num_unseen = _to_label_ids(rows["labels"], keys)
        columns = {
            "id": rows["id"],
            "group": rows["group"],
            "text": rows["text"],
            "label_ids": label_ids,
            "num_unseen": pa.array(num_unseen),
        }
        if self.has_features:
            columns |= {"feature_ids": rows["feature_ids"], "feature_values": rows["feature_values"]}
        table = pa.table(columns)
        first_row = rows["row"][0].as_py()
        path = self.directory / split / f"{first_row:020d}.parquet"
        pq.write_table(table, path, compression="zstd", use_dictionary=["label_ids.list.element"])
        lengths = flat(label_ids)[1]
        words = pc.sum(
            pc.list_value_length(pc.ascii_split_whitespace(pc.ascii_trim_whitespace(rows["text"])))
        )
        return {
            "split": split,
            "file": path.name,
            "documents": table.num_rows,
            "assignments": int(lengths.sum()) + int(num_unseen.sum()),
            "unseen_assignments": int(num_unseen.sum()),
            "without_labels": int(((lengths == 0) & (num_unseen == 0)).sum()),
            "without_known_label": int(((lengths == 0) & (num_unseen > 0)).sum()),
            "words": words.as_py() or 0,
            "repeated": pc.sum(rows["repeated"]).as_py(),
            "hash": hash_rows(table),
        }

    def on_write_complete(self, write_result: Any) -> None:
        self.shards = [shard for shards in write_result.write_returns for shard in shards]


def _even_slices(table: pa.Table, most: int) -> Iterator[pa.Table]:
    """Cut into as few slices of at most `most` rows as will do, all about the same size."""
    num_slices = -(-table.num_rows // most)
    ends = [table.num_rows * at // num_slices for at in range(num_slices + 1)] if num_slices else []
    for start, end in itertools.pairwise(ends):
        yield table.slice(start, end - start)


def _to_label_ids(labels: pa.ChunkedArray, keys: pa.Array) -> tuple[pa.ListArray, np.ndarray]:
    """Sorted ids of the labels that train knows (N lists of int32), and the number of the others (N,) int32."""
    values, lengths = flat(labels)
    encoded = values.dictionary_encode()
    id_of = pc.fill_null(pc.index_in(encoded.dictionary, keys), -1).to_numpy().astype(np.int64)
    ids = id_of[encoded.indices.to_numpy()]
    row_of = np.repeat(np.arange(len(lengths)), lengths)
    known = ids >= 0
    ordered = np.sort(row_of[known] * max(len(keys), 1) + ids[known])
    known_rows, known_ids = np.divmod(ordered, max(len(keys), 1))
    num_known = np.bincount(known_rows, minlength=len(lengths))
    return lists(pa.array(known_ids.astype(np.int32)), num_known), (lengths - num_known).astype(np.int32)


def hash_rows(table: pa.Table) -> list[int]:
    """The sum over rows of a 128-bit hash of each, as two numbers mod 2⁶⁴: no order or sharding changes it."""
    ids, groups, text = (
        pc.coalesce(table[name], "").cast(pa.binary()).to_pylist() for name in ("id", "group", "text")
    )
    unseen = table["num_unseen"].to_numpy().astype("<i4").tobytes()
    columns = [(unseen, 4 * np.arange(table.num_rows + 1))]
    for name in ("label_ids", "feature_ids", "feature_values"):
        if name in table.column_names:
            values, lengths = flat(table[name])
            columns.append((values.to_numpy().tobytes(), 4 * np.concatenate(([0], np.cumsum(lengths)))))
    slices = [[data[start:end] for start, end in itertools.pairwise(ends.tolist())]
              for data, ends in columns]  # fmt: skip
    # The lengths of the parts keep two rows apart that differ only in where one part ends.
    digests = [
        hashlib.blake2b(b"\x1f".join(parts) + repr(tuple(map(len, parts))).encode(), digest_size=16).digest()
        for parts in zip(ids, groups, text, *slices, strict=True)
    ]
    sums = np.frombuffer(b"".join(digests), dtype="<u8").reshape(-1, 2).sum(axis=0, dtype=np.uint64)
    return [int(value) for value in sums]


def _number_shards(directory: Path, shards: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Give the files their final names in reading order; splits without documents vanish."""
    numbered = []
    for split in dict.fromkeys(SPLIT_OF_PART):
        own = sorted((shard for shard in shards if shard["split"] == split), key=lambda shard: shard["file"])
        for number, shard in enumerate(own):
            name = f"part-{number:05d}.parquet"
            os.replace(directory / split / shard["file"], directory / split / name)
            numbered.append({**shard, "file": name})
        if not own:
            (directory / split).rmdir()
    return numbered


def _describe_split(shards: list[dict[str, Any]]) -> dict[str, Any]:
    totals = {
        key: sum(shard[key] for shard in shards)
        for key in (
            "documents",
            "assignments",
            "unseen_assignments",
            "without_labels",
            "without_known_label",
            "words",
        )
    }
    words = totals.pop("words")
    return totals | {
        "labels_per_document": round(totals["assignments"] / totals["documents"], 4),
        "words_per_document": round(words / totals["documents"], 2),
        "shards": [{"name": shard["file"], "documents": shard["documents"]} for shard in shards],
    }


def _content_hash(shards: list[dict[str, Any]], labels: pa.Table) -> str:
    """A hash of all documents with their splits and labels, the same however they are cut into shards."""
    sums: dict[str, list[int]] = {}
    for shard in shards:
        total = sums.setdefault(shard["split"], [0, 0])
        sums[shard["split"]] = [(a + b) % 2**64 for a, b in zip(total, shard["hash"], strict=True)]
    digest = hashlib.blake2b(json.dumps(sums, sort_keys=True).encode(), digest_size=16)
    for column in labels.columns:
        values = column.cast(pa.string()).cast(pa.binary())
        lengths = pc.fill_null(
            pc.binary_length(values), -1
        )  # they tell null from empty, and where values end
        digest.update(lengths.to_numpy().astype("<i8").tobytes())
        digest.update(b"".join(pc.fill_null(values, b"").to_pylist()))
    return digest.hexdigest()


def _write_synced(path: Path, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
