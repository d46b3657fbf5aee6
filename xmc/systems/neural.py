"""What systems with a trained network share: the training stage, the network on disk, and its predictions.

A network on disk: `encoder/`, if it has one, as transformers writes it (safetensors) and with its tokenizer, so that
another run can begin with it (`encoder.name`); `module.safetensors` with the rest of the engine's weights; `rows/` with
the label blocks by range; `head.safetensors` with what all ranks share. No pickle.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import ray.data
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from raycluster import ingest, trainer
from raycluster.job import WATCHING, Job, Learner, TrainConfig
from xmc.corpus.tokens import Sequences, SubwordEncoder, TokensConfig, pad_batch, read_manifest
from xmc.errors import InputError
from xmc.labels.topk import TopK
from xmc.nn.block_files import BlockReader, write_blocks
from xmc.nn.encoders import Encoder, save_encoder
from xmc.nn.engine import EngineConfig, choose_precision
from xmc.nn.heads.base import LabelHead
from xmc.nn.sharding import rank_index, world_size
from xmc.systems.shared_stages import open_corpus

_ENCODER = "encoder.model."
StepCallback = Callable[[list[dict[str, float]]], None]


def made_from(config: Any, *sections: str) -> dict[str, Any]:
    """The settings that a trained network follows from: these sections, engine, train and the seed."""
    settings = {key: asdict(getattr(config, key)) for key in (*sections, "engine", "train")}
    for key in WATCHING:
        del settings["train"][key]
    return settings | {"seed": config.seed}


def train_network(
    config: Any,
    build: Callable[[Any, torch.device], Learner],
    settings: Any,
    out: Path,
    inputs: Mapping[str, Path],
    on_steps: StepCallback,
    lists: Path | None = None,
    validate: bool = True,
) -> None:
    """Train what `build(settings, device)` makes on the stages `corpus` and `tokens`; the network lands in `out`.

    `config` has the sections train, engine and seed. `lists`: a directory with files like those of `tokens` of further
    lists that batches carry.
    """
    tokens = inputs["tokens"] / "train"
    manifest = read_manifest(tokens)
    job = Job(
        out=out,
        build=build,
        export=save_network,
        settings=settings,
        train=config.train,
        engine=config.engine,
        seed=config.seed,
        num_documents=manifest["rows"],
        pad_id=manifest["pad_id"],
        padding_side=manifest["padding_side"],
        threads=trainer.default_threads(config.train.workers),
        num_validation=_num_validation(config.train, inputs) if validate else 0,
    )
    validation = _labelled(inputs, "valid", lists) if job.num_validation else None
    trainer.fit(job, _labelled(inputs, "train", lists), on_steps, validation)
    encoder = out / "network" / "encoder"
    if encoder.is_dir():
        shutil.copytree(inputs["tokens"] / "tokenizer", encoder, dirs_exist_ok=True)


def _num_validation(config: TrainConfig, inputs: Mapping[str, Path]) -> int:
    """Documents to validate on: none where the corpus has too few to give each rank one."""
    tokens = inputs["tokens"] / "valid"
    count = read_manifest(tokens)["rows"] if tokens.is_dir() else 0
    if count >= config.workers:
        return count
    if config.keep == "best":
        raise InputError(
            "train.keep=best chooses by validation, but the corpus has no such part; give corpus.valid_fraction=0.05"
        )
    return 0


def _labelled(inputs: Mapping[str, Path], split: str, lists: Path | None) -> ray.data.Dataset:
    tokens = inputs["tokens"] / split
    names = [part["file"] for part in read_manifest(tokens)["parts"]]
    files = [tokens / name for name in names]
    list_files = [lists / split / name for name in names] if lists is not None else None
    return ingest.labelled_tokens(files, open_corpus(inputs).shards(split), list_files)


def save_network(learner: Learner, weights: Mapping[str, Tensor], out: Path) -> None:
    """Every rank writes its label rows; rank 0, which alone has the engine's weights, the rest."""
    network = out / "network"
    if rank_index() == 0:
        shutil.rmtree(network, ignore_errors=True)
        network.mkdir(parents=True)
        of_encoder = {key.removeprefix(_ENCODER): v for key, v in weights.items() if key.startswith(_ENCODER)}
        rest = {key: value.contiguous() for key, value in weights.items() if not key.startswith(_ENCODER)}
        if isinstance(learner.module.encoder, Encoder):
            save_encoder(learner.module.encoder, network / "encoder", of_encoder)
        save_file(rest, network / "module.safetensors")
        shared = {key: value.cpu() for key, value in learner.head.shared_state().items()}
        save_file(shared, network / "head.safetensors")
    if world_size() > 1:
        dist.barrier()
    write_blocks(learner.head.export_blocks(), network / "rows")


