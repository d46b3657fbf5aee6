"""Trains one network on a Ray Train group: the encoder in a DeepSpeed engine, label rows beside it, one loop for all.

A system gives a `Learner` (module and head) and gets a trained model's parts back in a directory. The loop knows
nothing of any system. Checkpoints make it resumable after the death of a worker (Ray restarts the group) or of the
driver (the same call goes on); see `checkpoints`. Steps are written to metrics.jsonl, which the driver follows.
"""

from __future__ import annotations

import json
import math
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import ray
import ray.data
import ray.train
import scipy.sparse as sp
import torch
import torch.distributed as dist
from ray.train.torch import TorchConfig, TorchTrainer
from torch import Tensor, nn

from raycluster import checkpoints, groups
from raycluster.checkpoints import Checkpoint
from raycluster.follow import Tail, append_line
from raycluster.ingest import Batch, RankRows, SplitByRank, rank_table
from xmc.errors import InputError
from xmc.evaluation.metrics import Metrics, MetricsConfig
from xmc.files import atomic_write_text
from xmc.labels.topk import TopK
from xmc.nn.averaging import WeightAverage
from xmc.nn.block_files import BlockReader, write_blocks
from xmc.nn.engine import Engine, EngineConfig, load_weights
from xmc.nn.heads.base import LabelHead
from xmc.nn.optimisers import parameter_groups
from xmc.nn.sharding import Ragged
from xmc.progress import Progress

# What is measured on validation documents, and what the best weights are chosen by.
VALIDATION_KS = (1, 3, 5)
SELECTED_BY = "valid_nDCG_at_5"

STEPS_FILE = "metrics.jsonl"
MESSAGES_FILE = "messages.txt"
FAILURE_FILE = "failure.txt"


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


def fit(
    job: Job,
    documents: ray.data.Dataset,
    on_steps: Callable[[list[dict[str, float]]], None],
    validation: ray.data.Dataset | None = None,
) -> None:
    """Train until `job.out` holds the exported parts; `on_steps` gets each new row of step metrics, with `valid_…` in
    some where there are documents for `validation`.

    Raises InputError where the run cannot go on for a reason that the user can mend.
    """
    job.out.mkdir(parents=True, exist_ok=True)
    (job.out / FAILURE_FILE).unlink(missing_ok=True)
    groups.release(job.out)  # of an earlier driver, which was killed
    shutil.rmtree(job.out / "ray", ignore_errors=True)
    use_gpu = wants_gpu(job.train)
    resources = {"CPU": job.train.cpus_per_worker or default_cpus(job.train.workers)}
    trainer = TorchTrainer(
        _train_rank,
        train_loop_config={"job": job},
        torch_config=TorchConfig(backend="nccl" if use_gpu else "gloo"),
        scaling_config=ray.train.ScalingConfig(
            num_workers=job.train.workers, use_gpu=use_gpu, resources_per_worker=resources
        ),
        run_config=ray.train.RunConfig(
            name="group",
            storage_path=str(job.out / "ray"),
            failure_config=ray.train.FailureConfig(max_failures=job.train.max_failures),
        ),
        datasets={"train": documents} | ({"valid": validation} if validation is not None else {}),
        dataset_config=SplitByRank(),
    )
    with _following(job, on_steps):
        trainer.fit()
    if (job.out / FAILURE_FILE).exists():
        raise InputError((job.out / FAILURE_FILE).read_text())
    groups.release(job.out)
    shutil.rmtree(job.out / "ray", ignore_errors=True)
    shutil.rmtree(job.out / "checkpoints", ignore_errors=True)


def wants_gpu(config: TrainConfig) -> bool:
    """Whether to train on GPUs; asking for more than the cluster has is an error before anything starts."""
    gpus = ray.cluster_resources().get("GPU", 0)
    if config.device == "cuda" and gpus < config.workers:
        raise InputError(
            f"train.device is cuda with {config.workers} workers, but the cluster has {gpus:g} GPUs"
        )
    return config.device == "cuda" or (config.device == "auto" and gpus >= config.workers)


