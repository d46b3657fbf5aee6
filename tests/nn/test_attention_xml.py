"""AttentionXML's module, head and words on one rank; equality at several ranks is in test_attention_xml_ranks."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from xmc.errors import InputError
from xmc.nn.block_files import BlockReader, write_blocks
from xmc.nn.heads import attention_xml
from xmc.nn.heads.attention_xml import AttentionXmlHead, AttentionXmlModule, MaxPoolModule, attention
from xmc.nn.heads.light_xml import LabelClusters
from xmc.nn.sharding import Ragged
from xmc.nn.words import BiLstm, BiLstmConfig, WordRows, WordVectorsConfig, read_vectors

NUM_WORDS, WORD_WIDTH, NUM_LABELS = 50, 5, 24
QUIET = BiLstmConfig(width=4, word_dropout=0.0, dropout=0.0)
GROUPS = LabelClusters.from_assignment(torch.arange(NUM_LABELS) % 6, 6)


def _module(hidden: tuple[int, ...] = (6, 3)) -> AttentionXmlModule:
    torch.manual_seed(0)
    return AttentionXmlModule(BiLstm(QUIET, WORD_WIDTH), hidden).double()


def _texts(count: int = 7, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 9, (count,), generator=generator)
    lengths[0] = 9
    mask = (torch.arange(9) < lengths[:, None]).long()
    return torch.randint(2, NUM_WORDS, (count, 9), generator=generator) * mask, mask


def _head(groups: LabelClusters | None = None, **options) -> AttentionXmlHead:
    return AttentionXmlHead(NUM_LABELS, 8, groups, seed=3, dtype=torch.float64, **options)


def test_attention_by_hand() -> None:
    """Two words, one of padding; a label that looks at the first coordinate and one that looks at nothing."""
    states = torch.tensor([[[1.0, 2.0], [3.0, -1.0], [9.0, 9.0]]])
    mask = torch.tensor([[True, True, False]])
    weights = attention(states, mask, torch.tensor([[math.log(3.0) / 2, 0.0], [0.0, 0.0]]))
    # e^(log 3 / 2) : e^(3 log 3 / 2) = 1 : 3
    torch.testing.assert_close(weights, torch.tensor([[[0.25, 0.75, 0.0], [0.5, 0.5, 0.0]]]))
    mixed = weights @ states
    torch.testing.assert_close(mixed, torch.tensor([[[2.5, -0.25], [2.0, 0.5]]]))


def _reference_logits(module: AttentionXmlModule, head: AttentionXmlHead, vectors, mask) -> torch.Tensor:
    """(B × L) as the paper writes it: label by label, the perceptron after the mixing."""
    states = module.encoder(vectors, mask)
    rows = head.rows.weight if head.groups is None else torch.empty_like(head.rows.weight)
    if head.groups is not None:
        rows[head.groups.order] = head.rows.weight
    logits = []
    for i in range(len(states)):
        words = states[i, : int(mask[i].sum())]
        of_document = []
        for row in rows:
            x = torch.softmax(words @ row, 0) @ words
            x = module.first(x)
            for layer in module.others:
                x = torch.nn.functional.linear(torch.relu(x), layer.weight, layer.bias)
            of_document.append(x)
        logits.append(torch.cat(of_document))
    return torch.stack(logits)


@pytest.mark.parametrize("hidden", [(), (6,), (6, 3)])
@pytest.mark.parametrize("chunk_bytes", [2**10, 2**25])
def test_loss_and_gradients_equal_the_papers_formula(
    hidden: tuple[int, ...], chunk_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(attention_xml._CHUNK_BYTES, "cpu", chunk_bytes)
    monkeypatch.setattr(attention_xml, "_LEAST_ROWS", 5)
    module, head = _module(hidden), _head()
    ids, mask = _texts()
    vectors = torch.randn(*ids.shape, WORD_WIDTH, dtype=torch.float64, requires_grad=True)
    targets = [[0, 5], [], [23], [1, 2, 3], [7], [7, 7], [11]]
    truth = torch.zeros(7, NUM_LABELS, dtype=torch.float64)
    for i, labels in enumerate(targets):
        truth[i, labels] = 1.0
    loss = head.loss(module(vectors, mask), Ragged.from_lists(targets))
    loss.backward()
    found = {name: p.grad.clone() for name, p in module.named_parameters()} | {
        "vectors": vectors.grad.clone()
    }
    module.zero_grad()
    vectors.grad = None
    rows = head.rows.weight.requires_grad_()
    expected = torch.nn.functional.binary_cross_entropy_with_logits(
        _reference_logits(module, head, vectors, mask), truth
    )
    expected.backward()
    torch.testing.assert_close(loss, expected)
    for name, p in module.named_parameters():
        torch.testing.assert_close(
            found[name], p.grad, rtol=1e-9, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}"
        )
    torch.testing.assert_close(found["vectors"], vectors.grad, rtol=1e-9, atol=1e-12)
    _, gradient = head.rows._mean_gradient()
    torch.testing.assert_close(gradient, rows.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("chunk_bytes", [2**10, 2**25])
def test_all_parents_as_candidates_equal_no_tree(chunk_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tree that leaves nothing out is no tree: same loss, gradients, moved rows and best labels."""
    monkeypatch.setitem(attention_xml._CHUNK_BYTES, "cpu", chunk_bytes)
    flat, tree = _head(), _head(GROUPS)
    tree.rows.weight.copy_(flat.rows.weight[GROUPS.order])
    ids, mask = _texts()
    targets = Ragged.from_lists([[0, 5], [], [23], [1, 2, 3], [7], [8], [11]])
    everyone = torch.stack([torch.randperm(6) for _ in range(7)])
    results = []
    for head, options in ((flat, {}), (tree, {"parents": everyone})):
        module = _module()
        vectors = (
            torch.ones(*ids.shape, WORD_WIDTH, dtype=torch.float64).mul(ids[:, :, None] / 10).requires_grad_()
        )
        for _ in range(3):
            loss = head.loss(module(vectors, mask), targets, lr=0.1, **options)
        loss.backward()
        results.append([loss.detach(), vectors.grad, *(p.grad for p in module.parameters())])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(tree.rows.weight, flat.rows.weight[GROUPS.order], rtol=1e-9, atol=1e-12)
    outputs = _module()(vectors, mask)
    scores, labels = flat.top_k(outputs, 5)
    in_tree, labels_in_tree = tree.top_k(outputs, 5, (everyone, torch.ones(7, 6)))
    torch.testing.assert_close(scores, in_tree)
    assert torch.equal(labels, labels_in_tree)


