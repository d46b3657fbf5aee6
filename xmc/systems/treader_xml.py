"""TReaderXML (Wang et al. 2022): a text is read together with what similar training texts are about.

Method: a text's nearest training texts give their labels, and those labels' parents; the vectors of these labels are
its semantic scope, a sequence of its own. Two towers of masked and plain self-attention read text and scope, a masked
layer reads the scope and then the text through a bottleneck, and a flat layer scores all labels.
Teacher knowledge: neighbours by the cosine of mean vectors (of the encoder as it comes, or of the words), found in an
approximate index of train in shards, whose recall is measured. A training document asks neither itself nor its copies
nor, where the corpus keeps groups, its group. New texts are looked up in the same index, within `top_k`.
Loss: mean BCE over all labels. Score: its sigmoid.
Stages: corpus → tokens [→ words] → vectors, [tfidf → clusters →] nodes → neighbours → scopes → train → model →
evaluate.
Needs text. Label descriptions and a hierarchy help: parents of the label file, or clusters of labels where it has none.
Switches for the paper's Table 3: model.teacher, model.reading, model.residual; all seven: treader_xml.ablation. Over a
fine-tuned encoder the teacher gains two points of P@1 on both Debian sets, and towers take them away again (README):
there model.reading=none, the paper's id 1, is the better choice. The default is the paper's whole network, id 6.
What the paper leaves open, and how it is settled here: `labels.teacher` (scopes) and `nn.heads.treader_xml` (network).

    python -m xmc.train treader_xml corpus.path=DIR run.dir=DIR
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from raycluster.inference import Network
from raycluster.ingest import Batch, pad_lists
from raycluster.job import Learner, TrainConfig
from raycluster.stages import Stage
from xmc.config import CommonConfig
from xmc.corpus.store import Corpus
from xmc.corpus.tfidf import TfidfConfig
from xmc.corpus.tokens import Encoder, Sequences, read_manifest
from xmc.corpus.words import PAD_ID, Vocabulary
from xmc.errors import InputError
from xmc.labels.clustering import ClusterConfig
from xmc.labels.neighbours import NO_NEIGHBOUR
from xmc.labels.teacher import Knowledge, Scopes, Teacher
from xmc.labels.topk import TopK
from xmc.nn.encoders import EncoderConfig, load_encoder, save_encoder
from xmc.nn.engine import EngineConfig
from xmc.nn.heads.treader_xml import TReaderConfig, TReaderHead, TReaderModule
from xmc.nn.words import WordRows, WordVectorsConfig
from xmc.systems import shared_stages, teaching
from xmc.systems.neural import (
    StepCallback,
    link_file,
    link_tree,
    load_network,
    made_from,
    outputs_by_length,
    prediction_device,
    train_network,
)
from xmc.systems.teaching import NODES, WEIGHTS, TeacherConfig
from xmc.systems.vectors import VECTORS, load_subwords, pretrained
from xmc.systems.words import (
    VOCABULARY,
    WORD_TABLE,
    WordsSection,
    fill_words,
    load_words,
    num_words,
    words_stages,
)

_READ_IN_TRAINING = ("tokens", "words", "nodes", "neighbours", "scopes")
# How a text's encoder must be set: towers read every word of its last layer, neighbours are found by their mean.
_AS_IT_IS: dict[str, Any] = {"layers_pooled": 1, "summary": "mean", "dropout": 0.0}


@dataclass(frozen=True)
class Config(CommonConfig):
    # What lies below the towers: a transformers encoder, or word vectors.
    reads: Literal["encoder", "words"] = "encoder"
    encoder: EncoderConfig = field(default_factory=lambda: EncoderConfig(**_AS_IT_IS))
    words: WordsSection = field(default_factory=WordsSection)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    # Of the label clusters that serve as parents where the label file has none.
    tfidf: TfidfConfig = field(default_factory=TfidfConfig)
    clusters: ClusterConfig = field(default_factory=ClusterConfig)
    model: TReaderConfig = field(default_factory=TReaderConfig)
    engine: EngineConfig = field(default_factory=lambda: EngineConfig(weight_decay=0.0))
    train: TrainConfig = field(default_factory=TrainConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.clusters.seed != ClusterConfig().seed:
            raise InputError("clusters.seed follows from seed: set that")
        wrong = [key for key, value in _AS_IT_IS.items() if getattr(self.encoder, key) != value]
        if wrong and self.reads == "encoder":
            raise InputError(
                f"encoder.{wrong[0]} must be {_AS_IT_IS[wrong[0]]}: treader_xml reads every word of the encoder's last "
                "layer (its own dropout is model.dropout)"
            )
        if self.reads == "words" and self.words.vectors.width % self.model.heads:
            raise InputError(
                f"words.vectors.width is {self.words.vectors.width}; it must be a multiple of model.heads="
                f"{self.model.heads}"
            )


# ------------------------------------------------------------------------------------------------ stages


def stages(config: Config, corpus: Corpus, on_steps: StepCallback) -> list[Stage]:
    """All between the corpus and the trained network; `on_steps` gets the rows of step metrics."""
    own = _text_stages(config)
    if config.model.teacher:
        own += _teacher_stages(config, corpus, tuple(stage.name for stage in own))

    def run(out: Path, given: Mapping[str, Path]) -> None:
        if "neighbours" in given:
            found = json.loads((given["neighbours"] / teaching.RECALL_FILE).read_text())
            on_steps([{"step": 0, "time": time.time(), "neighbour_recall": found["recall"]}])
        settings = Settings(
            encoder=config.encoder if config.reads == "encoder" else None,
            vectors=config.words.vectors,
            words=given.get("words"),
            nodes=given.get("nodes"),
            model=config.model,
            num_labels=corpus.num_labels,
            seed=config.seed,
        )
        train_network(config, build, settings, out, given, on_steps, lists=given.get("scopes"))

    settings = _of_text(config) | made_from(config, "model")
    inputs = ("corpus", *(stage.name for stage in own if stage.name in _READ_IN_TRAINING))
    return [*own, Stage("train", settings, run, inputs, resumes=True)]


def _of_text(config: Config) -> dict[str, Any]:
    """The settings that a text's vectors follow from; a pretrained encoder has no seed."""
    if config.reads == "words":
        return {"words": asdict(config.words.vectors), "seed": config.seed}
    return {"encoder": asdict(config.encoder)} | ({"seed": config.seed} if config.encoder.random_kind else {})


