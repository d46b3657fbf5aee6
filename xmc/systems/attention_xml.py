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
it learns from real mistakes): attention_xml.debian_tags_levels. One to three trees: attention_xml.debian_deps_trees.

    python -m xmc.train attention_xml corpus.path=DIR run.dir=DIR
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import ray
from safetensors.numpy import save_file as save_arrays

from raycluster import inference, pool, session, trainer
from raycluster.follow import Tail
from raycluster.job import MESSAGES_FILE, STEPS_FILE, TrainConfig, total_steps
from raycluster.stages import Stage
from xmc.config import CommonConfig
from xmc.corpus.store import Corpus
from xmc.corpus.tfidf import TfidfConfig
from xmc.corpus.tokens import Sequences, gather, read_manifest
from xmc.corpus.words import WORD_PATTERN, Vocabulary, split_words
from xmc.errors import InputError
from xmc.files import atomic_file, atomic_write_text
from xmc.labels.clustering import ClusterConfig, cluster_labels, count_clusters
from xmc.labels.topk import TopK
from xmc.labels.tree import LabelTree, TreeConfig, build_tree, kept_levels
from xmc.nn.block_files import BlockReader
from xmc.nn.engine import EngineConfig
from xmc.nn.heads.attention_xml import AttentionXmlHead
from xmc.nn.words import BiLstmConfig
from xmc.progress import Progress
from xmc.systems import shared_stages
from xmc.systems.levels import (
    NODES,
    SCORES,
    TOP,
    Level,
    ModelConfig,
    Settings,
    build,
    load_level,
    to_tensor,
)
from xmc.systems.neural import (
    StepCallback,
    link_file,
    link_tree,
    made_from,
    train_network,
)
from xmc.systems.words import VOCABULARY, WORD_TABLE, WordsSection, num_words, words_stages

__all__ = ["Config", "assemble", "build", "load_predictor", "stages"]

# Beyond this many labels the paper builds a tree.
_FLAT_UP_TO = 31_000
TREE = "tree.npz"
# A mark beside a network whose training is over, in a stage that is not: training left no checkpoint to go on from.
_TRAINED = "done"
_WORDS_SHOWN = 10


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

    def is_tree(self, num_labels: int) -> bool:
        mode = self.model.mode
        return mode == "tree" or (mode == "auto" and self.model.attention and num_labels > _FLAT_UP_TO)

    def validates_labels(self, num_labels: int) -> bool:
        return not self.is_tree(num_labels)


# ------------------------------------------------------------------------------------------------ stages


def stages(config: Config, corpus: Corpus, on_steps: StepCallback) -> list[Stage]:
    """All between the corpus and the trained networks; `on_steps` gets the rows of step metrics."""
    own = words_stages(config.words, config.seed)
    if not config.is_tree(corpus.num_labels):
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
    of_model = {"hidden_widths": config.model.hidden_widths, "attention": config.model.attention}
    return of_model | made_from(config, "words", "encoder")


def _flat_stage(config: Config, num_labels: int, on_steps: StepCallback) -> Stage:
    def run(out: Path, given: Mapping[str, Path]) -> None:
        settings = _to_train(config, given, num_labels, 1)
        train_network(config, build, settings, out, given, on_steps)

    return Stage("train", _settings_of(config), run, ("corpus", "tokens", "words"), resumes=True)


