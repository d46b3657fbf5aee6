"""One rank of a training group, from the start or its last checkpoint to the exported parts of the network.

The loop is the same for every system; what differs is the job's `Learner`. The encoder is in a DeepSpeed engine, the
label rows are beside it. Everything that the loop must find again is in its checkpoints.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import ray.train
import ray.train.torch
import scipy.sparse as sp
import torch
import torch.distributed as dist
from torch import Tensor

from raycluster import checkpoints, groups
from raycluster.checkpoints import Checkpoint
from raycluster.follow import Tail, append_line
from raycluster.ingest import Batch, RankRows, rank_table
from raycluster.job import (
    FAILURE_FILE,
    MESSAGES_FILE,
    STEPS_FILE,
    VALIDATION_KS,
    Job,
    Learner,
    num_steps,
    rate_factor,
    rate_groups,
    total_steps,
)
from xmc.errors import InputError
from xmc.evaluation.metrics import Metrics, MetricsConfig
from xmc.files import atomic_write_text
from xmc.labels.topk import TopK
from xmc.nn.averaging import WeightAverage
from xmc.nn.block_files import BlockReader, write_blocks
from xmc.nn.engine import Engine, load_weights
from xmc.nn.sharding import Ragged

# What the best weights are chosen by.
SELECTED_BY = "valid_nDCG_at_5"


def train_rank(config: dict[str, Job]) -> None:
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
        else:
            labels = self.rows.labels
            self.learner.begin(
                Ragged(self._tensor(labels.values).long(), self._tensor(labels.offsets).long())
            )
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
            self._say(f"training goes on from step {self.step:,}")
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
        for batch in self.rows.by_length():
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
        for batch in self._rows.by_length():
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