def test_only_children_of_true_and_candidate_parents_are_scored_and_moved() -> None:
    module, head = _module(), _head(GROUPS)
    ids, mask = _texts(3)
    vectors = torch.randn(*ids.shape, WORD_WIDTH, dtype=torch.float64)
    parents = torch.tensor([[2, 4, 0], [4, -1, -1], [-1, -1, -1]])
    outputs = module(vectors, mask)
    logits = _reference_logits(module, head, vectors, mask)
    # The true parents 2 and 3 of the first document leave room for one other of its three candidates; the last
    # document has neither candidates nor labels.
    pairs = [(0, label) for label in range(NUM_LABELS) if label % 6 in (2, 3, 4)]
    pairs += [(1, label) for label in range(NUM_LABELS) if label % 6 == 4]
    truth = torch.tensor([float(pair in ((0, 2), (0, 3), (1, 10))) for pair in pairs], dtype=torch.float64)
    expected = torch.nn.functional.binary_cross_entropy_with_logits(
        torch.stack([logits[pair] for pair in pairs]), truth
    )
    before = head.rows.weight.clone()
    loss = head.loss(outputs, Ragged.from_lists([[2, 3], [10], []]), lr=0.1, parents=parents)
    torch.testing.assert_close(loss, expected)
    moved = (head.rows.weight != before).any(1)
    assert moved[head._position].nonzero()[:, 0].tolist() == sorted({label for _, label in pairs})


def test_probabilities_multiply_down_the_path() -> None:
    module, head = _module(), _head(GROUPS)
    ids, mask = _texts(2)
    vectors = torch.randn(*ids.shape, WORD_WIDTH, dtype=torch.float64)
    nodes, probabilities = torch.tensor([[5, 1], [0, -1]]), torch.tensor([[0.9, 0.2], [0.5, float("-inf")]])
    expected = torch.sigmoid(_reference_logits(module, head, vectors, mask)).float()
    scale = torch.zeros(2, 6).scatter_(1, nodes.clamp_min(0), probabilities.clamp_min(0.0))
    scale[1, 0] = 0.5
    expected = expected * scale[:, torch.arange(NUM_LABELS) % 6]
    scores, labels = head.top_k(module(vectors, mask), 6, (nodes, probabilities))
    best = expected.topk(6, dim=1)
    torch.testing.assert_close(scores[0], best.values[0])
    assert torch.equal(labels[0], best.indices[0])
    assert labels[1].tolist()[4:] == [-1, -1], "only four labels lie under the second document's node"
    torch.testing.assert_close(scores[1, :4], best.values[1, :4])


