"""Sub-word ids of a corpus from any Hugging Face tokenizer, and the shards that hold id sequences.

Sequences are stored without padding, one Parquet file per corpus shard and in its row order; `pad_batch` pads them
on the side that the encoder wants. Nothing here knows models.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import ray

from xmc import hub
from xmc.errors import InputError
from xmc.files import atomic_directory

if TYPE_CHECKING:
    import ray.data
    from transformers import PreTrainedTokenizerBase

# Where texts come from: a Ray Dataset with a `text` column, or the Parquet shards of a corpus split.
Source: TypeAlias = "ray.data.Dataset | Sequence[Path | str]"
Texts: TypeAlias = "Sequence[str] | pa.Array | pa.ChunkedArray"

MANIFEST = "manifest.json"
# English takes 4 to 5 characters a token: 16 fill nearly every sequence at once, and the rest are cut again wider.
_CHARS_PER_TOKEN = 16
_MIN_CHARS = 1024  # so that a cut through one endless word is past where tokenizers call it unknown


# ---------------------------------------------------------------------------------------------- texts in, blocks


def text_blocks(source: Source) -> list[Any]:
    """The units of work of `source`, in row order: shard paths, or references to a dataset's Arrow blocks."""
    from ray.data import Dataset  # here only: importing it takes a second, and workers do without

    if not isinstance(source, Dataset):
        paths = [Path(path).resolve() for path in source]  # a worker's directory is another one
        if not paths:
            raise InputError(
                "no shards: the corpus split is empty; build the corpus again or name another split"
            )
        return paths
    if "text" not in (source.columns() or []):
        raise InputError(_no_text("the dataset", f"its columns are {source.columns()}"))
    texts = source.select_columns(["text"])
    texts.context.execution_options.preserve_order = True  # results are aligned with the rows of the corpus
    return texts.to_arrow_refs()


def _no_text(where: str, reason: str) -> str:
    return (
        f"{where} has no text ({reason}). A corpus that came with sparse features is used through them "
        "(Corpus.features); tokens and TF-IDF need a corpus built from text"
    )


def read_texts(block: Path | pa.Table) -> pa.ChunkedArray:
    """The `text` column of a shard or block, refused where a row has none."""
    where = f"{block}" if isinstance(block, Path) else "a block of the dataset"
    if isinstance(block, Path):
        if not block.exists():
            raise InputError(f"{block}: no such shard; build the corpus again")
        if "text" not in pq.read_schema(block).names:
            raise InputError(_no_text(where, "no `text` column"))
        block = pq.read_table(block, columns=["text"])
    texts = block.column("text")
    if texts.null_count:
        row = int(np.flatnonzero(texts.is_null().to_numpy())[0])
        raise InputError(_no_text(where, f"row {row} is null"))
    return texts


def gather(refs: Sequence[ray.ObjectRef]) -> list[Any]:
    """`ray.get`, with a task's InputError raised as itself rather than wrapped in the worker's traceback."""
    try:
        return ray.get(list(refs))
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, InputError):
            raise error.cause from None
        raise


# ---------------------------------------------------------------------------------------------- id sequences


