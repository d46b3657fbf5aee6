"""Text encoders: any transformers model by hub name or path, the packaged `minilm`, or a small random one for tests.

An encoder turns token ids into one vector a document. It knows nothing of labels, ranks or training.

Legend: B documents, T tokens, d width of a layer.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from xmc import hub
from xmc.corpus import tokens
from xmc.errors import InputError

_RANDOM_KINDS = ("bert", "roberta", "xlnet")
_SUMMARY_IS_LAST = ("xlnet",)  # model types whose tokenizer puts the summary token behind the text
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclass(frozen=True)
class EncoderConfig:
    # a hub name (bert-base-uncased), a directory, minilm, or random:bert | random:roberta | random:xlnet
    name: str = "minilm"
    # token: a text's vector is its summary token's state; mean: the mean of all its tokens' states
    summary: Literal["token", "mean"] = "token"
    # the summaries of this many last layers are concatenated; 1: the last layer alone
    layers_pooled: int = 5
    # on the concatenated summary
    dropout: float = 0.5
    # recompute activations in the backward pass: about a third more time, a fraction of the memory
    gradient_checkpointing: bool = False
    # longer texts are cut
    max_tokens: int = 128
    # of random encoders only
    random_layers: int = 2
    random_width: int = 32
    random_heads: int = 2
    random_vocabulary: int = 300

    def __post_init__(self) -> None:
        if not self.name:
            raise InputError("encoder name is empty; give a hub name, a directory, minilm or random:bert")
        if self.layers_pooled < 1 or self.max_tokens < 3:
            raise InputError("encoder layers_pooled must be at least 1 and max_tokens at least 3")
        if not 0.0 <= self.dropout < 1.0:
            raise InputError(f"encoder dropout must lie in [0, 1); got {self.dropout}")
        if self.random_kind and self.random_kind not in _RANDOM_KINDS:
            raise InputError(
                f"encoder {self.name!r} is unknown; random ones are random:{'|'.join(_RANDOM_KINDS)}"
            )
        if self.random_kind and self.random_vocabulary < 256 + 5:
            raise InputError(
                "encoder random_vocabulary must be at least 261: the bytes and five special tokens"
            )

    @property
    def random_kind(self) -> str:
        return self.name.removeprefix("random:") if self.name.startswith("random:") else ""


class Encoder(nn.Module):
    """The summaries of the last layers, concatenated, with dropout.

    A summary is the mean of a layer's states, or its state of the summary token: the first real one (BERT, RoBERTa) or
    the last real one (XLNet), whichever side is padded.
    """

    def __init__(
        self, model: Any, layers_pooled: int, dropout: float, summary: Literal["token", "mean"] = "token"
    ) -> None:
        super().__init__()
        self.model: Any = model
        self.layers_pooled = layers_pooled
        self.summary = summary
        self.summary_is_last = model.config.model_type in _SUMMARY_IS_LAST
        self.dropout = nn.Dropout(dropout)

    @property
    def width(self) -> int:
        """Length of a document's vector: layers_pooled · d."""
        return self.layers_pooled * self.model.config.hidden_size

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """(B × layers_pooled·d) from token ids and mask, each (B × T). Layers run from the last one backwards."""
        output = self.model(
            input_ids=input_ids, attention_mask=attention_mask, output_hidden_states=self.layers_pooled > 1
        )
        states = [output.last_hidden_state]
        if self.layers_pooled > 1:
            states = [output.hidden_states[-i] for i in range(1, self.layers_pooled + 1)]
        return self.dropout(torch.cat(self._summaries(states, attention_mask), dim=1))

    def _summaries(self, states: list[Tensor], attention_mask: Tensor) -> list[Tensor]:
        """(B × d) of each layer's states (B × T × d)."""
        if self.summary == "mean":
            weights = attention_mask / attention_mask.sum(1, keepdim=True)
            return [torch.einsum("btd,bt->bd", state, weights.to(state.dtype)) for state in states]
        place = summary_positions(attention_mask, last=self.summary_is_last)
        rows = torch.arange(attention_mask.shape[0], device=attention_mask.device)
        return [state[rows, place] for state in states]


def summary_positions(attention_mask: Tensor, *, last: bool) -> Tensor:
    """(B,) the position of the first or last real token of each row of the mask (B × T)."""
    real = attention_mask != 0
    if not last:
        return real.to(torch.int8).argmax(1)
    return attention_mask.shape[1] - 1 - real.flip(1).to(torch.int8).argmax(1)


