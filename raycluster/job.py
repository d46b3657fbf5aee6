"""What a training group is given: settings, the network with its head, and how steps and rates follow from them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from raycluster.ingest import Batch
from xmc.errors import InputError
from xmc.nn.engine import EngineConfig
from xmc.nn.heads.base import LabelHead
from xmc.nn.optimisers import parameter_groups
from xmc.nn.sharding import Ragged

# Files in a job's directory: a line a step, lines for the user, and why the user must do something before it can go on.
STEPS_FILE, MESSAGES_FILE, FAILURE_FILE = "metrics.jsonl", "messages.txt", "failure.txt"
# P and nDCG at these are measured on validation documents.
VALIDATION_KS = (1, 3, 5)
# Settings of TrainConfig on which nothing of what is trained depends: a run may go on with others.
WATCHING = ("checkpoint_steps", "checkpoint_minutes", "max_failures", "cpus_per_worker")


@dataclass(frozen=True)
class TrainConfig:
    # Ranks: processes, each with its share of documents and of label rows. On GPUs, one a GPU.
    workers: int = 1
    # auto: a GPU where the cluster has enough of them, else the CPU.
    device: Literal["auto", "cpu", "cuda"] = "auto"
    epochs: int = 3
    # Weight updates to train for in place of `epochs`, a part of an epoch or several; 0: as many as the epochs have.
    updates: int = 0
    # Documents of all ranks in one forward pass; times `accumulate` in one update.
    batch_size: int = 32
    # Forward passes a weight update: larger batches in the same memory.
    accumulate: int = 1
    # Learning rate of the encoder, and of the label rows.
    encoder_rate: float = 1e-4
    label_rate: float = 1e-4
    # Learning rate of the layers between the two; none: the encoder's.
    hidden_rate: float | None = None
    # constant, or linear: falling to 0 at the last step. Both after `warmup` (a share of all steps) rising from 0:
    # linear is the slanted triangle of Howard & Ruder (2018). plateau: multiplied by `plateau_factor` each time that
    # nothing was gained since the last measurement, on nDCG@5 of validation or, without such a part, on the mean loss.
    schedule: Literal["constant", "linear", "plateau"] = "constant"
    plateau_factor: float = 0.5
    warmup: float = 0.0
    # Average the weights of this epoch's end and of those after it (SWA); 0 keeps the last weights.
    average_from: int = 0
    # Measure (on validation, where the corpus has such a part) after so many steps too, besides at each epoch's end;
    # the average takes the weights in then too. 0: at the ends of epochs only.
    validate_steps: int = 0
    # last: the weights at the end become the model's; best: those that reached the highest nDCG@5 on validation.
    keep: Literal["last", "best"] = "last"
    # Clip gradients at so many times the largest norm of the last five steps, encoder and label rows each by their own
    # norms; 0: not so.
    adaptive_clip: float = 0.0
    # A checkpoint after so many steps and after so many minutes, whichever comes first; 0 turns one off.
    checkpoint_steps: int = 0
    checkpoint_minutes: float = 5.0
    # How often a group that lost a worker starts again from its checkpoint.
    max_failures: int = 3
    # CPUs that Ray reserves for a rank; 0: half of its share of the cluster, the rest is for Ray Data.
    cpus_per_worker: float = 0.0

    def __post_init__(self) -> None:
        for key in ("workers", "epochs", "batch_size", "accumulate"):
            if getattr(self, key) < 1:
                raise InputError(f"train.{key} is {getattr(self, key)}; it must be at least 1")
        if self.batch_size < self.workers:
            raise InputError(
                f"train.batch_size is {self.batch_size} for {self.workers} workers; each needs at least one document"
            )
        for key in ("encoder_rate", "label_rate", "checkpoint_minutes", "cpus_per_worker"):
            if getattr(self, key) < 0:
                raise InputError(f"train.{key} is {getattr(self, key)}; it must not be negative")
        if self.hidden_rate is not None and self.hidden_rate < 0:
            raise InputError(f"train.hidden_rate is {self.hidden_rate}; it must not be negative")
        for key in ("updates", "validate_steps", "adaptive_clip"):
            if getattr(self, key) < 0:
                raise InputError(f"train.{key} is {getattr(self, key)}; it must not be negative")
        if self.updates and self.average_from:
            raise InputError("train.average_from counts epochs: it goes with train.epochs, not train.updates")
        if not 0 < self.plateau_factor <= 1:
            raise InputError(
                f"train.plateau_factor is {self.plateau_factor}; it lies above 0 and not above 1"
            )
        if not 0 <= self.warmup < 1:
            raise InputError(f"train.warmup is {self.warmup}; it is a share of all steps, from 0 to below 1")
        if self.average_from > self.epochs:
            raise InputError(
                f"train.average_from is {self.average_from}, but there are {self.epochs} epochs: nothing to average"
            )


class Learner:
    """What is trained: a module whose outputs for (input_ids, attention_mask) go to a head. Systems that do more
    than that at a step or between epochs override these methods.

    `label_parts` names the module's own parts that belong to the labels: they learn at the label rows' rate.
    """

    label_parts: tuple[str, ...] = ()

    def __init__(self, module: nn.Module, head: LabelHead) -> None:
        self.module = module
        self.head = head

    def begin(self, targets: Ragged) -> None:
        """See LabelHead.begin. The module belongs to no engine yet."""
        self.head.begin(targets)

    def before_epoch(self, epoch: int, outputs: Callable[[], Iterator[tuple[np.ndarray, Any]]]) -> None:
        """`outputs()` runs over all of this rank's documents: (rows, the module's outputs), without gradients."""

    def inputs(self, batch: Batch, tensor: Callable[[np.ndarray], Tensor]) -> tuple[Tensor, ...]:
        """What the module reads of a batch; `tensor` puts an array on the rank's device. Every rank calls it."""
        return tensor(batch.input_ids), tensor(batch.attention_mask)

    def before_forward(self, targets: Ragged) -> None:
        """Called with this rank's labels of a batch before the module's forward pass of a training step."""

    def loss(self, outputs: Any, targets: Ragged, rows: np.ndarray, lr: float | None) -> Tensor:
        """See LabelHead.loss; `rows` (b,) are the documents' places among this rank's."""
        return self.head.loss(outputs, targets, lr=lr)

    def after_backward(self, lr: float | None, factor: float) -> None:
        """For tables that `inputs` looked up: gradients times `factor` are those of the loss. Without `lr` they are
        stored until the head's step, see LabelHead.loss."""

    def top_k(self, outputs: Any, rows: np.ndarray, k: int) -> tuple[Tensor, Tensor]:
        """See LabelHead.top_k, for validation; `rows` (b,) are the documents' places among this rank's of that part."""
        return self.head.top_k(outputs, k)

    def state(self) -> dict[str, Tensor]:
        """What this rank must find again besides rows and weights."""
        return {}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take back what `state` gave."""


@dataclass(frozen=True)
class Job:
    """All that a rank needs, sent to it by value. `build` and `export` are module-level functions of a system."""

    out: Path
    build: Callable[[Any, torch.device], Learner]
    export: Callable[[Learner, Mapping[str, Tensor], Path], None]
    settings: Any
    train: TrainConfig
    engine: EngineConfig
    seed: int
    num_documents: int
    pad_id: int
    padding_side: str
    threads: int
    # Documents to validate on; none: 0.
    num_validation: int = 0


def num_steps(num_documents: int, config: TrainConfig) -> int:
    """Forward passes of an epoch: the same on every rank, though ranks may differ by a document."""
    smallest, largest = num_documents // config.workers, -(-num_documents // config.workers)
    if smallest == 0:
        raise InputError(f"{num_documents} training documents are too few for train.workers={config.workers}")
    return min(smallest, -(-largest // (config.batch_size // config.workers)))


def total_steps(num_documents: int, config: TrainConfig) -> int:
    """Forward passes of the whole training."""
    return config.updates * config.accumulate or num_steps(num_documents, config) * config.epochs


def rate_factor(step: int, total: int, config: TrainConfig) -> float:
    """What all learning rates are multiplied by at `step` (from 0) of `total`."""
    warm = config.warmup * total
    if step < warm:
        return (step + 1) / (warm + 1)
    return (total - step) / max(total - warm, 1.0) if config.schedule == "linear" else 1.0


def rate_groups(learner: Learner, config: TrainConfig, weight_decay: float) -> list[dict[str, Any]]:
    """The module's parameters for torch.optim, each part with its own rate."""
    between = config.encoder_rate if config.hidden_rate is None else config.hidden_rate
    rates = dict.fromkeys(learner.label_parts, config.label_rate) | {"encoder": config.encoder_rate}
    by_rate: dict[float, list[nn.Parameter]] = {}
    for name, parameter in learner.module.named_parameters():
        by_rate.setdefault(rates.get(name.split(".")[0], between), []).append(parameter)
    return [
        group | {"lr": rate}
        for rate, parameters in by_rate.items()
        for group in parameter_groups(nn.ParameterList(parameters), weight_decay)
    ]
