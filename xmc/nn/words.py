"""Words as vectors and texts as the states of a BiLSTM: word-vector files, the divided word table, the encoder.

Splitting texts into words and numbering them is `corpus.words`; labels are unknown here.

Legend: V words of the vocabulary, b documents of this rank, T words of the longest, e width of a word vector, h hidden
width of the LSTM, U distinct words of all ranks' documents.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from xmc.errors import InputError
from xmc.nn.candidates import CandidateLabelLayer
from xmc.nn.optimisers import RowOptimiserConfig
from xmc.nn.sharding import LabelBlock, gather_counts, gather_rows, world_size

# Random vectors are drawn from U(−this, this): about the spread of published word vectors.
_RANDOM_BOUND = 0.5
_RANDOM_SPREAD = _RANDOM_BOUND / 3**0.5


@dataclass(frozen=True)
class WordVectorsConfig:
    # A GloVe or word2vec file (text, or binary if its name ends in .bin); empty: all vectors are random.
    file: str = ""
    # Or an encoder (a hub name, a directory, minilm) that reads each word of the vocabulary alone.
    encoder: str = ""
    # Width of a vector; a file must have the same, of an encoder's vectors so many principal axes are kept.
    width: int = 300
    # Whether training moves them. On small corpora a file's vectors are better left as they are.
    trained: bool = True

    def __post_init__(self) -> None:
        if self.width < 1:
            raise InputError(f"words.vectors.width is {self.width}; it must be at least 1")
        if self.file and self.encoder:
            raise InputError("words.vectors has a file and an encoder; give one of them")


# --- files ----------------------------------------------------------------------------------------------------------


def read_vectors(path: Path, words: Sequence[str], width: int) -> tuple[np.ndarray, np.ndarray]:
    """The vectors of those `words` that a GloVe or word2vec file has: their places in `words` (n,) int64, rising, and
    the vectors (n × width) float32. A word that stands there twice keeps its first vector."""
    places = {word.encode("utf-8", "replace"): place for place, word in enumerate(words)}
    found: dict[int, np.ndarray] = {}
    kind = _binary_vectors if path.suffix == ".bin" else _text_vectors
    try:
        with open(path, "rb") as file:
            for place, vector in kind(file, path, places, width):
                found.setdefault(place, vector)
    except OSError as error:
        raise InputError(f"{path}: word vectors cannot be read ({error}); give another file") from error
    if not found:
        raise InputError(
            f"{path}: has no vector of any of the vocabulary's {len(words):,} words; is it of the texts' language?"
        )
    order = sorted(found)
    return np.array(order, np.int64), np.stack([found[place] for place in order])


def _text_vectors(
    file: BinaryIO, path: Path, places: Mapping[bytes, int], width: int
) -> Iterator[tuple[int, np.ndarray]]:
    """(place, vector) of the lines whose word is wanted. Words may hold spaces: numbers are counted from the end."""
    for number, line in enumerate(file, start=1):
        if number == 1 and len(line.split()) == 2:
            _read_header(line, path, width)
            continue
        parts = line.rstrip().rsplit(b" ", width)
        if len(parts) != width + 1:
            raise InputError(
                f"{path}:{number}: is not a word and {width} numbers; set words.vectors.width to the file's width"
            )
        if parts[0] in places:
            try:
                yield places[parts[0]], np.array(parts[1:], np.float32)
            except ValueError as error:
                raise InputError(
                    f"{path}:{number}: {error}; set words.vectors.width to the file's width"
                ) from None


def _binary_vectors(
    file: BinaryIO, path: Path, places: Mapping[bytes, int], width: int
) -> Iterator[tuple[int, np.ndarray]]:
    """(place, vector) of the wanted words of word2vec's binary format: word, space, float32 numbers, end to end."""
    count = _read_header(file.readline(), path, width)
    for number in range(count):
        word = bytearray()
        while (byte := file.read(1)) not in (b" ", b""):
            word += byte
        vector = file.read(4 * width)
        if len(vector) < 4 * width:
            raise InputError(f"{path}: ends after {number:,} of its {count:,} vectors; fetch it again")
        place = places.get(bytes(word).lstrip(b"\n"))
        if place is not None:
            yield place, np.frombuffer(vector, "<f4")


def _read_header(line: bytes, path: Path, width: int) -> int:
    """The number of vectors that word2vec's first line names."""
    try:
        count, found = map(int, line.split())
    except ValueError:
        raise InputError(f"{path}: its first line is not the number of vectors and their width") from None
    if found != width:
        raise InputError(f"{path}: its vectors are {found} wide, but words.vectors.width is {width}")
    return count


def principal_axes(vectors: np.ndarray, width: int) -> np.ndarray:
    """(n × width) float32: `vectors` (n × d) without their mean, along the `width` directions in which they differ
    most, and with the spread of random ones. What all words share would only hide how they differ."""
    if vectors.shape[1] < width:
        raise InputError(
            f"words.vectors.width is {width}, but the encoder's vectors are {vectors.shape[1]} wide; ask for no more"
        )
    centred = vectors - vectors.mean(axis=0, dtype=np.float64)
    _, axes = np.linalg.eigh(centred.T @ centred)  # in rising order of their variance
    turned = centred @ axes[:, ::-1][:, :width]
    return (turned * (_RANDOM_SPREAD / max(turned.std(), 1e-12))).astype(np.float32)


# --- table ----------------------------------------------------------------------------------------------------------