def _text_stages(config: Config) -> list[Stage]:
    """Token ids and, of words, their vectors before training."""
    if config.reads == "words":
        return words_stages(config.words, config.seed)
    return [shared_stages.tokens_stage(config.encoder)]


def _teacher_stages(config: Config, corpus: Corpus, text: tuple[str, ...]) -> list[Stage]:
    """From the text stages to the documents' scopes."""
    teacher, settings = config.teacher, _of_text(config)
    make, encoder = partial(_embedder, config), partial(_encoder, config)
    kind = teaching.hierarchy_kind(teacher, corpus)
    own = [teaching.vectors_stage(make, partial(_save_embedder, config), settings, text)]
    inputs: tuple[str, ...] = ("corpus", *text)
    if kind == "clusters":
        own.append(shared_stages.tfidf_stage(config.tfidf))
        own.append(shared_stages.clusters_stage(config.clusters, config.seed))
        inputs = (*inputs, "clusters")
    own.append(teaching.nodes_stage(teacher, kind, encoder, make, settings, inputs))
    own.append(teaching.neighbours_stage(teacher, config.seed))
    return [*own, teaching.scopes_stage(teacher.scope)]


def _encoder(config: Config, given: Mapping[str, Path]) -> Encoder:
    """What turns texts into ids."""
    if config.reads == "words":
        return Vocabulary.load(given["tokens"] / VOCABULARY)
    return load_subwords(given["tokens"] / "tokenizer", config.encoder.max_tokens)[0]


def _embedder(config: Config, given: Mapping[str, Path]) -> Network:
    """What turns ids into vectors before anything is learnt."""
    if config.reads == "words":
        return MeanOfWords(given["words"] / WORD_TABLE)
    manifest = read_manifest(given["tokens"] / "train")
    return pretrained(config.encoder, config.seed, (manifest["pad_id"], manifest["padding_side"]))


def _save_embedder(config: Config, given: Mapping[str, Path], out: Path) -> None:
    """Keep it: a trained model looks new texts up by the same vectors."""
    if config.reads == "words":
        out.mkdir(exist_ok=True)
        (out / WORD_TABLE).unlink(missing_ok=True)
        link_file(given["words"] / WORD_TABLE, out / WORD_TABLE)
    else:
        save_encoder(load_encoder(config.encoder, config.seed), out)