@dataclass(frozen=True)
class Sequences:
    """N id sequences end to end: `values` int32 (T,), `offsets` int64 (N+1,); sequence i is values[o[i]:o[i+1]]."""

    values: np.ndarray
    offsets: np.ndarray

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> np.ndarray:
        return self.values[self.offsets[row] : self.offsets[row + 1]]

    @property
    def lengths(self) -> np.ndarray:
        """int64 (N,)."""
        return np.diff(self.offsets)

    @classmethod
    def from_lists(cls, lists: Sequence[Sequence[int]]) -> Sequences:
        offsets = np.zeros(len(lists) + 1, np.int64)
        np.cumsum([len(ids) for ids in lists], out=offsets[1:])
        values = np.fromiter(itertools.chain.from_iterable(lists), np.int32, count=int(offsets[-1]))
        return cls(values, offsets)

    @classmethod
    def from_arrow(cls, column: pa.ChunkedArray) -> Sequences:
        lengths = pc.list_value_length(column).to_numpy()
        offsets = np.zeros(len(column) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        return cls(pc.list_flatten(column).to_numpy().astype(np.int32, copy=False), offsets)

    def to_arrow(self) -> pa.LargeListArray:
        return pa.LargeListArray.from_arrays(pa.array(self.offsets), pa.array(self.values, pa.int32()))


class Encoder(Protocol):
    """Turns texts into id sequences, none of them empty."""

    pad_id: int

    def encode_texts(self, texts: Texts) -> Sequences: ...

    def describe(self) -> dict[str, Any]:
        """What the manifest says of it: its settings and a hash of its vocabulary."""
        ...


@ray.remote
def _encode_block(block: Path | pa.Table, encoder: Encoder, path: Path) -> tuple[int, int]:
    os.environ.setdefault(
        "TOKENIZERS_PARALLELISM", "false"
    )  # Ray runs one task a core: threads would only contend
    sequences = encoder.encode_texts(read_texts(block))
    column = sequences.to_arrow().cast(pa.list_(pa.int32()))
    pq.write_table(pa.table({"input_ids": column}), path)
    return len(sequences), len(sequences.values)


def write_sequences(source: Source, encoder: Encoder, out_dir: Path) -> dict[str, Any]:
    """Encode every text of `source` on Ray into `out_dir`, one Parquet file per shard; return the manifest.

    Columns: input_ids list<int32>, never empty, row for row the corpus. The directory appears only when complete.
    """
    blocks, shared = text_blocks(source), ray.put(encoder)
    with atomic_directory(Path(out_dir).resolve()) as temporary:
        names = [f"part-{i:05d}.parquet" for i in range(len(blocks))]
        counts = gather(
            [
                _encode_block.remote(block, shared, temporary / name)
                for block, name in zip(blocks, names, strict=True)
            ]
        )
        rows, tokens = (int(total) for total in np.sum(counts, axis=0))
        manifest = {
            "rows": rows,
            "tokens": tokens,
            "parts": [{"file": name, "rows": count[0]} for name, count in zip(names, counts, strict=True)],
            "pad_id": encoder.pad_id,
            **encoder.describe(),
        }
        (temporary / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
    return manifest


def read_manifest(directory: Path) -> dict[str, Any]:
    """The manifest of a directory of shards; it is written last, so without one nothing there is complete."""
    path = Path(directory) / MANIFEST
    if not path.exists():
        raise InputError(
            f"{path}: missing, so {directory} is not a finished directory of shards; write it again"
        )
    return json.loads(path.read_text())


def load_sequences(directory: Path) -> Sequences:
    """All sequences of a directory that `write_sequences` filled, in corpus order."""
    parts = [Path(directory) / part["file"] for part in read_manifest(directory)["parts"]]
    tables = [pq.read_table(path, columns=["input_ids"]) for path in parts]
    return Sequences.from_arrow(pa.concat_tables(tables).column("input_ids"))


def pad_batch(
    sequences: Sequence[np.ndarray], pad_id: int, side: str = "right"
) -> tuple[np.ndarray, np.ndarray]:
    """B id arrays → input_ids int64 (B, T) and attention_mask int64 (B, T), T the longest of them.

    `side` is where the padding goes: "right", or "left" for encoders whose summary token is the last one (XLNet).
    """
    if side not in ("left", "right"):
        raise InputError(f"padding side {side!r}: choose left or right")
    lengths = np.fromiter(map(len, sequences), np.int64, count=len(sequences))
    width = int(lengths.max(initial=0))
    columns = np.arange(width)
    mask = columns < lengths[:, None] if side == "right" else columns >= width - lengths[:, None]
    input_ids = np.full((len(sequences), width), pad_id, np.int64)
    if width:
        input_ids[mask] = np.concatenate(sequences)
    return input_ids, mask.astype(np.int64)


def vocabulary_hash(items: Sequence[str]) -> str:
    """A short fingerprint of a vocabulary in id order."""
    return hashlib.sha256("\0".join(items).encode("utf-8", "surrogatepass")).hexdigest()[:16]


# ---------------------------------------------------------------------------------------------- sub-words


@dataclass(frozen=True)
class TokensConfig:
    # A Hugging Face tokenizer: hub name, directory, or `minilm` (packaged; needs the extra xmc[minilm]).
    tokenizer: str = hub.MINILM
    # Longest sequence with its special tokens. Cost of an encoder grows at least linearly with it.
    max_tokens: int = 128

    def __post_init__(self) -> None:
        if not self.tokenizer:
            raise InputError(f"tokenizer is empty: give a hub name, a directory or {hub.MINILM!r}")
        if self.max_tokens < 1:
            raise InputError(f"max_tokens={self.max_tokens}: must be at least 1")


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """The tokenizer `name`: `minilm`, a directory, or a hub name (from the local cache, else from the hub)."""
    from transformers import AutoTokenizer

    tokenizer = hub.from_pretrained(AutoTokenizer, name)
    directory, files = hub.local_directory(name), tokenizer.vocab_files_names.values()
    # transformers makes a tokenizer that knows no word of a model's directory without one.
    if directory is not None and files and not any((directory / file).exists() for file in files):
        raise InputError(
            f"{name}: the directory has no tokenizer ({' or '.join(files)}); copy into it the files of the one its "
            "encoder learnt with: a run of this project keeps them in model/tokenizer"
        )
    # Long texts are cut before tokenising: their beginning is what counts.
    tokenizer.truncation_side = "right"
    return tokenizer


class SubwordEncoder:
    """Texts to sub-word ids with the tokenizer's special tokens, cut to `max_tokens`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, config: TokensConfig) -> None:
        num_special = tokenizer.num_special_tokens_to_add()
        if config.max_tokens <= num_special:
            raise InputError(
                f"max_tokens={config.max_tokens}: tokenizer {config.tokenizer} adds {num_special} special tokens; "
                f"allow at least {num_special + 1}"
            )
        self.tokenizer = tokenizer
        self.config = config
        self.pad_id = 0 if tokenizer.pad_token_id is None else int(tokenizer.pad_token_id)

    @classmethod
    def from_config(cls, config: TokensConfig) -> SubwordEncoder:
        return cls(load_tokenizer(config.tokenizer), config)

    def encode_texts(self, texts: Texts) -> Sequences:
        """N texts → N sequences of 1 to max_tokens ids.

        Only as much of a long text is tokenised as fills the sequence, cut between words where there are any. A text
        without tokens is its special tokens, or one unknown token where the tokenizer has none.
        """
        if not isinstance(texts, pa.Array | pa.ChunkedArray):
            # JSON can smuggle half a surrogate pair into a string; no tokenizer takes it.
            clean = [text.encode("utf-8", "replace") for text in texts]
            texts = pa.array(clean, pa.large_binary()).cast(pa.large_string())
        rows: list[list[int]] = [[]] * len(texts)
        lengths = pc.utf8_length(texts).to_numpy(zero_copy_only=False)
        todo, budget = np.arange(len(texts)), max(self.config.max_tokens * _CHARS_PER_TOKEN, _MIN_CHARS)
        while len(todo):
            heads = pc.utf8_slice_codeunits(texts.take(pa.array(todo)), 0, budget).to_pylist()
            cut = lengths[todo] > budget
            for i in np.flatnonzero(cut):
                heads[i] = _until_last_space(heads[i])
            encoded = self._encode(heads)
            for row, ids in zip(todo.tolist(), encoded, strict=True):
                rows[row] = ids
            short = np.fromiter(map(len, encoded), np.int64, count=len(encoded)) < self.config.max_tokens
            todo, budget = todo[cut & short], budget * 8
        return Sequences.from_lists(rows)

    def _encode(self, texts: list[str]) -> list[list[int]]:
        rows = self.tokenizer(
            texts,
            truncation=True,
            max_length=self.config.max_tokens,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )["input_ids"]
        unknown = self.tokenizer.unk_token_id
        return [ids or [self.pad_id if unknown is None else unknown] for ids in rows]

    def describe(self) -> dict[str, Any]:
        vocabulary = self.tokenizer.get_vocab()
        return {
            "settings": asdict(self.config),
            "vocabulary_size": len(self.tokenizer),
            "vocabulary_hash": vocabulary_hash(sorted(vocabulary, key=vocabulary.__getitem__)),
            "padding_side": self.tokenizer.padding_side,
        }


def _until_last_space(text: str) -> str:
    """Without the last, perhaps broken word; the text itself where it is one word or blank."""
    words = text.rsplit(maxsplit=1)
    return words[0] if len(words) == 2 else text


def tokenize(source: Source, config: TokensConfig, out_dir: Path) -> dict[str, Any]:
    """Write the sub-word ids of every text of `source` to `out_dir` (see `write_sequences`); return the manifest."""
    return write_sequences(source, SubwordEncoder.from_config(config), out_dir)
