"""AttentionXML (You et al. 2019): a BiLSTM whose states each label reads by an attention of its own, level by level of
a shallow and wide label tree.

Method: word vectors, a BiLSTM, an attention a label, a perceptron that all labels share. Without a tree (flat) every
label is scored. With one, a network a level: the first scores all of its nodes; the others, the children of a
document's candidate parents, which in training are its true ones and the best that the levels above name, and in
prediction those best ones alone (a beam). A level starts from the weights of the level above, but for its attentions.
Loss: mean BCE over the labels (nodes) that are scored. Score: the product of the probabilities down the path.
Stages: corpus → tokens → words → train → model → evaluate; or with a tree … words, tfidf → level-1 → candidates-1 →
level-2 → … → model → evaluate. The labels are clustered while level 1 trains: it needs the first splits only.
Needs text. Suits label sets of any size: flat up to some 30,000 labels, a tree beyond. `members: [{seed: 1}, {seed:
2}]` trains several trees and averages them.
Switches: model.attention=false is Table 4's network with max-pooling, train.average_from=0 is without SWA (all three:
attention_xml.debian_tags_ablation); model.levels_at_once=true trains all levels at the same time, each with candidates
drawn around the true parents instead of the level above's best (faster where there is room for all levels; loses what
it learns from real mistakes). One to three trees, and levels at once: attention_xml.debian_deps_trees.

    python -m xmc.train attention_xml corpus.path=DIR run.dir=DIR
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import ray
import torch
from safetensors.numpy import load_file as load_arrays
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import load_file
from torch import Tensor, nn

from raycluster import inference, pool, session, trainer
from raycluster.ingest import Batch
from raycluster.job import STEPS_FILE, Learner, TrainConfig
from raycluster.stages import Stage
from xmc.config import CommonConfig
from xmc.corpus.store import Corpus
from xmc.corpus.tfidf import TfidfConfig
from xmc.corpus.tokens import Sequences, gather
from xmc.corpus.words import PAD_ID, WORD_PATTERN, Vocabulary, split_words
from xmc.errors import InputError
from xmc.files import atomic_file, atomic_write_text
from xmc.labels.clustering import ClusterConfig, cluster_labels, count_clusters
from xmc.labels.topk import TopK
from xmc.labels.tree import LabelTree, TreeConfig, build_tree, kept_levels
from xmc.nn.block_files import BlockReader
from xmc.nn.engine import EngineConfig
from xmc.nn.heads.attention_xml import AttentionXmlHead, AttentionXmlModule, MaxPoolModule
from xmc.nn.heads.base import LabelHead
from xmc.nn.heads.light_xml import LabelClusters, LightXmlHead, LightXmlHeadConfig
from xmc.nn.optimisers import RowOptimiserConfig
from xmc.nn.sharding import Ragged, rank_index, world_size
from xmc.nn.words import BiLstm, BiLstmConfig, WordRows
from xmc.systems import shared_stages
from xmc.systems.neural import (
    StepCallback,
    link_file,
    link_tree,
    load_network,
    outputs_by_length,
    prediction_device,
    train_network,
)
from xmc.systems.words import VOCABULARY, WORD_TABLE, WordsSection, fill_words, num_words, words_stages

__all__ = ["Config", "assemble", "build", "load_predictor", "stages"]

# Beyond this many labels the paper builds a tree.
_FLAT_UP_TO = 31_000
TREE, TOP, NODES, SCORES = "tree.npz", "top.safetensors", "nodes", "scores"
_PADDING = (PAD_ID, "right")
_WORDS_SHOWN = 10


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
class Config(CommonConfig):
    words: WordsSection = field(default_factory=WordsSection)
    encoder: BiLstmConfig = field(default_factory=BiLstmConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    # Of the tree: labels by their documents' TF-IDF, clusters of at most M labels, K ways.
    tfidf: TfidfConfig = field(default_factory=TfidfConfig)
    clusters: ClusterConfig = field(default_factory=lambda: ClusterConfig(max_leaf_size=8))
    tree: TreeConfig = field(default_factory=TreeConfig)
    engine: EngineConfig = field(default_factory=lambda: EngineConfig(weight_decay=0.0))
    train: TrainConfig = field(default_factory=TrainConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.clusters.seed != ClusterConfig().seed:
            raise InputError("clusters.seed follows from seed: set that")
        if self.engine.zero_stage == 2 and self.train.workers > 1:
            raise InputError(
                "engine.zero_stage=2 sums gradients in the order in which they arrive, and an LSTM's come in one that "
                "differs between workers; use 0, 1 or 3"
            )


def is_tree(config: Config, num_labels: int) -> bool:
    mode = config.model.mode
    return mode == "tree" or (mode == "auto" and config.model.attention and num_labels > _FLAT_UP_TO)


# ------------------------------------------------------------------------------------------------ stages


def stages(config: Config, corpus: Corpus, on_steps: StepCallback) -> list[Stage]:
    """All between the corpus and the trained networks; `on_steps` gets the rows of step metrics."""
    own = words_stages(config.words, config.seed)
    if not is_tree(config, corpus.num_labels):
        if config.model.levels_at_once:
            raise InputError(
                f"model.levels_at_once=true trains the levels of a tree, but model.mode={config.model.mode} with "
                f"{corpus.num_labels:,} labels means none; set model.mode=tree"
            )
        return [*own, _flat_stage(config, corpus.num_labels, on_steps)]
    own.append(shared_stages.tfidf_stage(config.tfidf))
    if config.model.levels_at_once:
        own.append(shared_stages.clusters_stage(config.clusters, config.seed))
        return [*own, _levels_stage(config, corpus.num_labels, on_steps)]
    own.append(_first_level_stage(config, corpus.num_labels, on_steps))
    for level in range(2, _num_levels(config, corpus.num_labels) + 1):
        own.append(_candidates_stage(config, level - 1))
        own.append(_level_stage(config, level, corpus.num_labels, on_steps))
    return own


def _num_levels(config: Config, num_labels: int) -> int:
    """Levels below the root, the labels among them."""
    return len(kept_levels(count_clusters(num_labels, config.clusters), config.tree)) + 1


def _settings_of(config: Config) -> dict[str, Any]:
    """The settings that a trained network follows from. Its inputs (words, tree, candidates) stand for theirs."""
    return {
        "words": asdict(config.words),
        "encoder": asdict(config.encoder),
        "hidden_widths": config.model.hidden_widths,
        "attention": config.model.attention,
        "engine": asdict(config.engine),
        "train": asdict(config.train),
        "seed": config.seed,
    }


def _flat_stage(config: Config, num_labels: int, on_steps: StepCallback) -> Stage:
    def run(out: Path, given: Mapping[str, Path]) -> None:
        settings = _settings(config, given, num_labels, 1)
        train_network(config, build, settings, out, given, on_steps)

    return Stage("train", _settings_of(config), run, ("corpus", "tokens", "words"), resumes=True)


def _first_level_stage(config: Config, num_labels: int, on_steps: StepCallback) -> Stage:
    """Level 1, and meanwhile the clustering of the labels below it: the tree lies beside the network."""
    seeded = replace(config.clusters, seed=config.seed)

    def run(out: Path, given: Mapping[str, Path]) -> None:
        resolved = {name: path.resolve() for name, path in given.items()}
        growing = ray.remote(num_cpus=1)(_grow_tree).remote(resolved, seeded, config.tree, out.resolve())
        _wait_for(out / TOP, growing)
        settings = replace(_settings(config, given, num_labels, 1), tree=out / TOP)
        train_network(config, build, settings, out, given, _numbered(on_steps, 1, ()))
        gather([growing])

    settings = _settings_of(config) | {"clusters": asdict(seeded), "tree": asdict(config.tree)}
    return Stage("level-1", settings, run, ("corpus", "tokens", "words", "tfidf"), resumes=True)


def _grow_tree(given: Mapping[str, Path], clusters: ClusterConfig, tree: TreeConfig, out: Path) -> None:
    """Cluster the labels; write which nodes of level 1 they lie under as soon as that is known, the tree at the end."""
    if (out / TREE).exists():
        return
    features = shared_stages.pifa_of_tfidf(given)
    top = kept_levels(count_clusters(features.shape[0], clusters), tree)[0]

    def split(level: int, node_of: np.ndarray) -> None:
        if level == top:
            with atomic_file(out / TOP) as temporary:
                save_arrays({"node_of": node_of}, temporary)

    build_tree(cluster_labels(features, clusters, split), tree).save(out / TREE)


def _wait_for(file: Path, task: ray.ObjectRef) -> None:
    """Until a file is there; an error of the task that writes it is raised."""
    while not file.exists():
        done, _ = ray.wait([task], timeout=0.5)
        if done:
            gather(done)


def _candidates_stage(config: Config, level: int) -> Stage:
    """The best nodes of a level for all documents, by a beam down to it: candidates for the level below."""

    def run(out: Path, given: Mapping[str, Path]) -> None:
        resolved = {name: path.resolve() for name, path in given.items()}
        for split in ("train", "valid"):
            tokens = resolved["tokens"] / split
            if tokens.is_dir():
                make = partial(_beam, config, resolved, level)
                inference.write_vectors(tokens, make, (out / split).resolve(), f"candidates-{level}")

    inputs = ("tokens", *(f"level-{above}" for above in range(1, level + 1)))
    settings = {"candidates": config.model.candidates}
    return Stage(f"candidates-{level}", settings, run, inputs, resumes=True)


def _level_stage(config: Config, level: int, num_labels: int, on_steps: StepCallback) -> Stage:
    def run(out: Path, given: Mapping[str, Path]) -> None:
        settings = replace(
            _settings(config, given, num_labels, level),
            tree=given["level-1"] / TREE,
            beams=given[f"candidates-{level - 1}"],
            start=given[f"level-{level - 1}"] / "network",
        )
        homes = [given[f"level-{d}"] for d in range(1, level)]
        train_network(config, build, settings, out, given, _numbered(on_steps, level, homes))

    above = (name for d in range(1, level) for name in (f"level-{d}", f"candidates-{d}"))
    return Stage(
        f"level-{level}", _settings_of(config), run, ("corpus", "tokens", "words", *above), resumes=True
    )


def _numbered(on_steps: StepCallback, level: int, above: Sequence[Path]) -> StepCallback:
    """Steps of a level counted on from those of the levels `above`, their metrics named after the level."""
    before = sum(int(_steps_of(home)[-1]["step"]) for home in above)

    def renamed(rows: list[dict[str, float]]) -> None:
        on_steps(
            [
                # By the plain loss MLflow knows how far an interrupted run was logged.
                {"step": row["step"] + before, "time": row["time"], "loss": row["loss"]}
                | {f"level_{level}_{key}": v for key, v in row.items() if key not in ("step", "time")}
                for row in rows
            ]
        )

    return renamed


def _steps_of(home: Path) -> list[dict[str, float]]:
    """The rows of step metrics that training left."""
    return [json.loads(line) for line in (home / STEPS_FILE).read_text().splitlines()]


def _levels_stage(config: Config, num_labels: int, on_steps: StepCallback) -> Stage:
    """All levels at once, as many as there is room for; those that are done stay done."""

    def run(out: Path, given: Mapping[str, Path]) -> None:
        if not (out / TREE).exists():
            build_tree(
                shared_stages.load_clusters(given["clusters"] / "clusters.safetensors"), config.tree
            ).save(out / TREE)
        levels = range(1, _num_levels(config, num_labels) + 1)
        resolved = {name: path.resolve() for name, path in given.items()}
        jobs = {
            f"level {level}": partial(_train_alone, config, num_labels, level, out.resolve(), resolved)
            for level in levels
        }
        at_once = min(pool.room(*trainer.group_resources(config.train)), len(jobs))
        pool.run_all(jobs, at_once, out / "messages.txt")
        homes = [out / f"level-{level}" for level in levels]
        for level, home in zip(levels, homes, strict=True):
            _numbered(on_steps, level, homes[: level - 1])(_steps_of(home))

    settings = _settings_of(config) | {"tree": asdict(config.tree), "candidates": config.model.candidates}
    return Stage("levels", settings, run, ("corpus", "tokens", "words", "clusters"), resumes=True)


def _train_alone(config: Config, num_labels: int, level: int, out: Path, given: Mapping[str, Path]) -> None:
    """In an actor: one level, on true parents and drawn others."""
    session.connect()
    home = out / f"level-{level}"
    if (home / "done").exists():
        return
    settings = replace(_settings(config, given, num_labels, level), tree=out / TREE)
    if level > 1:  # nothing above is there yet to find candidates for validation by
        config = replace(config, train=replace(config.train, keep="last"))
    train_network(config, build, settings, home, given, lambda rows: None, validate=level == 1)
    atomic_write_text(home / "done", "")


# ------------------------------------------------------------------------------------------------ networks


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


def _settings(config: Config, given: Mapping[str, Path], num_labels: int, level: int) -> Settings:
    table = given["words"] / WORD_TABLE
    return Settings(
        config.words, config.encoder, config.model, num_labels, num_words(table), level, config.seed, table
    )


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
        self._parents = self._share(beams / "train")[NODES]
        self._beam = self._share(beams / "valid") if (beams / "valid").is_dir() else {}

    @staticmethod
    def _share(directory: Path) -> dict[str, np.ndarray]:
        """The rows of this rank's documents: the same contiguous share that Ray Data gives it."""
        found = inference.read_vectors(directory)
        count, rank, world = len(found[NODES]), rank_index(), world_size()
        return {
            name: x[count * rank // world : count * (rank + 1) // world].copy() for name, x in found.items()
        }

    def loss(self, outputs: Any, targets: Ragged, rows: np.ndarray, lr: float | None) -> Tensor:
        return self.head.loss(outputs, targets, lr=lr, parents=_to(self._parents[rows], outputs[0].device))

    def top_k(self, outputs: Any, rows: np.ndarray, k: int) -> tuple[Tensor, Tensor]:
        device = outputs[0].device
        scores = torch.from_numpy(self._beam[SCORES][rows]).to(device)
        return self.head.top_k(outputs, k, (_to(self._beam[NODES][rows], device), scores))


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
        return self.head.loss(outputs, targets, lr=lr, parents=_to(parents, outputs[0].device))


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


def _to(nodes: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(nodes.astype(np.int64)).to(device)


# ------------------------------------------------------------------------------------------------ the model


class Beam:
    """The networks of the first levels of a tree, or of a flat model alone: best nodes of the last of them."""

    def __init__(self, levels: Sequence[tuple[nn.Module, LabelHead, WordRows]], width: int) -> None:
        """`width`: nodes that are kept of each level but the last."""
        self._levels, self._width = [(module.eval(), head, words) for module, head, words in levels], width

    def best(self, sequences: Sequences, k: int) -> tuple[np.ndarray, np.ndarray]:
        """(N × k) the best nodes, int32, and their probabilities, float32, best first, padded with −1 and −inf."""
        nodes, scores = np.zeros((len(sequences), 0), np.int32), np.zeros((len(sequences), 0), np.float32)
        for depth, (_, head, _) in enumerate(self._levels):
            width = k if depth == len(self._levels) - 1 else self._width
            above, nodes = nodes, np.full((len(sequences), width), -1, np.int32)
            scores_above, scores = scores, np.full((len(sequences), width), -np.inf, np.float32)
            for rows, outputs in self.outputs(sequences, depth):
                if depth == 0:
                    best, found = head.top_k(outputs, width)
                else:
                    assert isinstance(head, AttentionXmlHead)
                    device = outputs[0].device
                    beam = _to(above[rows], device), torch.from_numpy(scores_above[rows]).to(device)
                    best, found = head.top_k(outputs, width, beam)
                scores[rows], nodes[rows] = best.cpu().numpy(), found.cpu().numpy()
        return nodes, scores

    def outputs(self, sequences: Sequences, depth: int = -1) -> Iterator[tuple[np.ndarray, Any]]:
        """(rows, outputs of a level's module) over all sequences."""
        module, _, words = self._levels[depth]
        return outputs_by_length(
            module, sequences, _PADDING, inputs=lambda rows, ids, mask: (words.embed(ids), mask)
        )

    @property
    def head(self) -> LabelHead:
        """Of the last level."""
        return self._levels[-1][1]


def _load_levels(
    config: Config, networks: Sequence[Path], tree: LabelTree | None, num_labels: int, vocabulary_size: int
) -> Beam:
    """The networks of the first levels from their directories."""
    device, levels = prediction_device(), []
    for level, network in enumerate(networks, start=1):
        settings = Settings(
            config.words, config.encoder, config.model, num_labels, vocabulary_size, level, config.seed
        )
        num_nodes = num_labels if tree is None else tree.level_sizes[level]
        groups = _groups(tree, level)
        built = _network(settings, num_nodes, groups, None, device, averaging_engine=False)
        load_network(built[0], built[1], network)
        levels.append(built)
    return Beam(levels, config.model.candidates)


def _beam(config: Config, given: Mapping[str, Path], level: int) -> inference.Network:
    """In an actor: best nodes of a level for sequences."""
    tree = LabelTree.load(given["level-1"] / TREE)
    networks = [given[f"level-{d}"] / "network" for d in range(1, level + 1)]
    vocabulary_size = BlockReader(networks[0] / "rows").num_rows("words")
    beam = _load_levels(config, networks, tree, tree.num_labels, vocabulary_size)

    def network(sequences: Sequences) -> dict[str, np.ndarray]:
        nodes, scores = beam.best(sequences, min(config.model.candidates, tree.level_sizes[level]))
        return {NODES: nodes, SCORES: scores}

    return network


def assemble(out: Path, given: Mapping[str, Path]) -> None:
    """A model's own files: the vocabulary, the tree if there is one, and each level's network in `levels/`."""
    link_file(given["tokens"] / VOCABULARY, out / VOCABULARY)
    (out / "levels").mkdir()
    if "train" in given:
        link_tree(given["train"] / "network", out / "levels" / "1")
        return
    levels = given.get("levels")
    link_file((levels or given["level-1"]) / TREE, out / TREE)
    for level in range(1, LabelTree.load(out / TREE).num_levels):
        home = levels / f"level-{level}" if levels else given[f"level-{level}"]
        link_tree(home / "network", out / "levels" / str(level))


class AttentionXmlPredictor:
    """Best labels of texts, and the words that each of them attended to."""

    def __init__(self, vocabulary: Vocabulary, beam: Beam) -> None:
        self._vocabulary, self._beam = vocabulary, beam

    def top_k(self, texts: Sequence[str], k: int) -> TopK:
        """(N, k) for N texts."""
        return TopK(*self._beam.best(self._vocabulary.encode_texts(texts), k))

    def explain(self, texts: Sequence[str], top: TopK) -> list[list[dict[str, Any]]]:
        """For each text and each of its labels the ten words that it attended to most, with their shares of its
        attention; a word that comes several times has the sum of its shares."""
        head = self._beam.head
        if not isinstance(head, AttentionXmlHead):
            raise InputError("a model with model.attention=false attends to no words")
        longest = self._vocabulary.config.max_words
        split = split_words(texts, WORD_PATTERN, lowercase=True)
        found: list[list[dict[str, Any]]] = [[] for _ in texts]
        for rows, outputs in self._beam.outputs(self._vocabulary.encode_texts(texts)):
            labels = _to(np.maximum(top.label_ids[rows], 0), outputs[0].device)
            weights = head.attention(outputs, labels).float().cpu().numpy()
            for row, of_labels in zip(rows.tolist(), weights, strict=True):
                ids, places = np.unique(split.sequences[row][:longest], return_inverse=True)
                words = [split.words[i] for i in ids]
                found[row] = [
                    _most_read(words, np.bincount(places, w[: len(places)], len(ids))) for w in of_labels
                ]
        return found


def _most_read(words: Sequence[str], weights: np.ndarray) -> dict[str, Any]:
    best = np.argsort(-weights, kind="stable")[:_WORDS_SHOWN]
    return {"words": [{"word": words[i], "weight": round(float(weights[i]), 4)} for i in best]}


def load_predictor(directory: Path, config: Config, num_labels: int) -> AttentionXmlPredictor:
    """The predictor of a model directory."""
    vocabulary = Vocabulary.load(directory / VOCABULARY)
    tree = LabelTree.load(directory / TREE) if (directory / TREE).exists() else None
    count = 1 if tree is None else tree.num_levels - 1
    networks = [directory / "levels" / str(level) for level in range(1, count + 1)]
    beam = _load_levels(config, networks, tree, num_labels, len(vocabulary))
    return AttentionXmlPredictor(vocabulary, beam)