def _first_level_stage(config: Config, num_labels: int, on_steps: StepCallback) -> Stage:
    """Level 1, and meanwhile the clustering of the labels below it: the tree lies beside the network."""
    seeded = replace(config.clusters, seed=config.seed)

    def run(out: Path, given: Mapping[str, Path]) -> None:
        resolved = {name: path.resolve() for name, path in given.items()}
        growing = ray.remote(num_cpus=1)(_grow_tree).remote(resolved, seeded, config.tree, out.resolve())
        _wait_for(out / TOP, growing)
        settings = replace(_to_train(config, given, num_labels, 1), tree=out / TOP)
        _train_once(config, settings, out, given, _numbered(on_steps, 1, ()))
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
    """The best nodes of a level for all documents, below the best of the level above: candidates for the next level."""

    def run(out: Path, given: Mapping[str, Path]) -> None:
        resolved = {name: path.resolve() for name, path in given.items()}
        above = resolved.get(f"candidates-{level - 1}")
        for split in ("train", "valid"):
            tokens = resolved["tokens"] / split
            if tokens.is_dir():
                make = partial(_searcher, config, resolved, level)
                before = above / split if above else None
                inference.write_vectors(tokens, make, (out / split).resolve(), f"candidates-{level}", before)

    # The tree lies beside level 1.
    inputs = (
        ("tokens", "level-1")
        if level == 1
        else ("tokens", "level-1", f"level-{level}", f"candidates-{level - 1}")
    )
    settings = {"candidates": config.model.candidates}
    return Stage(f"candidates-{level}", settings, run, inputs, resumes=True)


def _searcher(
    config: Config, given: Mapping[str, Path], level: int
) -> inference.Network | inference.NextNetwork:
    """In an actor: best nodes of a level for sequences and the best nodes of the level above."""
    tree = LabelTree.load(given["level-1"] / TREE)
    network = given[f"level-{level}"] / "network"
    vocabulary_size = BlockReader(network / "rows").num_rows("words")
    settings = replace(_settings(config, tree.num_labels, vocabulary_size), level=level)
    trained = load_level(settings, network, tree, config.engine)
    width = min(config.model.candidates, tree.level_sizes[level])

    def search(sequences: Sequences, above: dict[str, np.ndarray] | None = None) -> dict[str, np.ndarray]:
        found = trained.best(sequences, width, TopK(above[NODES], above[SCORES]) if above else None)
        return {NODES: found.label_ids, SCORES: found.scores}

    return search


