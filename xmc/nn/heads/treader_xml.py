"""TReaderXML's dual cooperative network: a text and its semantic scope are read by a tower each, then together.

Formula: A(x) = tanh(concat of heads(softmax(QKᵀ/√d_k) V) W), masked so that a place reads itself and those before it,
or plain. A tower reads o = A_plain(x + A_masked(x)). The scope's o stands before the text's: h = [o_scope; o_text] W_b,
z = h + A_masked(h), so that every word reads the scope and the words before it; e is the mean of z's places of the
text plus that of the scope's, the label layer scores W e + b, and the loss is the mean BCE over all labels.
Needs: states of the text's words, and one vector a node of its scope with a weight (0: padding), see `labels.teacher`.
Without a scope the text's tower works alone. Scopes pay off where labels are rare or described; for few and frequent
labels LightXML's head does the same for less.

Choices that the paper (Wang et al. 2022) leaves open:
- Towers are joined along the sequence, as their lengths differ; along the features both would have to be one vector.
- The paper names no step from a sequence to the one vector that labels are scored by: `pooling`. In one mean over all
  places a scope of few nodes would drown in a long text.
- Its output is a softmax whose values go into a sigmoid loss; read literally no probability could leave [0.5, 0.73].
  Here the loss is over the logits themselves.
- LayerNorm and dropout on the vector that labels are scored by are not in the paper (`normalised`, `dropout`).
- Like the first layer of a tower, the interaction's attention has a residual; `residual` switches the towers' alone.
- A node's vector is its description's mean at first and then its own row, which learns; or it stays (`scope_trained`).
  Its weight only says that it is there, or also scales it (`scope_weighted`).

Legend: b documents of this rank, T words, S nodes of the longest scope, d width of the states, h of the bottleneck.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xmc.errors import InputError
from xmc.nn.encoders import Encoder
from xmc.nn.heads.light_xml import LightXmlHead, LightXmlHeadConfig
from xmc.nn.optimisers import RowOptimiserConfig
from xmc.nn.words import WordRows

# The layers of a tower; the paper's Table 3 compares them.
READINGS = {
    "none": (),
    "masked": ("masked",),
    "plain": ("plain",),
    "plain_masked": ("plain", "masked"),
    "masked_plain": ("masked", "plain"),
}


@dataclass(frozen=True)
class TReaderConfig:
    # Whether a text's scope is read; without it nothing is looked up and the text's tower stands alone.
    teacher: bool = True
    # Attention layers of a tower, in order: masked reads word by word, plain the whole.
    reading: Literal["none", "masked", "plain", "plain_masked", "masked_plain"] = "masked_plain"
    # Whether a tower's first layer adds to its input or takes its place.
    residual: bool = True
    heads: int = 4
    # Width in which both are read together, and of the label layer: its memory is labels × this.
    bottleneck_width: int = 256
    # From all places to one vector: the mean of the text's and that of the scope's by its weights, added (towers); the
    # mean or the largest values of all; or the last one, which has read all others.
    pooling: Literal["towers", "mean", "max", "last"] = "towers"
    # On that vector: LayerNorm, which the paper does not have, and dropout.
    normalised: bool = True
    dropout: float = 0.1
    # Whether the nodes' vectors learn, at train.label_rate.
    scope_trained: bool = True
    # Whether a node's vector is scaled by the share of the neighbours' votes that it has.
    scope_weighted: bool = False
    optimiser: RowOptimiserConfig = field(default_factory=lambda: RowOptimiserConfig(weight_decay=0.0))

    def __post_init__(self) -> None:
        if self.heads < 1 or self.bottleneck_width % self.heads:
            raise InputError(
                f"model.bottleneck_width is {self.bottleneck_width}; it must be a multiple of model.heads={self.heads}"
            )
        if not 0.0 <= self.dropout < 1.0:
            raise InputError(f"model.dropout is {self.dropout}; it must lie in [0, 1)")


class SelfAttention(nn.Module):
    """Multi-head self-attention with tanh on its output; no biases, as in the paper."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        if width % heads:
            raise InputError(f"states of width {width} cannot be divided among model.heads={heads}")
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        for layer in (self.qkv, self.out):
            nn.init.xavier_uniform_(layer.weight)

    def forward(self, x: Tensor, allowed: Tensor) -> Tensor:
        """(b × T × d) from x (b × T × d) and `allowed_pairs` (b × 1 × T × T)."""
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        read = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        return torch.tanh(self.out(read.transpose(1, 2).reshape(batch, length, width)))


def allowed_pairs(real: Tensor, *, masked: bool) -> Tensor:
    """(b × 1 × T × T): which places each place may read, of those that are `real` (b × T); masked: none behind itself.

    Every place may read itself, so that the softmax of padding has something to divide by; nobody reads padding.
    """
    length = real.shape[1]
    allowed = real[:, None, None, :].expand(-1, 1, length, -1)
    ones = torch.ones(length, length, dtype=torch.bool, device=real.device)
    if masked:
        allowed = allowed & ones.tril()
    return allowed | torch.eye(length, dtype=torch.bool, device=real.device)