def load_encoder(config: EncoderConfig, seed: int = 0) -> Encoder:
    """Build the encoder that `config` names. `seed` matters to random ones only."""
    model = _random_model(config, seed) if config.random_kind else _pretrained_model(config.name)
    _check_fits(config, model.config)
    if config.gradient_checkpointing:
        _checkpoint_layers(model)
    return Encoder(model, config.layers_pooled, config.dropout, config.summary)


def save_encoder(encoder: Encoder, directory: Path, state: dict[str, Tensor] | None = None) -> None:
    """Write the transformers model as safetensors with its config; `load_encoder` reads it by the directory's name,
    `load_tokenizer` only where the tokenizer's files are put beside them.

    `state` replaces the weights where they are not in the module (averaged, or partitioned by ZeRO 3); its names are
    those of `encoder.model`.
    """
    encoder.model.save_pretrained(directory, state_dict=state)


def load_tokenizer(config: EncoderConfig) -> Any:
    """The tokenizer that belongs to the encoder; random encoders read bytes."""
    return _byte_tokenizer(config) if config.random_kind else tokens.load_tokenizer(config.name)


# --- pretrained -----------------------------------------------------------------------------------------------------


def _pretrained_model(name: str) -> nn.Module:
    from transformers import AutoConfig, AutoModel

    _check_directory(name)
    model_config = hub.from_pretrained(AutoConfig, name)
    # The pooler is a head that nobody here reads: without it no parameter goes without a gradient.
    options = {"add_pooling_layer": False} if model_config.model_type in ("bert", "roberta") else {}
    return hub.from_pretrained(AutoModel, name, config=model_config, use_safetensors=True, **options).float()


def _check_directory(name: str) -> None:
    """Refuse a directory that is no model, or whose weights only a pickle holds."""
    path = hub.local_directory(name)
    if path is None or (any(path.glob("*.safetensors")) and (path / "config.json").is_file()):
        return
    if not (path / "config.json").is_file():
        raise InputError(
            f"encoder {name!r}: the directory has no config.json, so it is not a transformers model"
        )
    if any(file for pattern in _PICKLED for file in path.glob(pattern)):
        raise InputError(
            f"encoder {name!r}: its weights are pickled, and a pickle can run code, so they are not read; "
            "convert them to safetensors (transformers' save_pretrained writes it)"
        )
    raise InputError(f"encoder {name!r}: the directory has no *.safetensors weights")


def _check_fits(config: EncoderConfig, model_config: Any) -> None:
    layers = model_config.num_hidden_layers
    if config.layers_pooled > layers:
        raise InputError(
            f"encoder layers_pooled is {config.layers_pooled}, but {config.name!r} has {layers} layers"
        )
    positions = getattr(model_config, "max_position_embeddings", None)
    # RoBERTa counts positions from behind its padding index.
    reserved = model_config.pad_token_id + 1 if model_config.model_type == "roberta" else 0
    if isinstance(positions, int) and 0 < positions - reserved < config.max_tokens:
        raise InputError(
            f"encoder max_tokens is {config.max_tokens}, but {config.name!r} reads {positions - reserved} at most"
        )


def _checkpoint_layers(model: Any) -> None:
    if model.supports_gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return
    layers = getattr(model, "layer", None)
    if not isinstance(layers, nn.ModuleList):
        raise InputError(
            f"encoder of type {model.config.model_type!r} has no gradient checkpointing; turn it off"
        )
    # transformers has none for XLNet: its layers are wrapped here.
    for layer in layers:
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)


# --- random ---------------------------------------------------------------------------------------------------------


def _random_model(config: EncoderConfig, seed: int) -> Any:
    from transformers import AutoModel, BertConfig, RobertaConfig, XLNetConfig

    width, layers, heads = config.random_width, config.random_layers, config.random_heads
    sizes: dict[str, Any] = {"vocab_size": config.random_vocabulary, "pad_token_id": 0, "bos_token_id": 2}
    sizes |= {"eos_token_id": 3}
    if config.random_kind == "xlnet":
        model_config = XLNetConfig(d_model=width, n_layer=layers, n_head=heads, d_inner=4 * width, **sizes)
    else:
        kind = BertConfig if config.random_kind == "bert" else RobertaConfig
        model_config = kind(
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            intermediate_size=4 * width,
            max_position_embeddings=config.max_tokens + 2,
            **sizes,
        )
    options = {} if config.random_kind == "xlnet" else {"add_pooling_layer": False}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModel.from_config(model_config, **options)


def _byte_tokenizer(config: EncoderConfig) -> Any:
    """One token a byte, with each model class's own place for the summary token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*special, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    summary_is_last = config.random_kind in _SUMMARY_IS_LAST
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A [SEP] [CLS]" if summary_is_last else "[CLS] $A [SEP]",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        padding_side="left" if summary_is_last else "right",
        model_max_length=config.max_tokens,
    )