def default_cpus(workers: int) -> float:
    """Half a rank's share of the cluster's CPUs, and less where that would leave no whole CPU: a task of Ray Data asks
    for one, and drivers of members or trials for a little. A group that waits for such a task would wait for ever."""
    cpus = ray.cluster_resources().get("CPU", 1)
    return max(0.01, round(min(cpus / 2, cpus - 1.2) / workers, 2))


def default_threads(workers: int) -> int:
    """Torch threads of a rank: the CPUs of its node over the ranks that share it."""
    nodes = [node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"]]
    per_node = -(-workers // max(len(nodes), 1))
    return max(1, int(max(nodes) / per_node))


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


# ------------------------------------------------------------------------------------------------ in a rank


def _train_rank(config: dict[str, Job]) -> None:
    """One rank's whole life. A mistake that the user must mend ends the group without a retry."""
    job = config["job"]
    if dist.get_rank() == 0:
        groups.note(job.out)
    try:
        _Loop(job).run()
    except InputError as error:
        # Every rank meets such an error at the same place, so nobody waits in a collective.
        if dist.get_rank() == 0:
            atomic_write_text(job.out / FAILURE_FILE, str(error))


class _Loop:
    """Position, network and averages of one rank."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.rank = dist.get_rank()
        self.device = ray.train.torch.get_device()
        torch.set_num_threads(job.threads)
        torch.manual_seed(job.seed * 1009 + self.rank)
        self.steps_an_epoch = num_steps(job.num_documents, job.train)
        self.total = total_steps(job.num_documents, job.train)
        self.rows = RankRows(
            rank_table("train"), self._per_rank, self.steps_an_epoch, job.seed, job.pad_id, job.padding_side
        )
        checkpoint = checkpoints.newest(job.out / "checkpoints", self._say)
        weights = checkpoint.load("engine") if checkpoint else None
        self.learner = job.build(job.settings, self.device)
        if weights is not None:
            load_weights(self.learner.module, weights)
        self.engine = Engine(
            self.learner.module,
            rate_groups(self.learner, job.train, job.engine.weight_decay),
            job.engine,
            self.device,
            self._per_rank,
            job.train.accumulate,
            say=self._say,
        )
        self.average = WeightAverage()
        self.validation = _Validation(job, self.learner) if job.num_validation else None
        self.best = -math.inf
        self.clips = {part: AdaptiveClip(job.train.adaptive_clip) for part in ("encoder", "rows")}
        self.plateau = Plateau(job.train.plateau_factor if job.train.schedule == "plateau" else 1.0)
        self.step = 0
        if checkpoint is not None and weights is not None:
            self._restore(checkpoint, weights)
        self.log = _StepLog(job.out / STEPS_FILE, self.step) if self.rank == 0 else None
        self.saved_at = time.monotonic()

    def _say(self, line: str) -> None:
        if self.rank == 0:
            append_line(self.job.out / MESSAGES_FILE, line)

    @property
    def _per_rank(self) -> int:
        return -(-self.job.train.batch_size // self.job.train.workers)

    def run(self) -> None:
        train = self.job.train
        while self.step < self.total:
            epoch, place = divmod(self.step, self.steps_an_epoch)
            if place == 0:
                self.learner.before_epoch(epoch, self._outputs)
            self.engine.train()
            waited = time.perf_counter()
            for batch in self.rows.epoch(epoch, place):
                self._step(batch, waited)
                if self.step == self.total:
                    break
                if self.step % self.steps_an_epoch:
                    if train.validate_steps and self.step % train.validate_steps == 0:
                        self._judge(epoch)
                    if self._is_time():
                        self._save()
                waited = time.perf_counter()
            self._judge(epoch)
            if self._is_time():
                self._save()
        if self.log is not None:
            self.log.flush()
        if not math.isfinite(self.best):
            with self._averaged() as weights:
                self._export(weights)

    def _step(self, batch: Batch, waited_since: float) -> None:
        began = time.perf_counter()
        train = self.job.train
        factor = rate_factor(self.step, self.total, train) * self.plateau.factor
        targets = Ragged(self._tensor(batch.label_ids), self._tensor(batch.label_offsets))
        self.learner.before_forward(targets)
        outputs = self.engine(*self.learner.inputs(batch, self._tensor))
        by_norm = train.adaptive_clip > 0
        at_once = train.label_rate * factor if train.accumulate == 1 and not by_norm else None
        loss = self.learner.loss(outputs, targets, batch.rows, at_once)
        loss.retain_grad()
        self.engine.backward(loss)
        # The engine scales the loss before it goes backwards (micro-batches, 16 bits): its own gradient says how much.
        assert loss.grad is not None
        self.learner.after_backward(at_once, 1.0 / float(loss.grad))
        self.engine.step(factor, self.clips["encoder"].limit if by_norm else None)
        self.step += 1
        if at_once is None and self.step % train.accumulate == 0:
            self._move_rows(train.label_rate * factor, by_norm)
        self._check(loss)
        self.plateau.saw(float(loss.detach()))
        if self.log is not None:
            took = time.perf_counter() - waited_since
            self.log.add(
                self.step,
                loss=float(loss.detach()),
                rate=train.encoder_rate * factor,
                documents_per_second=len(batch) * train.workers / took,
                waiting_share=(began - waited_since) / took,
            )

    def _move_rows(self, rate: float, by_norm: bool) -> None:
        """Apply the stored gradients of label rows."""
        limit = None
        if by_norm:
            norm = float(self.learner.head.gradient_norm())
            limit = self.clips["rows"].limit if norm > self.clips["rows"].limit else None
            self.clips["rows"].saw(norm)
            self.clips["encoder"].saw(self.engine.gradient_norm())
        self.learner.head.step(rate, limit)

    def _judge(self, epoch: int) -> None:
        """Take the weights into the average, measure what would be exported now, and keep it if it is the best."""
        train = self.job.train
        if train.average_from and epoch + 1 >= train.average_from:
            self.average.update(self._trained())
        if self.validation is None:
            self.plateau.judge(None)
            return
        with self._averaged() as weights:
            found = self.validation.measure(self.engine, self._tensor)
            self.plateau.judge(found[SELECTED_BY])
            if self.log is not None:
                self.log.more(**found)
            if train.keep == "best" and found[SELECTED_BY] > self.best:
                self.best = found[SELECTED_BY]
                self._export(weights)
        self.engine.train()

    @contextmanager
    def _averaged(self) -> Iterator[dict[str, Tensor]]:
        """Within the block module and rows hold their averages, where there are any; yields rank 0's module weights."""
        trained = self._trained()
        with self.average.applied(trained):
            prefix = "weight/"
            weights = {key.removeprefix(prefix): v for key, v in trained.items() if key.startswith(prefix)}
            with self.engine.holding(weights) if self.average.count else nullcontext():
                yield weights

    @torch.no_grad()
    def _outputs(self) -> Iterator[tuple[np.ndarray, Any]]:
        self.engine.train(False)
        for batch in self.rows.in_order():
            yield batch.rows, self.engine(*self.learner.inputs(batch, self._tensor))

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device)

    def _check(self, loss: Tensor) -> None:
        """All ranks know the same loss, so all stop together, before anything of it reaches a checkpoint."""
        if not math.isfinite(float(loss.detach())):
            raise InputError(
                f"the loss became {float(loss.detach())} at step {self.step}. The last checkpoint is from before it; "
                "lower train.encoder_rate or train.label_rate (a changed rate trains anew)"
            )

    def _is_time(self) -> bool:
        """Whether to save now: rank 0's clock decides for all."""
        train = self.job.train
        if self.step % train.accumulate or self.step == self.total:
            return False
        if train.checkpoint_steps and self.step % train.checkpoint_steps == 0:
            return True
        if not train.checkpoint_minutes:
            return False
        late = time.monotonic() - self.saved_at >= 60 * train.checkpoint_minutes
        due = torch.tensor([late], dtype=torch.int32, device=self.device)
        if train.workers > 1:
            dist.broadcast(due, src=0)
        return bool(due.item())

    def _trained(self) -> dict[str, Tensor]:
        """Everything that is averaged: the encoder's weights on rank 0, this rank's label rows on each."""
        weights = self.engine.weights()
        rows = {f"rows/{name}": value for name, value in self.learner.head.trained_tensors().items()}
        return rows | ({f"weight/{name}": value for name, value in weights.items()} if self.rank == 0 else {})

    def _save(self) -> None:
        engine = self.engine.state()
        if self.log is not None:
            self.log.flush()

        def write(directory: Path) -> list[Path]:
            own = self._random_state() | self.learner.state() | self.average.state_dict()
            own["plateau"] = self.plateau.state
            if self.job.train.adaptive_clip:
                own |= {f"clip.{part}": clip.norms for part, clip in self.clips.items()}
            files = [checkpoints.write_tensors(directory / f"rank-{self.rank:05d}.safetensors", own)]
            files += write_blocks(self.learner.head.export_blocks(with_optimiser=True), directory)
            if self.rank == 0:
                shared = self.learner.head.shared_state()
                files.append(checkpoints.write_tensors(directory / "engine.safetensors", engine))
                files.append(checkpoints.write_tensors(directory / "head.safetensors", shared))
            return files

        best = self.best if math.isfinite(self.best) else None
        notes = {"step": self.step, "workers": self.job.train.workers, "best": best}
        checkpoints.save(self.job.out / "checkpoints", self.step, write, notes)
        self.saved_at = time.monotonic()

    def _random_state(self) -> dict[str, Tensor]:
        state = {"rng": torch.get_rng_state()}
        if self.device.type == "cuda":
            state["rng_cuda"] = torch.cuda.get_rng_state(self.device)
        return state

    def _restore(self, checkpoint: Checkpoint, weights: Mapping[str, Tensor]) -> None:
        if checkpoint.notes["workers"] != self.job.train.workers:
            raise InputError(
                f"{checkpoint.path} was written by {checkpoint.notes['workers']} workers, this run has "
                f"{self.job.train.workers}; give the same number"
            )
        self.engine.load_state(weights)
        self.learner.head.load_rows(BlockReader(checkpoint.path), with_optimiser=True)
        self.learner.head.load_shared_state(checkpoint.load("head"))
        own = checkpoint.load(f"rank-{self.rank:05d}")
        torch.set_rng_state(own["rng"])
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(own["rng_cuda"], self.device)
        self.learner.load_state(own)
        self.average.load_state_dict(own)
        self.plateau.state = own["plateau"]
        if self.job.train.adaptive_clip:
            for part, clip in self.clips.items():
                clip.norms = own[f"clip.{part}"]
        if checkpoint.notes.get("best") is not None:
            self.best = checkpoint.notes["best"]
        self.step = checkpoint.notes["step"]

    def _export(self, weights: Mapping[str, Tensor]) -> None:
        """Write the model's parts; what was there before is replaced when the new ones are whole."""
        self.job.export(self.learner, weights, self.job.out / "next")
        if self.job.train.workers > 1:
            dist.barrier()
        if self.rank == 0:
            for part in (self.job.out / "next").iterdir():
                shutil.rmtree(self.job.out / part.name, ignore_errors=True)
                part.rename(self.job.out / part.name)
            (self.job.out / "next").rmdir()
        if self.job.train.workers > 1:
            dist.barrier()


class AdaptiveClip:
    """A limit for gradient norms that follows them: `factor` times the largest of the last five, none of which counts
    for more than twice the largest before it, or than 1. At first there is none."""

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self.norms = torch.tensor([math.inf])

    @property
    def limit(self) -> float:
        return self._factor * float(self.norms.max())

    def saw(self, norm: float) -> None:
        counted = min(norm, 2.0 * float(self.norms.max()), 1.0)
        self.norms = torch.cat([self.norms, torch.tensor([counted])])[-5:]


class Plateau:
    """The factor of learning rates that fall whenever a measurement is no better than the best before it. Ranks know
    the same losses and measurements, so they agree on it."""

    def __init__(self, decay: float) -> None:
        self._decay = decay
        self.state = torch.tensor(
            [1.0, -math.inf, 0.0, 0.0], dtype=torch.float64
        )  # factor, best, sum and number

    @property
    def factor(self) -> float:
        return float(self.state[0])

    def saw(self, loss: float) -> None:
        self.state[2:] += torch.tensor([loss, 1.0], dtype=torch.float64)

    def judge(self, figure: float | None) -> None:
        """Take in a figure of which more is better; None: the mean of the losses seen since the last one."""
        factor, best, total, count = self.state.tolist()
        value = -total / max(count, 1.0) if figure is None else figure
        factor = factor if value > best else factor * self._decay
        self.state = torch.tensor([factor, max(value, best), 0.0, 0.0], dtype=torch.float64)


class _Validation:
    """This rank's part of the validation documents."""

    def __init__(self, job: Job, learner: Learner) -> None:
        per_rank = -(-job.train.batch_size // job.train.workers)
        steps = num_steps(job.num_validation, job.train)
        self._rows = RankRows(rank_table("valid"), per_rank, steps, job.seed, job.pad_id, job.padding_side)
        self._learner, self._num_documents = learner, job.num_documents

    @torch.no_grad()
    def measure(self, engine: Engine, tensor: Callable[[np.ndarray], Tensor]) -> dict[str, float]:
        """P@k and nDCG@k in percent over all ranks' validation documents. Every rank calls it."""
        engine.train(False)
        found = np.full((len(self._rows), max(VALIDATION_KS)), -1, np.int32)
        for batch in self._rows.in_order():
            outputs = engine(*self._learner.inputs(batch, tensor))
            found[batch.rows] = self._learner.top_k(outputs, batch.rows, found.shape[1])[1].cpu().numpy()
        labels = self._rows.labels
        classes = self._learner.head.classes_of(tensor(labels.values.astype(np.int64))).cpu().numpy()
        num_classes = 1 + int(max(classes.max(initial=0), found.max(initial=0)))
        truth = sp.csr_matrix(
            (np.ones(len(classes), np.float32), classes, labels.offsets), shape=(len(found), num_classes)
        )
        metrics = Metrics(np.ones(num_classes), self._num_documents, MetricsConfig(ks=VALIDATION_KS))
        parts = metrics.parts(TopK(found, np.zeros(found.shape, np.float32)), truth)
        names = [f"{name}@{k}" for name in ("P", "nDCG") for k in VALIDATION_KS]
        sums = tensor(np.array([[part.sum() for part in parts[name]] for name in names]))
        if dist.get_world_size() > 1:
            dist.all_reduce(sums)
        means = (100 * sums[:, 0] / sums[:, 1].clamp_min(1)).tolist()
        return {f"valid_{name.replace('@', '_at_')}": mean for name, mean in zip(names, means, strict=True)}


class _StepLog:
    """metrics.jsonl: a row a step; rows after the checkpoint that a run resumes from are dropped."""

    def __init__(self, path: Path, step: int) -> None:
        kept = [line for line in Tail(path).lines() if json.loads(line)["step"] <= step]
        atomic_write_text(path, "".join(line + "\n" for line in kept))
        self._file = open(path, "a", buffering=1)  # noqa: SIM115  open as long as the rank lives
        self._row: dict[str, float] = {}

    def add(self, step: int, **values: float) -> None:
        """A row, held back until the next one: there may be `more` to it."""
        self.flush()
        self._row = {"step": step, "time": time.time(), **values}

    def more(self, **values: float) -> None:
        self._row |= values

    def flush(self) -> None:
        if self._row:
            self._file.write(json.dumps(self._row) + "\n")
        self._row = {}


# ------------------------------------------------------------------------------------------------ in the driver


@contextmanager
def _following(job: Job, on_steps: Callable[[list[dict[str, float]]], None]) -> Iterator[None]:
    """Show the progress of a training group and hand on its steps, until the block ends."""
    stop = threading.Event()
    total = total_steps(job.num_documents, job.train)

    def follow() -> None:
        steps, messages = Tail(job.out / STEPS_FILE), Tail(job.out / MESSAGES_FILE)
        messages.lines()  # of an earlier process
        with Progress("training", total, "steps") as progress:
            progress.start_at(max((json.loads(line)["step"] for line in steps.lines()), default=0))
            while True:
                last = stop.wait(0.5)
                for line in messages.lines():
                    print(line, flush=True)
                rows = [json.loads(line) for line in steps.lines()]
                if rows:
                    progress.update(rows[-1]["step"] - progress.done, f"loss {rows[-1]['loss']:.4f}")
                    on_steps(rows)
                if last:
                    return

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
