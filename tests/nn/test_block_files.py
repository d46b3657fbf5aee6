from __future__ import annotations

from pathlib import Path

import pytest
import torch

from xmc.errors import InputError
from xmc.nn.block_files import BlockReader, RowBlock, write_blocks
from xmc.nn.dense_layer import DenseLabelLayer
from xmc.nn.optimisers import RowOptimiserConfig
from xmc.nn.sharding import LabelBlock


def _layer(rank: int, world: int) -> DenseLabelLayer:
    return DenseLabelLayer(
        LabelBlock.of_rank(11, rank, world), 3, RowOptimiserConfig(), bound=1.0, seed=1, bias=True
    )


def _write(directory: Path, world: int) -> torch.Tensor:
    """A trained state in `world` blocks; returns the second moments of all rows."""
    moments = torch.arange(33.0).view(11, 3)
    for rank in range(world):
        layer = _layer(rank, world)
        block = layer.block
        layer.optimisers["weight"].state["exp_avg_sq"].copy_(moments[block.start : block.stop])
        write_blocks({"recall": RowBlock(block.start, block.stop, 11, layer.tensors())}, directory)
    return moments


@pytest.mark.parametrize("saved_by", [1, 2, 3, 20])
def test_rows_load_in_any_division(tmp_path: Path, saved_by: int) -> None:
    moments = _write(tmp_path, saved_by)
    reader = BlockReader(tmp_path)
    assert reader.num_rows("recall") == 11
    for world in (1, 2, 4):
        for rank in range(world):
            layer = _layer(rank, world)
            expected = layer.weight.clone()
            layer.weight.zero_()
            layer.load(lambda name, start, stop: reader("recall", name, start, stop))
            assert torch.equal(layer.weight, expected)
            block = layer.block
            assert torch.equal(
                layer.optimisers["weight"].state["exp_avg_sq"], moments[block.start : block.stop]
            )


def test_missing_rows_are_named(tmp_path: Path) -> None:
    _write(tmp_path, 3)
    sorted(tmp_path.iterdir())[1].unlink()
    with pytest.raises(InputError, match="rows 3 to 7 of label layer 'recall'"):
        BlockReader(tmp_path)("recall", "weight", 0, 7)


def test_broken_file_is_named(tmp_path: Path) -> None:
    _write(tmp_path, 1)
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(InputError, match=path.name):
        BlockReader(tmp_path)("recall", "weight", 0, 11)