class MeanOfWords:
    """Vectors (n × e) of n sequences: the mean of their words'."""

    def __init__(self, table: Path) -> None:
        self._table = load_words(table)

    def __call__(self, sequences: Sequences) -> dict[str, np.ndarray]:
        values, offsets = (
            torch.from_numpy(sequences.values.astype(np.int64)),
            torch.from_numpy(sequences.offsets),
        )
        means = F.embedding_bag(values, self._table, offsets[:-1], mode="mean")
        return {VECTORS: means.numpy()}


# ------------------------------------------------------------------------------------------------ the network


@dataclass(frozen=True)
class Settings:
    """What a rank builds the network from."""

    encoder: EncoderConfig | None
    vectors: WordVectorsConfig
    words: Path | None
    nodes: Path | None
    model: TReaderConfig
    num_labels: int
    seed: int


class Reader(Learner):
    """Looks words and scopes up in the head's tables, and lets them learn."""

    head: TReaderHead

    def inputs(self, batch: Batch, tensor: Callable[[np.ndarray], Tensor]) -> tuple[Tensor, ...]:
        text = tensor(batch.input_ids), tensor(batch.attention_mask)
        return self.head.look_up(
            *text, *(tensor(batch.lists[name]) for name in (NODES, WEIGHTS) if batch.lists)
        )

    def after_backward(self, lr: float | None, factor: float) -> None:
        self.head.learn(lr, factor)


def build(settings: Settings, device: torch.device) -> Learner:
    """The network before training, in a rank."""
    num_rows = num_words(settings.words / WORD_TABLE) if settings.words else 0
    num_nodes = teaching.num_nodes(settings.nodes) if settings.nodes else 0
    module, head = _network(settings, num_rows, num_nodes, device, averaging_engine=True)
    if settings.words is not None:
        fill_words(head.tables["words"], settings.words / WORD_TABLE)
    if settings.nodes is not None:
        for first, vectors in teaching.node_pieces(settings.nodes):
            nodes = torch.arange(first, first + len(vectors), device=device)
            head.tables["scope"].put(nodes, torch.from_numpy(vectors).to(device))
    return Reader(module, head)


def _network(
    settings: Settings, num_rows: int, num_nodes: int, device: torch.device, *, averaging_engine: bool
) -> tuple[TReaderModule, TReaderHead]:
    """`num_rows` of words, where words are read. The tables hold random numbers yet."""
    encoder = load_encoder(settings.encoder, settings.seed) if settings.encoder is not None else None
    width = encoder.width if encoder is not None else settings.vectors.width
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        module = TReaderModule(encoder, width, settings.model)
    of_scope = WordVectorsConfig(width=width, trained=settings.model.scope_trained)
    seed = settings.seed
    head = TReaderHead(
        settings.model,
        settings.num_labels,
        WordRows(num_nodes, of_scope, seed=seed, device=device) if num_nodes else None,
        WordRows(num_rows, settings.vectors, seed=seed, device=device) if num_rows else None,
        seed=seed,
        averaging_engine=averaging_engine,
        device=device,
    )
    return module.to(device), head


# ------------------------------------------------------------------------------------------------ the model


def assemble(out: Path, given: Mapping[str, Path]) -> None:
    """A model's own files: the network, what turns a text into ids, and the teacher with what it looks texts up by."""
    link_tree(given["train"] / "network", out / "network")
    if "words" in given:
        link_file(given["tokens"] / VOCABULARY, out / VOCABULARY)
    else:
        link_tree(given["tokens"] / "tokenizer", out / "tokenizer")
    if "scopes" in given:
        link_tree(given["scopes"] / "teacher", out / "teacher")
        link_tree(given["neighbours"] / "index", out / "teacher" / "index")
        link_tree(given["vectors"] / teaching.EMBEDDER, out / "teacher" / teaching.EMBEDDER)