class WordRows(CandidateLabelLayer):
    """The word vectors (V × e), divided over the ranks like label rows; only words that a batch has move.

    A step is `embed`, the loss' backward pass, then `learn`. Rows that several ranks' documents have meet in one
    gradient, which their owner applies.
    """

    def __init__(
        self,
        num_words: int,
        config: WordVectorsConfig,
        *,
        seed: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        # Vectors that never move need no optimiser state.
        kind = "lazy_adam" if config.trained else "sgd"
        super().__init__(
            LabelBlock.of_rank(num_words),
            config.width,
            RowOptimiserConfig(name=kind, weight_decay=0.0, momentum=0.0),
            bound=_RANDOM_BOUND,
            seed=seed,
            dtype=dtype,
            device=device,
        )
        self.trained = config.trained
        self._looked_up: tuple[Tensor, Tensor] | None = None  # words (U,), their vectors (U × e): a leaf

    @torch.no_grad()
    def put(self, words: Tensor, vectors: Tensor) -> None:
        """Set the vectors (n × e) of some words (n,)."""
        mine = self.block.owns(words)
        self.weight[words[mine] - self.block.start] = vectors[mine].to(self.weight)

    def embed(self, ids: Tensor) -> Tensor:
        """(b × T × e) vectors of word ids (b × T). Every rank calls it. What is embedded under torch.no_grad()
        is not learnt from."""
        words, vectors = self._fetch(ids)
        if self.trained and torch.is_grad_enabled():
            vectors.requires_grad_()
            self._looked_up = words, vectors
        return F.embedding(torch.searchsorted(words, ids), vectors)

    @torch.no_grad()
    def _fetch(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The distinct words (U,) of all ranks' ids, rising, and their vectors (U × e)."""
        words = torch.unique(ids)
        if world_size() == 1:
            return words, self.weight[words]
        sizes = [count[0] for count in gather_counts(words.numel(), device=ids.device)]
        words = torch.unique(gather_rows(words, sizes))
        mine = self.block.owns(words)
        vectors = self.weight.new_zeros(words.numel(), self.width)
        vectors[mine] = self.weight[words[mine] - self.block.start]
        dist.all_reduce(vectors)
        return words, vectors

    @torch.no_grad()
    def learn(self, factor: float, lr: float | None) -> None:
        """Move this rank's part of the words that were last embedded by `factor` times the sum of the ranks' gradients;
        without `lr`, store it for `step`. A gradient that overflowed 16 bits teaches nothing."""
        if self._looked_up is None:
            return
        words, vectors = self._looked_up
        self._looked_up = None
        gradient = torch.zeros_like(vectors) if vectors.grad is None else vectors.grad
        if world_size() > 1:
            dist.all_reduce(gradient)
        if not bool(torch.isfinite(gradient.sum())):
            return
        # Padding looks rows up too, and teaches them nothing: their momentum must not move them.
        mine = self.block.owns(words) & gradient.any(1)
        if lr is not None:
            self.begin_step()
        self._move_or_store(words[mine] - self.block.start, gradient[mine] * factor, lr)


# --- encoder --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BiLstmConfig:
    # Hidden width of each direction.
    width: int = 256
    # On the word vectors, and on the states.
    word_dropout: float = 0.2
    dropout: float = 0.5

    def __post_init__(self) -> None:
        if self.width < 1:
            raise InputError(f"encoder.width is {self.width}; it must be at least 1")
        for key in ("word_dropout", "dropout"):
            if not 0.0 <= getattr(self, key) < 1.0:
                raise InputError(f"encoder.{key} is {getattr(self, key)}; it must lie in [0, 1)")


class BiLstm(nn.Module):
    """The states of a one-layer LSTM over a text's words in both directions, from a learned initial state.

    Texts are padded, and turned round for the backward direction, each within its own length: the numbers are those of
    packed sequences, which on a CPU take more than twice as long to train.
    """

    def __init__(self, config: BiLstmConfig, word_width: int) -> None:
        super().__init__()
        self.ahead = nn.LSTM(word_width, config.width, batch_first=True)
        self.back = nn.LSTM(word_width, config.width, batch_first=True)
        self.initial_state = nn.Parameter(
            torch.zeros(2, 2, 1, config.width)
        )  # (direction, h and c, 1, width)
        self.word_dropout = nn.Dropout(config.word_dropout)
        self.dropout = nn.Dropout(config.dropout)

    @property
    def width(self) -> int:
        """Length of a state: both directions."""
        return 2 * self.ahead.hidden_size

    def forward(self, vectors: Tensor, mask: Tensor) -> Tensor:
        """(b × T × 2h) from word vectors (b × T × e) and mask (b × T), padded on the right. States of padding mean
        nothing."""
        vectors = self.word_dropout(vectors.to(self.initial_state.dtype))
        start = self.initial_state.expand(-1, -1, vectors.shape[0], -1).contiguous()
        places = torch.arange(mask.shape[1], device=mask.device)
        turned = mask.sum(1, keepdim=True) - 1 - places
        turned = torch.where(turned >= 0, turned, places)[:, :, None]
        ahead, _ = self.ahead(vectors, (start[0, :1], start[0, 1:]))
        back, _ = self.back(vectors.gather(1, turned.expand_as(vectors)), (start[1, :1], start[1, 1:]))
        return self.dropout(torch.cat([ahead, back.gather(1, turned.expand_as(back))], -1))