def assemble(out: Path, given: Mapping[str, Path]) -> None:
    """A model's own files from the stages `train` and `tokens`."""
    link_tree(given["train"] / "network", out / "network")
    link_tree(given["tokens"] / "tokenizer", out / "tokenizer")


def link_tree(source: Path, target: Path) -> None:
    """A copy of a directory: hard links where the file system has them."""
    shutil.copytree(source, target, copy_function=link_file)


def link_file(source: str | Path, target: str | Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def load_network(module: nn.Module, head: LabelHead, network: Path, engine: EngineConfig) -> None:
    """Fill a module, whose encoder was built from `network`/encoder, and a head of any number of ranks; the module is
    then ready to predict."""
    rest = load_file(network / "module.safetensors")
    own = {name: p for name, p in module.named_parameters() if not name.startswith(_ENCODER)}
    if rest.keys() != own.keys():
        raise InputError(
            f"{network}: module.safetensors holds {sorted(rest)}, the settings want {sorted(own)}"
        )
    with torch.no_grad():
        for name, p in own.items():
            p.copy_(rest[name])
    reader = BlockReader(network / "rows")
    for name, layer in head.layers.items():
        if reader.num_rows(name) != layer.block.num_labels:
            raise InputError(
                f"{network}: label layer {name!r} has {reader.num_rows(name)} rows, but {layer.block.num_labels} are "
                "wanted; the model belongs to another label set"
            )
    head.load_rows(reader)
    head.load_shared_state(load_file(network / "head.safetensors"))
    for_prediction(module, engine)


def for_prediction(module: nn.Module, engine: EngineConfig) -> None:
    """Set a module to predict, in the precision that it would be trained in on its device."""
    chosen = choose_precision(engine, next(module.parameters()).device)
    module.eval().to({"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[chosen])


class NetworkPredictor:
    """Best labels of texts from a module and a head in this process."""

    def __init__(self, tokenizer: Any, max_tokens: int, module: nn.Module, head: LabelHead):
        self._subwords = SubwordEncoder(tokenizer, TokensConfig(tokenizer="saved", max_tokens=max_tokens))
        self._padding = (self._subwords.pad_id, tokenizer.padding_side)
        self._module = module
        self._head = head

    def top_k(self, texts: Sequence[str], k: int) -> TopK:
        """(N, k) for N texts."""
        label_ids = np.full((len(texts), k), -1, np.int32)
        scores = np.full((len(texts), k), -np.inf, np.float32)
        sequences = self._subwords.encode_texts(texts)
        for rows, outputs in outputs_by_length(self._module, sequences, self._padding):
            best, found = self._head.top_k(outputs, k)
            scores[rows], label_ids[rows] = best.cpu().numpy(), found.cpu().numpy()
        return TopK(label_ids, scores)


@torch.inference_mode()
def outputs_by_length(
    module: nn.Module,
    sequences: Sequences,
    padding: tuple[int, str],
    batch_size: int = 64,
    inputs: Callable[[np.ndarray, Tensor, Tensor], tuple[Tensor, ...]] | None = None,
) -> Iterator[tuple[np.ndarray, Any]]:
    """(rows, the module's outputs) over all sequences; `padding` is (pad id, side). Those of similar length share a
    batch, which spares most of the padding. `inputs(rows, ids, mask)` gives what the module reads, if not ids and mask.
    """
    device = next(module.parameters()).device
    order = np.argsort(sequences.lengths, kind="stable")
    for start in range(0, len(order), batch_size):
        rows = order[start : start + batch_size]
        ids, mask = pad_batch([sequences[row] for row in rows], *padding)
        given = torch.from_numpy(ids).to(device), torch.from_numpy(mask).to(device)
        yield rows, module(*(inputs(rows, *given) if inputs is not None else given))


def prediction_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