def _level_stage(config: Config, level: int, num_labels: int, on_steps: StepCallback) -> Stage:
    def run(out: Path, given: Mapping[str, Path]) -> None:
        settings = replace(
            _to_train(config, given, num_labels, level),
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
    before = sum(json.loads((home / STEPS_FILE).read_text().splitlines()[-1])["step"] for home in above)

    def renamed(rows: list[dict[str, float]]) -> None:
        on_steps([_named(row, level, row["step"] + before) for row in rows])

    return renamed


def _named(row: Mapping[str, float], level: int, step: float) -> dict[str, float]:
    """A row of a level's metrics, named after the level, as step `step` of the whole tree."""
    # By the plain loss MLflow knows how far an interrupted run was logged.
    return {"step": step, "time": row["time"], "loss": row["loss"]} | {
        f"level_{level}_{key}": value for key, value in row.items() if key not in ("step", "time")
    }


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
        at_once = min(pool.room(*trainer.least_resources(config.train)), len(jobs))
        print(f"{len(jobs)} levels, {at_once} at a time", flush=True)
        steps = total_steps(read_manifest(given["tokens"] / "train")["rows"], config.train) * len(jobs)
        with Progress("training", steps, "steps") as progress:
            together = Together({level: out / f"level-{level}" for level in levels}, on_steps, progress)
            pool.run_all(jobs, at_once, together.show)

    settings = _settings_of(config) | {"tree": asdict(config.tree), "candidates": config.model.candidates}
    return Stage("levels", settings, run, ("corpus", "tokens", "words", "clusters"), resumes=True)


class Together:
    """How levels get on that train at once: `show` prints and hands on what is new in the files of their directories
    `homes`. The steps of all levels are one sequence, numbered as they come."""

    def __init__(self, homes: Mapping[int, Path], on_steps: StepCallback, progress: Progress) -> None:
        self._steps = {level: Tail(home / STEPS_FILE) for level, home in homes.items()}
        self._messages = {level: Tail(home / MESSAGES_FILE) for level, home in homes.items()}
        self._last = dict.fromkeys(homes, 0)  # step of each level
        self._on_steps, self._progress = on_steps, progress
        for messages in self._messages.values():
            messages.lines()  # of an earlier process
        on_steps(earlier := self._new_rows())
        progress.start_at(len(earlier))

    def show(self) -> None:
        for level, messages in self._messages.items():
            for line in messages.lines():
                print(f"level {level}: {line}", flush=True)
        if rows := self._new_rows():
            at = ", ".join(f"level {level} at {step:,}" for level, step in self._last.items())
            self._progress.update(len(rows), f"{at}, loss {rows[-1]['loss']:.4f}")
            self._on_steps(rows)

    def _new_rows(self) -> list[dict[str, float]]:
        heard = [
            (row["time"], level, row)
            for level, steps in self._steps.items()
            for row in map(json.loads, steps.lines())
            if row["step"] > self._last[level]  # a level that goes on from its checkpoint repeats some
        ]
        before = sum(self._last.values())
        for _, level, row in heard:
            self._last[level] = max(self._last[level], row["step"])
        heard.sort(key=lambda found: found[:2])
        return [_named(row, level, number) for number, (_, level, row) in enumerate(heard, start=before + 1)]


def _train_alone(config: Config, num_labels: int, level: int, out: Path, given: Mapping[str, Path]) -> None:
    """In an actor: one level, on true parents and drawn others."""
    session.connect()
    settings = replace(_to_train(config, given, num_labels, level), tree=out / TREE)
    if level > 1:  # nothing above is there yet to find candidates for validation by
        config = replace(config, train=replace(config.train, keep="last"))
    home = out / f"level-{level}"
    _train_once(config, settings, home, given, lambda rows: None, validate=level == 1)


def _train_once(
    config: Config,
    settings: Settings,
    out: Path,
    given: Mapping[str, Path],
    on_steps: StepCallback,
    validate: bool = True,
) -> None:
    """Train a network unless an earlier attempt at the stage has."""
    if not (out / _TRAINED).exists():
        train_network(config, build, settings, out, given, on_steps, validate=validate)
        atomic_write_text(out / _TRAINED, "")


def _to_train(config: Config, given: Mapping[str, Path], num_labels: int, level: int) -> Settings:
    """What a level's network is trained from."""
    table = given["words"] / WORD_TABLE
    return replace(_settings(config, num_labels, num_words(table)), level=level, word_table=table)


def _settings(config: Config, num_labels: int, num_words: int) -> Settings:
    """What the first level's network follows from."""
    return Settings(config.words, config.encoder, config.model, num_labels, num_words, 1, config.seed)


# ------------------------------------------------------------------------------------------------ the model


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

    def __init__(self, vocabulary: Vocabulary, levels: Sequence[Level], width: int) -> None:
        """`width`: nodes of each level but the last below which the search goes on."""
        self._vocabulary, self._levels, self._width = vocabulary, levels, width

    def top_k(self, texts: Sequence[str], k: int) -> TopK:
        """(N, k) for N texts."""
        sequences, beam = self._vocabulary.encode_texts(texts), None
        for level in self._levels[:-1]:
            beam = level.best(sequences, self._width, beam)
        return self._levels[-1].best(sequences, k, beam)

    def explain(self, texts: Sequence[str], top: TopK) -> list[list[dict[str, Any]]]:
        """For each text and each of its labels the ten words that it attended to most, with their shares of its
        attention; a word that comes several times has the sum of its shares."""
        head = self._levels[-1].head
        if not isinstance(head, AttentionXmlHead):
            raise InputError("a model with model.attention=false attends to no words")
        longest = self._vocabulary.config.max_words
        split = split_words(texts, WORD_PATTERN, lowercase=True)
        found: list[list[dict[str, Any]]] = [[] for _ in texts]
        for rows, outputs in self._levels[-1].outputs(self._vocabulary.encode_texts(texts)):
            labels = to_tensor(np.maximum(top.label_ids[rows], 0), outputs[0].device)
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
    first = _settings(config, num_labels, len(vocabulary))
    levels = [
        load_level(replace(first, level=level), directory / "levels" / str(level), tree, config.engine)
        for level in range(1, count + 1)
    ]
    return AttentionXmlPredictor(vocabulary, levels, config.model.candidates)
