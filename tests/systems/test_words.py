"""Word vectors before training: from an encoder that reads each word alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from raycluster.stages import Runner
from xmc import config
from xmc.corpus.words import UNKNOWN_ID, Vocabulary
from xmc.errors import InputError
from xmc.nn.words import WordVectorsConfig, principal_axes
from xmc.systems.shared_stages import corpus_stage
from xmc.systems.words import VOCABULARY, WORD_TABLE, words_stages


def test_principal_axes_keep_what_differs():
    """Vectors that lie in a plane off the origin keep all their distances, up to one factor, in two numbers each."""
    generator = np.random.default_rng(0)
    points = generator.normal(size=(40, 2)) * (3.0, 0.5)
    plane, _ = np.linalg.qr(generator.normal(size=(7, 2)))
    vectors = (points @ plane.T + 5.0).astype(np.float32)
    kept = principal_axes(vectors, 2)
    assert kept.shape == (40, 2)
    assert kept.dtype == np.float32
    np.testing.assert_allclose(kept.mean(axis=0), 0.0, atol=1e-5)
    assert kept.std() == pytest.approx(0.5 / 3**0.5, rel=1e-4)
    assert kept[:, 0].std() > kept[:, 1].std()
    distances = [np.linalg.norm(x[:, None] - x[None], axis=-1) for x in (vectors, kept)]
    factor = distances[1].sum() / distances[0].sum()
    np.testing.assert_allclose(distances[1], distances[0] * factor, atol=1e-4)
    with pytest.raises(InputError, match="7 wide"):
        principal_axes(vectors, 8)


def test_a_file_or_an_encoder():
    with pytest.raises(InputError, match="one of them"):
        WordVectorsConfig(file="glove.txt", encoder="minilm")


@pytest.mark.slow
def test_an_encoder_gives_every_word_a_vector(ray_session: None, tmp_path: Path):
    overrides = ["words.vectors.encoder=random:bert", "words.vectors.width=20", f"run.dir={tmp_path}"]
    chosen = config.load("attention_xml.sample", overrides)
    runner = Runner(tmp_path / "stages", print)
    runner.run(corpus_stage(chosen))
    for stage in words_stages(chosen.words, seed=1):
        runner.run(stage)
    vocabulary = Vocabulary.load(runner.done["tokens"] / VOCABULARY)
    (table,) = load_file(runner.done["words"] / WORD_TABLE).values()
    words = table[UNKNOWN_ID + 1 :]
    assert words.shape == (len(vocabulary.words), 20)
    assert len(np.unique(words, axis=0)) > 0.99 * len(words)
    assert words.std() == pytest.approx(0.5 / 3**0.5, rel=1e-3)
