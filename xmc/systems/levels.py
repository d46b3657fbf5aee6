"""The network of a level of AttentionXML's label tree, or of a flat model: built, trained on candidates, searched.

`attention_xml.py` says which levels there are, and in which order they are trained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from safetensors.numpy import load_file as load_arrays
from safetensors.torch import load_file
from torch import Tensor, nn

from raycluster import inference
from raycluster.ingest import Batch
from raycluster.job import Learner
from xmc.corpus.tokens import Sequences
from xmc.corpus.words import PAD_ID
from xmc.errors import InputError
from xmc.labels.topk import NO_LABEL, TopK
from xmc.labels.tree import LabelTree
from xmc.nn.block_files import BlockReader
from xmc.nn.engine import EngineConfig
from xmc.nn.heads.attention_xml import AttentionXmlHead, AttentionXmlModule, MaxPoolModule
from xmc.nn.heads.base import LabelHead
from xmc.nn.heads.light_xml import LabelClusters, LightXmlHead, LightXmlHeadConfig
from xmc.nn.optimisers import RowOptimiserConfig
from xmc.nn.sharding import Ragged, rank_index, world_size
from xmc.nn.words import BiLstm, BiLstmConfig, WordRows
from xmc.systems.neural import load_network, outputs_by_length, prediction_device
from xmc.systems.words import WordsSection, fill_words

# Files: which nodes of level 1 the labels lie under; names of the arrays of candidates.
TOP, NODES, SCORES = "top.safetensors", "nodes", "scores"
_PADDING = (PAD_ID, "right")


@dataclass(frozen=True)
class ModelConfig:
    # flat scores every label; tree trains a network a level; auto: flat up to 31,000 labels.
    mode: Literal["auto", "flat", "tree"] = "auto"
    # Widths of the perceptron's hidden layers.
    hidden_widths: tuple[int, ...] = (256,)
    # false: max-pooling in place of the attentions (Table 4); flat only.
    attention: bool = True
    # C: nodes of a level whose children a document is scored against; cost and memory of a level grow with it.
    candidates: int = 160
    # Train all levels of a tree at once, on candidates drawn around the true parents; none but the first can then be
    # chosen by validation: the others keep their last weights.
    levels_at_once: bool = False

    def __post_init__(self) -> None:
        if any(width < 1 for width in self.hidden_widths):
            raise InputError(f"model.hidden_widths is {self.hidden_widths}; each must be at least 1")
        if self.candidates < 1:
            raise InputError(f"model.candidates is {self.candidates}; it must be at least 1")
        if not self.attention and (self.mode == "tree" or len(self.hidden_widths) != 1):
            raise InputError(
                "model.attention=false is a flat network with one hidden layer: set model.mode=flat and "
                "model.hidden_widths=[512]"
            )


@dataclass(frozen=True)
class Settings:
    """What a rank builds a level's network from."""

    words: WordsSection
    encoder: BiLstmConfig
    model: ModelConfig
    num_labels: int
    num_words: int
    level: int
    seed: int
    # The words' vectors before training; None where a trained network is loaded.
    word_table: Path | None = None
    # The tree, or for level 1 which of its nodes each label lies under; None: flat.
    tree: Path | None = None
    # The stage of the candidates on the level above; None at a level below the first: drawn around the true parents.
    beams: Path | None = None
    # The network of the level above.
    start: Path | None = None


def build(settings: Settings, device: torch.device) -> Learner:
    """A level's network before training, in a rank."""
    tree = None
    node_of: Tensor | None = None
    num_nodes = settings.num_labels
    if settings.tree is not None and settings.tree.name == TOP:
        node_of = torch.from_numpy(load_arrays(settings.tree)["node_of"])
        num_nodes = int(node_of.max()) + 1
    elif settings.tree is not None:
        tree = LabelTree.load(settings.tree)
        num_nodes = tree.level_sizes[settings.level]
        node_of = torch.from_numpy(tree.ancestors(settings.level))
    groups = _groups(tree, settings.level)
    module, head, words = _network(settings, num_nodes, groups, node_of, device, averaging_engine=True)
    assert settings.word_table is not None
    fill_words(words, settings.word_table)
    if settings.start is not None:
        _start_from(settings.start, module, words)
    if groups is None:
        return WordLearner(module, head, words)
    if settings.beams is None:
        assert tree is not None
        return TeacherForced(module, head, words, tree, settings.level, settings.model.candidates)
    return LevelLearner(module, head, words, settings.beams)


