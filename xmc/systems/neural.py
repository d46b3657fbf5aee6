"""What systems with a trained network share: the training stage, the network on disk, and its predictions.

A network on disk: `encoder/` as transformers writes it (safetensors), `module.safetensors` with the rest of the
engine's weights, `rows/` with the label blocks by range, `head.safetensors` with what all ranks share. No pickle.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from raycluster import ingest, trainer
from raycluster.trainer import Job, Learner
from xmc.corpus.tokens import SubwordEncoder, TokensConfig, pad_batch, read_manifest
from xmc.errors import InputError
from xmc.labels.topk import TopK
from xmc.nn.block_files import BlockReader, write_blocks
from xmc.nn.encoders import save_encoder
from xmc.nn.heads.base import LabelHead
from xmc.nn.sharding import rank_index, world_size
from xmc.systems.shared_stages import open_corpus

_ENCODER = "encoder.model."
StepCallback = Callable[[list[dict[str, float]]], None]


def train_network(
    config: Any,
    build: Callable[[Any, torch.device], Learner],
    settings: Any,
    out: Path,
    inputs: Mapping[str, Path],
    on_steps: StepCallback,
) -> None:
    """Train what `build(settings, device)` makes on the stages `corpus` and `tokens`; the network lands in `out`.

    `config` has the sections train, engine and seed.
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
    )
    files = [tokens / part["file"] for part in manifest["parts"]]
    trainer.fit(job, ingest.labelled_tokens(files, open_corpus(inputs).shards("train")), on_steps)


def save_network(learner: Learner, weights: Mapping[str, Tensor], out: Path) -> None:
    """Every rank writes its label rows; rank 0, which alone has the engine's weights, the rest."""
    network = out / "network"
    if rank_index() == 0:
        shutil.rmtree(network, ignore_errors=True)
        network.mkdir(parents=True)
        of_encoder = {key.removeprefix(_ENCODER): v for key, v in weights.items() if key.startswith(_ENCODER)}
        rest = {key: value.contiguous() for key, value in weights.items() if not key.startswith(_ENCODER)}
        save_encoder(learner.module.encoder, network / "encoder", of_encoder)  # type: ignore[arg-type]
        save_file(rest, network / "module.safetensors")
        shared = {key: value.cpu() for key, value in learner.head.shared_state().items()}
        save_file(shared, network / "head.safetensors")
    if world_size() > 1:
        dist.barrier()
    write_blocks(learner.head.export_blocks(), network / "rows")


def assemble(out: Path, given: Mapping[str, Path]) -> None:
    """A model's own files from the stages `train` and `tokens`: hard links where the file system has them."""
    for source, name in (
        (given["train"] / "network", "network"),
        (given["tokens"] / "tokenizer", "tokenizer"),
    ):
        shutil.copytree(source, out / name, copy_function=_link)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def load_network(module: nn.Module, head: LabelHead, network: Path) -> None:
    """Fill a module, whose encoder was built from `network`/encoder, and a head of any number of ranks."""
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


class NetworkPredictor:
    """Best labels of texts from a module and a head in this process."""

    def __init__(
        self, tokenizer: Any, max_tokens: int, module: nn.Module, head: LabelHead, batch_size: int = 64
    ):
        self._subwords = SubwordEncoder(tokenizer, TokensConfig(tokenizer="saved", max_tokens=max_tokens))
        self._side = tokenizer.padding_side
        self._module = module.eval()
        self._head = head
        self._batch_size = batch_size
        self._device = next(module.parameters()).device

    @torch.inference_mode()
    def top_k(self, texts: Sequence[str], k: int) -> TopK:
        """(N, k) for N texts. Texts of similar length share a batch, which spares most of the padding."""
        sequences = self._subwords.encode_texts(texts)
        label_ids = np.full((len(texts), k), -1, np.int32)
        scores = np.full((len(texts), k), -np.inf, np.float32)
        order = np.argsort(sequences.lengths, kind="stable")
        for start in range(0, len(order), self._batch_size):
            rows = order[start : start + self._batch_size]
            ids, mask = pad_batch([sequences[row] for row in rows], self._subwords.pad_id, self._side)
            outputs = self._module(
                torch.from_numpy(ids).to(self._device), torch.from_numpy(mask).to(self._device)
            )
            best, found = self._head.top_k(outputs, k)
            scores[rows], label_ids[rows] = best.cpu().numpy(), found.cpu().numpy()
        return TopK(label_ids, scores)


def prediction_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
