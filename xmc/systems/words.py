"""What systems that read words share: the stages that number words and give them vectors, and the table in a rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from raycluster.stages import Stage
from xmc.corpus.words import UNKNOWN_ID, Vocabulary, WordsConfig, fit_vocabulary
from xmc.nn.words import WordRows, WordVectorsConfig, read_vectors
from xmc.systems import shared_stages

VOCABULARY, WORD_TABLE = "vocabulary.parquet", "words.safetensors"
_TABLE = "vectors"


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
        save_file({_TABLE: rows.weight}, out / WORD_TABLE)

    return [
        Stage("tokens", asdict(words), number, ("corpus",)),
        Stage("words", asdict(section.vectors) | {"seed": seed}, draw, ("tokens",)),
    ]


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