def _groups(tree: LabelTree | None, level: int) -> LabelClusters | None:
    """The nodes of a level under those of the level above; None for the first, below the root alone."""
    if tree is None or level == 1:
        return None
    order = torch.from_numpy(tree.children[level - 1].astype(np.int64))
    return LabelClusters(order, torch.from_numpy(tree.offsets[level - 1]))


def _network(
    settings: Settings,
    num_nodes: int,
    groups: LabelClusters | None,
    node_of: Tensor | None,
    device: torch.device,
    *,
    averaging_engine: bool,
) -> tuple[nn.Module, LabelHead, WordRows]:
    seed = settings.seed * 101 + settings.level
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        encoder = BiLstm(settings.encoder, settings.words.vectors.width)
        widths = settings.model.hidden_widths
        module = (
            AttentionXmlModule(encoder, widths)
            if settings.model.attention
            else MaxPoolModule(encoder, widths[0])
        )
    options: dict[str, Any] = {"seed": seed, "averaging_engine": averaging_engine, "device": device}
    head: LabelHead
    if settings.model.attention:
        head = AttentionXmlHead(num_nodes, encoder.width, groups, node_of=node_of, **options)
    else:
        plain = LightXmlHeadConfig(recall_optimiser=RowOptimiserConfig(weight_decay=0.0))
        head = LightXmlHead(plain, num_nodes, widths[0], None, **options)
    words = WordRows(settings.num_words, settings.words.vectors, seed=settings.seed, device=device)
    head.layers["words"] = words
    return module.to(device), head, words


def _start_from(network: Path, module: nn.Module, words: WordRows) -> None:
    """The weights of another level's network, but for its attentions."""
    module.load_state_dict(load_file(network / "module.safetensors"))
    rows = BlockReader(network / "rows")("words", "weight", words.block.start, words.block.stop)
    words.weight.copy_(rows)


class WordLearner(Learner):
    """Looks words up in their table, and lets them learn."""

    def __init__(self, module: nn.Module, head: LabelHead, words: WordRows) -> None:
        super().__init__(module, head)
        self._words = words

    def inputs(self, batch: Batch, tensor: Callable[[np.ndarray], Tensor]) -> tuple[Tensor, ...]:
        return self._words.embed(tensor(batch.input_ids)), tensor(batch.attention_mask)

    def after_backward(self, lr: float | None, factor: float) -> None:
        self._words.learn(factor / self.head.gradient_scale, lr)


class LevelLearner(WordLearner):
    """A level below the first: candidates are the best nodes of the level above, as the stage `candidates-…` found."""

    head: AttentionXmlHead

    def __init__(self, module: nn.Module, head: LabelHead, words: WordRows, beams: Path) -> None:
        super().__init__(module, head, words)
        share = partial(inference.read_vectors, part=rank_index(), of_parts=world_size())
        self._parents = share(beams / "train")[NODES]
        self._beam = share(beams / "valid") if (beams / "valid").is_dir() else {}

    def loss(self, outputs: Any, targets: Ragged, rows: np.ndarray, lr: float | None) -> Tensor:
        return self.head.loss(
            outputs, targets, lr=lr, parents=to_tensor(self._parents[rows], outputs[0].device)
        )

    def top_k(self, outputs: Any, rows: np.ndarray, k: int) -> tuple[Tensor, Tensor]:
        device = outputs[0].device
        scores = torch.from_numpy(self._beam[SCORES][rows]).to(device)
        return self.head.top_k(outputs, k, (to_tensor(self._beam[NODES][rows], device), scores))