def test_explanations_are_the_attention_of_the_labels() -> None:
    module, head = _module(), _head(GROUPS)
    ids, mask = _texts(3)
    outputs = module(torch.randn(*ids.shape, WORD_WIDTH, dtype=torch.float64), mask)
    weights = head.attention(outputs, torch.tensor([[7, 1], [0, 0], [23, 5]]))
    torch.testing.assert_close(weights.sum(-1), torch.ones(3, 2, dtype=torch.float64))
    assert (weights[mask[:, None, :].expand_as(weights) == 0] == 0).all()
    row = head.rows.weight[head._position[7]]
    words = outputs[0][0, : int(mask[0].sum())]
    torch.testing.assert_close(weights[0, 0, : len(words)], torch.softmax(words @ row, 0))


def test_it_learns() -> None:
    """Each document's labels are said by one word somewhere in it."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(30, NUM_WORDS, (NUM_LABELS, 6), generator=generator)
    places = torch.randint(0, 6, (NUM_LABELS,), generator=generator)
    ids[torch.arange(NUM_LABELS), places] = torch.arange(NUM_LABELS) + 2
    mask = torch.ones_like(ids)
    labels = [[i, (i * 7 + 1) % NUM_LABELS] for i in range(NUM_LABELS)]
    torch.manual_seed(0)
    module = AttentionXmlModule(BiLstm(BiLstmConfig(16, 0.0, 0.0), WORD_WIDTH), (16,))
    words = WordRows(NUM_WORDS, WordVectorsConfig(width=WORD_WIDTH), seed=0)
    head = AttentionXmlHead(NUM_LABELS, 32, None, seed=0)
    head.layers["words"] = words
    optimiser = torch.optim.Adam(module.parameters(), lr=1e-2)
    for _ in range(150):
        loss = head.loss(module(words.embed(ids), mask), Ragged.from_lists(labels), lr=1e-2)
        optimiser.zero_grad()
        loss.backward()
        words.learn(1.0, 1e-2)
        optimiser.step()
    with torch.no_grad():
        _, best = head.top_k(module(words.embed(ids), mask), 2)
    hits = [len(set(got) & set(true)) for got, true in zip(best.tolist(), labels, strict=True)]
    assert sum(hits) > 0.9 * 2 * NUM_LABELS


def test_saved_rows_come_back_and_another_tree_is_refused(tmp_path: Path) -> None:
    head = _head(GROUPS)
    write_blocks(head.export_blocks(with_optimiser=True), tmp_path)
    other = AttentionXmlHead(NUM_LABELS, 8, GROUPS, seed=4, dtype=torch.float64)
    other.load_rows(BlockReader(tmp_path), with_optimiser=True)
    other.load_shared_state(head.shared_state())
    assert torch.equal(other.rows.weight, head.rows.weight)
    groups = LabelClusters.from_assignment(torch.arange(NUM_LABELS) // 4, 6)
    with pytest.raises(InputError, match="another label tree"):
        _head(groups).load_shared_state(head.shared_state())
    with pytest.raises(InputError, match="24 children, the level 25 nodes"):
        AttentionXmlHead(NUM_LABELS + 1, 8, GROUPS, seed=0)


def test_validation_loss_learns_nothing() -> None:
    ids, mask = _texts(2)
    for head, options in ((_head(), {}), (_head(GROUPS), {"parents": torch.tensor([[1], [2]])})):
        before = head.rows.weight.clone()
        with torch.no_grad():
            outputs = _module()(torch.randn(*ids.shape, WORD_WIDTH, dtype=torch.float64), mask)
            loss = head.loss(outputs, Ragged.from_lists([[1], [2]]), lr=0.1, **options)
        head.step(0.1)
        assert float(loss) > 0
        assert torch.equal(head.rows.weight, before)


def test_padding_changes_nothing() -> None:
    """A text's states and pooled vector are its own, whatever it is batched with."""
    ids, mask = _texts()
    vectors = torch.randn(*ids.shape, WORD_WIDTH, dtype=torch.float64)
    encoder = BiLstm(QUIET, WORD_WIDTH).double()
    encoder.initial_state.data.normal_()
    together = encoder(vectors, mask)
    pooled = MaxPoolModule(encoder, 5).double()
    for i in range(len(ids)):
        length = int(mask[i].sum())
        alone = vectors[i : i + 1, :length], mask[i : i + 1, :length]
        torch.testing.assert_close(encoder(*alone)[0], together[i, :length])
        torch.testing.assert_close(pooled(*alone)[0][0], pooled(vectors, mask)[0][i])