class TReaderPredictor:
    """Best labels of texts, and what was read for them."""

    def __init__(
        self,
        encoder: Encoder,
        padding: tuple[int, str],
        module: TReaderModule,
        head: TReaderHead,
        teacher: tuple[Teacher, Network] | None,
    ) -> None:
        self._encoder, self._padding, self._module, self._head = encoder, padding, module, head
        self._teacher = teacher

    def top_k(self, texts: Sequence[str], k: int) -> TopK:
        """(N, k) for N texts."""
        sequences = self._encoder.encode_texts(texts)
        return self._top_k(sequences, self._look_up(sequences), k)

    def explain(self, texts: Sequence[str], top: TopK) -> list[list[dict[str, Any]]]:
        """For each text and each of its labels (N, k) what was read: the text's neighbours, nearest first, with whether
        they have the label, and its scope in the order of reading, with each node's share of the votes."""
        knowledge = self._look_up(self._encoder.encode_texts(texts))
        if knowledge is None or self._teacher is None:
            raise InputError(
                "this model was trained with model.teacher=false: it looks nothing up to explain"
            )
        teacher, scopes = self._teacher[0], knowledge.scopes
        found = []
        for row, labels in enumerate(top.label_ids):
            part = slice(scopes.offsets[row], scopes.offsets[row + 1])
            scope = [
                {"label": teacher.node_names[int(node)].as_py(), "weight": round(float(weight), 4)}
                for node, weight in zip(scopes.nodes[part], scopes.weights[part], strict=True)
            ]
            pairs = zip(knowledge.neighbours[row], knowledge.similarities[row], strict=True)
            near = [(int(n), float(similarity)) for n, similarity in pairs if n != NO_NEIGHBOUR]
            found.append(
                [{"neighbours": _neighbours(teacher, near, label), "scope": scope} for label in labels]
            )
        return found

    def _look_up(self, sequences: Sequences) -> Knowledge | None:
        if self._teacher is None:
            return None
        teacher, embed = self._teacher
        return teacher.look_up(embed(sequences)[VECTORS])

    def _top_k(self, sequences: Sequences, knowledge: Knowledge | None, k: int) -> TopK:
        label_ids = np.full((len(sequences), k), -1, np.int32)
        scores = np.full((len(sequences), k), -np.inf, np.float32)
        inputs = partial(self._inputs, knowledge.scopes if knowledge is not None else None)
        for rows, outputs in outputs_by_length(self._module, sequences, self._padding, inputs=inputs):
            best, found = self._head.top_k(outputs, k)
            scores[rows], label_ids[rows] = best.cpu().numpy(), found.cpu().numpy()
        return TopK(label_ids, scores)

    def _inputs(
        self, scopes: Scopes | None, rows: np.ndarray, ids: Tensor, mask: Tensor
    ) -> tuple[Tensor, ...]:
        if scopes is None:
            return self._head.look_up(ids, mask)
        lists = (pad_lists(Sequences(part, scopes.offsets), rows) for part in (scopes.nodes, scopes.weights))
        return self._head.look_up(ids, mask, *(torch.from_numpy(part).to(ids.device) for part in lists))


def _neighbours(teacher: Teacher, near: list[tuple[int, float]], label: int) -> list[dict[str, Any]]:
    """A text's neighbours (row of train, similarity) by name, and whether they have a label."""
    return [
        {
            "id": teacher.document_ids[document].as_py(),
            "similarity": round(similarity, 4),
            "has_label": bool(np.isin(label, teacher.labels[document].indices)),
        }
        for document, similarity in near
    ]


def load_predictor(directory: Path, config: Config, num_labels: int) -> TReaderPredictor:
    """The predictor of a model directory."""
    network = directory / "network"
    encoder, padding = _load_text_encoder(directory, config)
    teacher = _load_teacher(directory / "teacher", config, num_labels, padding)
    of_text = None
    if config.reads == "encoder":
        of_text = replace(config.encoder, name=str(network / "encoder"), gradient_checkpointing=False)
    settings = Settings(of_text, config.words.vectors, None, None, config.model, num_labels, config.seed)
    num_rows = len(encoder) if isinstance(encoder, Vocabulary) else 0
    num_nodes = len(teacher[0].node_names) if teacher is not None else 0
    module, head = _network(settings, num_rows, num_nodes, prediction_device(), averaging_engine=False)
    load_network(module, head, network, config.engine)
    return TReaderPredictor(encoder, padding, module, head, teacher)


def _load_text_encoder(directory: Path, config: Config) -> tuple[Encoder, tuple[int, str]]:
    """What turns texts into ids, and how those are padded."""
    if config.reads == "words":
        return Vocabulary.load(directory / VOCABULARY), (PAD_ID, "right")
    return load_subwords(directory / "tokenizer", config.encoder.max_tokens)


def _load_teacher(
    home: Path, config: Config, num_labels: int, padding: tuple[int, str]
) -> tuple[Teacher, Network] | None:
    """The teacher, and what turns ids into the vectors that it looks texts up by."""
    if not config.model.teacher:
        return None
    teacher, embedder = Teacher.load(home, config.teacher.scope, num_labels), home / teaching.EMBEDDER
    if config.reads == "words":
        return teacher, MeanOfWords(embedder / WORD_TABLE)
    as_it_came = replace(config.encoder, name=str(embedder), gradient_checkpointing=False)
    return teacher, pretrained(as_it_came, config.seed, padding)