class Tower(nn.Module):
    """Reads one sequence with the layers that `reading` names; the first is a residual one if asked for."""

    def __init__(self, width: int, config: TReaderConfig) -> None:
        super().__init__()
        self.kinds = READINGS[config.reading]
        self.residual = config.residual
        self.layers = nn.ModuleList(SelfAttention(width, config.heads) for _ in self.kinds)

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        """(b × T × d) from x (b × T × d), of which the places `real` (b × T) count."""
        for number, (kind, layer) in enumerate(zip(self.kinds, self.layers, strict=True)):
            read = layer(x, allowed_pairs(real, masked=kind == "masked"))
            x = x + read if number == 0 and self.residual else read
        return x


class TReaderModule(nn.Module):
    """The engine's part: the encoder unless texts come as word vectors, towers, interaction. Outputs (e,)."""

    def __init__(self, encoder: Encoder | None, width: int, config: TReaderConfig) -> None:
        """`width`: of the text's states and of the scope's vectors."""
        super().__init__()
        self.config = config
        self.encoder = encoder
        self.text_tower = Tower(width, config)
        self.scope_tower = Tower(width, config) if config.teacher else None
        self.bottleneck = nn.Linear(width, config.bottleneck_width, bias=False)
        self.interaction = SelfAttention(config.bottleneck_width, config.heads)
        self.norm = nn.LayerNorm(config.bottleneck_width) if config.normalised else nn.Identity()
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, text: Tensor, mask: Tensor, scope: Tensor | None = None, weights: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """(e,) of b × h from the text's ids (b × T), or its word vectors (b × T × d), with their mask (b × T), and with
        a teacher the scope's vectors (b × S × d) with their weights (b × S)."""
        states = text if self.encoder is None else self._states(text, mask)
        real = mask != 0
        read = self.text_tower(states.to(self.bottleneck.weight.dtype), real)
        if self.scope_tower is not None:
            assert scope is not None
            assert weights is not None
            if self.config.scope_weighted:
                scope = scope * weights[:, :, None]
            known = weights > 0
            read = torch.cat([self.scope_tower(scope.to(read.dtype), known), read], dim=1)
            real = torch.cat([known, real], dim=1)
        h = self.bottleneck(read)
        z = h + self.interaction(h, allowed_pairs(real, masked=True))
        return (self.dropout(self.norm(self._pool(z, real, weights))),)

    def _states(self, input_ids: Tensor, mask: Tensor) -> Tensor:
        """(b × T × d) of the encoder's last layer."""
        assert self.encoder is not None
        return self.encoder.model(input_ids=input_ids, attention_mask=mask).last_hidden_state

    def _pool(self, z: Tensor, real: Tensor, weights: Tensor | None) -> Tensor:
        """(b × h) from the real places of z (b × S+T × h), the scope's `weights` (b × S) being those of the first."""
        if self.config.pooling in ("towers", "mean"):
            shares = _shares(real)
            if self.config.pooling == "towers" and weights is not None:
                shares = torch.cat([_shares(weights), _shares(real[:, weights.shape[1] :])], dim=1)
            return torch.einsum("bth,bt->bh", z, shares.to(z.dtype))
        if self.config.pooling == "max":
            return z.masked_fill(~real[:, :, None], float("-inf")).amax(1)
        last = real.shape[1] - 1 - real.flip(1).to(torch.int8).argmax(1)
        return z[torch.arange(z.shape[0], device=z.device), last]


def _shares(weights: Tensor) -> Tensor:
    """Each row of weights (b × T) over its sum; a row of zeros stays one."""
    weights = weights.float()
    return weights / weights.sum(1, keepdim=True).clamp_min(1e-9)


class TReaderHead(LightXmlHead):
    """A flat label layer, and beside it the tables that the module's inputs are looked up in: `scope` has a row a node
    of the hierarchy, `words` a row a word where no encoder reads the text. All are divided over the ranks."""

    def __init__(
        self,
        config: TReaderConfig,
        num_labels: int,
        scope: WordRows | None,
        words: WordRows | None = None,
        *,
        seed: int,
        averaging_engine: bool = True,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(
            LightXmlHeadConfig(recall_optimiser=config.optimiser),
            num_labels,
            config.bottleneck_width,
            None,
            seed=seed,
            averaging_engine=averaging_engine,
            device=device,
            dtype=dtype,
        )
        self.tables = {name: rows for name, rows in (("scope", scope), ("words", words)) if rows is not None}
        self.layers |= self.tables

    def look_up(
        self, text: Tensor, mask: Tensor, nodes: Tensor | None = None, weights: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """The module's inputs from the text's ids (b × T), mask (b × T), and with a teacher the scope's nodes (b × S)
        and weights (b × S). Every rank calls it."""
        if "words" in self.tables:
            text = self.tables["words"].embed(text)
        if "scope" not in self.tables:
            return text, mask
        assert nodes is not None
        assert weights is not None
        return text, mask, self.tables["scope"].embed(nodes), weights

    def learn(self, lr: float | None, factor: float) -> None:
        """After the backward pass: let the looked-up rows learn; `factor` as in Learner.after_backward."""
        for rows in self.tables.values():
            rows.learn(factor / self.gradient_scale, lr)