def test_states_are_those_of_torchs_packed_sequences() -> None:
    ids, mask = _texts()
    vectors = torch.randn(*ids.shape, WORD_WIDTH, dtype=torch.float64)
    encoder = BiLstm(QUIET, WORD_WIDTH).double()
    encoder.initial_state.data.normal_()
    both = torch.nn.LSTM(WORD_WIDTH, QUIET.width, batch_first=True, bidirectional=True, dtype=torch.float64)
    for name, p in encoder.ahead.named_parameters():
        getattr(both, name).data.copy_(p)
        getattr(both, f"{name}_reverse").data.copy_(getattr(encoder.back, name))
    start = encoder.initial_state.transpose(0, 1).expand(-1, -1, len(ids), -1).contiguous()
    packed = pack_padded_sequence(vectors, mask.sum(1), batch_first=True, enforce_sorted=False)
    expected, _ = pad_packed_sequence(both(packed, tuple(start))[0], batch_first=True)
    torch.testing.assert_close(encoder(vectors, mask) * mask[:, :, None], expected)


# --- words ----------------------------------------------------------------------------------------------------------


def test_words_move_as_an_embedding_under_sparse_adam() -> None:
    words = WordRows(NUM_WORDS, WordVectorsConfig(width=4), seed=1, dtype=torch.float64)
    table = torch.nn.Embedding(NUM_WORDS, 4, sparse=True, dtype=torch.float64)
    table.weight.data.copy_(words.weight)
    reference = torch.optim.SparseAdam(table.parameters(), lr=0.1)
    for step in range(4):
        ids, _ = _texts(3, seed=step)
        factors = torch.randn(3, 9, 4, dtype=torch.float64)
        (words.embed(ids) * factors).sum().backward()
        words.learn(2.0, 0.1)  # the caller's factor
        reference.zero_grad()
        (2.0 * table(ids) * factors).sum().backward()
        reference.step()
        torch.testing.assert_close(words.weight, table.weight.detach())


def test_frozen_words_and_overflown_gradients_stay() -> None:
    for trained in (False, True):
        words = WordRows(NUM_WORDS, WordVectorsConfig(width=4, trained=trained), seed=1)
        before = words.weight.clone()
        vectors = words.embed(torch.tensor([[3, 4]]))
        assert vectors.requires_grad == trained
        if trained:
            (vectors * float("inf")).sum().backward()
        words.learn(1.0, 0.1)
        assert torch.equal(words.weight, before)
    assert not WordRows(5, WordVectorsConfig(width=4, trained=False), seed=1).optimisers["weight"].state


VOCABULARY = ["the", "cat", "new york", "naïve"]
TEXT = "the 1 2 3\nnew york 4 5 6.5\ndog 7 8 9\nna\u00efve -1e-3 0 1\nthe 9 9 9\n"


@pytest.mark.parametrize("header", ["", "5 3\n"], ids=["GloVe", "word2vec"])
def test_text_vectors(header: str, tmp_path: Path) -> None:
    path = tmp_path / "vectors.txt"
    path.write_text(header + TEXT, encoding="utf-8")
    places, vectors = read_vectors(path, VOCABULARY, 3)
    assert places.tolist() == [0, 2, 3]
    np.testing.assert_allclose(vectors, [[1, 2, 3], [4, 5, 6.5], [-1e-3, 0, 1]])
    assert vectors.dtype == np.float32


@pytest.mark.parametrize("newline", [b"", b"\n"])
def test_binary_vectors(newline: bytes, tmp_path: Path) -> None:
    path = tmp_path / "vectors.bin"
    entries = [(b"cat", [1.0, 2.0]), (b"dog", [3.0, 4.0]), ("naïve".encode(), [5.0, 6.0])]
    data = b"3 2\n" + b"".join(w + b" " + np.array(v, "<f4").tobytes() + newline for w, v in entries)
    path.write_bytes(data)
    places, vectors = read_vectors(path, VOCABULARY, 2)
    assert places.tolist() == [1, 3]
    np.testing.assert_array_equal(vectors, [[1, 2], [5, 6]])
    path.write_bytes(data[:-6])
    with pytest.raises(InputError, match="ends after 2 of its 3"):
        read_vectors(path, VOCABULARY, 2)


@pytest.mark.parametrize(
    ("text", "width", "message"),
    [
        (TEXT, 4, r"vectors.txt:1: is not a word and 4 numbers"),
        ("5 3\n" + TEXT, 300, "3 wide, but words.vectors.width is 300"),
        ("the 1 two 3\n", 3, r"vectors.txt:1: .*two"),
        ("dog 1 2 3\n", 3, "no vector of any of the vocabulary's 4 words"),
    ],
)
def test_vector_files_that_do_not_fit(text: str, width: int, message: str, tmp_path: Path) -> None:
    path = tmp_path / "vectors.txt"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=message):
        read_vectors(path, VOCABULARY, width)
    with pytest.raises(InputError, match="cannot be read"):
        read_vectors(tmp_path / "missing.txt", VOCABULARY, 3)
