"""What systems that read words share: the stages that number words and give them vectors, and the table in a rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from raycluster import inference
from raycluster.stages import Stage
from xmc.corpus.tokens import SubwordEncoder, TokensConfig, write_sequences
from xmc.corpus.words import UNKNOWN_ID, Vocabulary, WordsConfig, fit_vocabulary
from xmc.nn.encoders import EncoderConfig, load_tokenizer
from xmc.nn.words import WordRows, WordVectorsConfig, principal_axes, read_vectors
from xmc.systems import shared_stages
from xmc.systems.vectors import VECTORS, pretrained

VOCABULARY, WORD_TABLE = "vocabulary.parquet", "words.safetensors"
_TABLE = "vectors"
# Of a word that an encoder reads; longer words are cut.
_WORD_PIECES = 16


@dataclass(frozen=True)
class WordsSection(WordsConfig):
    vectors: WordVectorsConfig = field(default_factory=WordVectorsConfig)


def words_stages(section: WordsSection, seed: int) -> list[Stage]:
    """`tokens`: the vocabulary of train and word ids of train and validation. `words`: the vectors before training."""
    words = WordsConfig(section.vocabulary_size, section.max_words)

    def number(out: Path, given: Mapping[str, Path]) -> None:
        corpus = shared_stages.open_corpus(given)
        vocabulary = fit_vocabulary(corpus.shards("train"), words)
        shared_stages.write_splits(corpus, vocabulary, out)
        vocabulary.save(out / VOCABULARY)

    def draw(out: Path, given: Mapping[str, Path]) -> None:
        vocabulary, vectors = Vocabulary.load(given["tokens"] / VOCABULARY), section.vectors
        rows = WordRows(len(vocabulary), vectors, seed=seed)
        if vectors.file:
            places, known = read_vectors(Path(vectors.file).expanduser(), vocabulary.words, vectors.width)
            rows.put(torch.from_numpy(places) + UNKNOWN_ID + 1, torch.from_numpy(known))
            print(
                f"  {len(places):,} of {len(vocabulary.words):,} words have a vector in {vectors.file}",
                flush=True,
            )
        elif vectors.encoder:
            read = read_alone(vocabulary.words, vectors.encoder, seed, out.resolve() / "read")
            known = principal_axes(read, vectors.width)
            rows.put(torch.arange(len(known)) + UNKNOWN_ID + 1, torch.from_numpy(known))
        save_file({_TABLE: rows.weight}, out / WORD_TABLE)

    return [
        Stage("tokens", asdict(words), number, ("corpus",)),
        Stage("words", asdict(section.vectors) | {"seed": seed}, draw, ("tokens",), resumes=True),
    ]


def read_alone(words: Sequence[str], encoder: str, seed: int, out: Path) -> np.ndarray:
    """(n × d) float32: what an encoder makes of each of n words, by Ray Data's actors; pieces land in `out`."""
    config = EncoderConfig(
        name=encoder, summary="mean", layers_pooled=1, dropout=0.0, max_tokens=_WORD_PIECES
    )
    tokenizer = load_tokenizer(config)
    subwords = SubwordEncoder(tokenizer, TokensConfig(tokenizer=encoder, max_tokens=_WORD_PIECES))
    out.mkdir(exist_ok=True)
    pq.write_table(pa.table({"text": list(words)}), out / "words.parquet")
    write_sequences([out / "words.parquet"], subwords, out / "tokens")
    network = partial(pretrained, config, seed, (subwords.pad_id, tokenizer.padding_side))
    inference.write_vectors(out / "tokens", network, out / "vectors", "vectors of words")
    return inference.read_vectors(out / "vectors")[VECTORS]


def num_words(table: Path) -> int:
    """Rows of the file that the stage `words` wrote."""
    with safe_open(table, framework="pt") as file:
        return file.get_slice(_TABLE).get_shape()[0]


def load_words(table: Path) -> Tensor:
    """(words × width) all of that file."""
    return load_file(table)[_TABLE]


def fill_words(rows: WordRows, table: Path) -> None:
    """Put this rank's part of the file into its rows."""
    with safe_open(table, framework="pt") as file:
        rows.weight.copy_(file.get_slice(_TABLE)[rows.block.start : rows.block.stop])