class TeacherForced(WordLearner):
    """A level below the first, trained without the level above: its candidates are the true parents and others drawn
    anew at each step, siblings of the true ones first."""

    head: AttentionXmlHead

    def __init__(
        self,
        module: nn.Module,
        head: LabelHead,
        words: WordRows,
        tree: LabelTree,
        level: int,
        candidates: int,
    ) -> None:
        super().__init__(module, head, words)
        self._tree, self._level, self._candidates = tree, level, candidates
        self._parent_of = tree.ancestors(level - 1)

    def loss(self, outputs: Any, targets: Ragged, rows: np.ndarray, lr: float | None) -> Tensor:
        # Torch's generator is in the checkpoints: a resumed run draws the same.
        generator = np.random.default_rng(int(torch.randint(2**62, ())))
        parents = draw_siblings(
            self._tree,
            self._level - 1,
            self._parent_of[targets.ids.cpu().numpy()],
            targets.documents().cpu().numpy(),
            len(targets),
            self._candidates,
            generator,
        )
        return self.head.loss(outputs, targets, lr=lr, parents=to_tensor(parents, outputs[0].device))


def draw_siblings(
    tree: LabelTree,
    level: int,
    nodes: np.ndarray,
    documents: np.ndarray,
    num_documents: int,
    count: int,
    generator: np.random.Generator,
) -> np.ndarray:
    """(num_documents × count) nodes of a level: random siblings of the given `nodes` (n,) of each document, `documents`
    (n,) saying whose they are; where there are fewer siblings, any nodes. A node may come twice."""
    above, size = tree.level_sizes[level - 1], tree.level_sizes[level]
    families = np.unique(documents * above + tree.parents[level - 1][nodes])
    siblings, source = tree.gather_children(level - 1, families % above)
    owners = (families // above)[source]
    order = np.argsort(owners + generator.random(len(owners)), kind="stable")
    siblings, owners = siblings[order], owners[order]
    begins = np.searchsorted(owners, np.arange(num_documents))
    places = np.arange(len(owners)) - begins[owners]
    drawn = generator.integers(0, size, (num_documents, count), dtype=np.int32)
    drawn[owners[places < count], places[places < count]] = siblings[places < count]
    return drawn


def to_tensor(nodes: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(nodes.astype(np.int64)).to(device)


class Level(NamedTuple):
    """The trained network of a level, or of a flat model."""

    module: nn.Module
    head: LabelHead
    words: WordRows

    def outputs(self, sequences: Sequences) -> Iterator[tuple[np.ndarray, Any]]:
        """(rows, outputs of the module) over all sequences."""
        return outputs_by_length(
            self.module, sequences, _PADDING, inputs=lambda rows, ids, mask: (self.words.embed(ids), mask)
        )

    def best(self, sequences: Sequences, k: int, above: TopK | None = None) -> TopK:
        """The k best nodes of each sequence, of those below the nodes `above` if these are given. Scores are
        products of probabilities down the path."""
        shape = (len(sequences), k)
        nodes, scores = np.full(shape, NO_LABEL, np.int32), np.full(shape, -np.inf, np.float32)
        for rows, outputs in self.outputs(sequences):
            if above is None:
                best, found = self.head.top_k(outputs, k)
            else:
                assert isinstance(self.head, AttentionXmlHead)
                device = outputs[0].device
                beam = (
                    to_tensor(above.label_ids[rows], device),
                    torch.from_numpy(above.scores[rows]).to(device),
                )
                best, found = self.head.top_k(outputs, k, beam)
            scores[rows], nodes[rows] = best.cpu().numpy(), found.cpu().numpy()
        return TopK(nodes, scores)


def load_level(settings: Settings, network: Path, tree: LabelTree | None, engine: EngineConfig) -> Level:
    """A level's network from its directory."""
    num_nodes = settings.num_labels if tree is None else tree.level_sizes[settings.level]
    groups = _groups(tree, settings.level)
    level = Level(*_network(settings, num_nodes, groups, None, prediction_device(), averaging_engine=False))
    load_network(level.module, level.head, network, engine)
    return level
