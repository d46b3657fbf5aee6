"""What TReaderXML's towers, scopes and labels cost on top of the encoder: time of a training step. The limit is the
encoder alone.

    python -m benchmarks.treader_layer

MiniLM, batches of 32 × 64 tokens, 32 scope nodes a document, 21,818 labels (debian-deps), one process. Steps of the
encoder alone and of the network's variants alternate, so that whatever else the machine does hits all; medians are
compared.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks.label_layer import BATCH, STEPS, TOKENS, make_batch, seconds, start_group
from benchmarks.record import record
from xmc.nn.encoders import Encoder, EncoderConfig, load_encoder
from xmc.nn.engine import Engine, EngineConfig
from xmc.nn.heads.matcher import MatcherModule
from xmc.nn.heads.treader_xml import TReaderConfig, TReaderHead, TReaderModule
from xmc.nn.optimisers import parameter_groups
from xmc.nn.words import WordRows, WordVectorsConfig

NUM_LABELS, NUM_NODES, SCOPE = 21_818, 21_900, 32
CASES = {
    "teacher and reading": TReaderConfig(bottleneck_width=384),
    "teacher alone": TReaderConfig(bottleneck_width=384, reading="none"),
    "neither": TReaderConfig(bottleneck_width=384, reading="none", teacher=False),
}


def make_encoder() -> Encoder:
    config = EncoderConfig(name="minilm", layers_pooled=1, summary="mean", dropout=0.0, max_tokens=TOKENS)
    return load_encoder(config)


def make_engine(module: nn.Module) -> Engine:
    groups = [group | {"lr": 1e-5} for group in parameter_groups(module, 0.0)]
    return Engine(module, groups, EngineConfig(), torch.device("cpu"), BATCH)


def encoder_step(ids: Tensor, mask: Tensor) -> Callable[[], None]:
    engine = make_engine(MatcherModule(make_encoder()))
    engine.train()

    def step() -> None:
        engine.backward(engine(ids, mask)[0].square().mean())
        engine.step()

    return step


def whole_step(config: TReaderConfig, ids: Tensor, mask: Tensor) -> Callable[[], None]:
    """Look-up, network, label rows, and the scope's rows: what `raycluster.rank` does in a step."""
    encoder = make_encoder()
    module = TReaderModule(encoder, encoder.width, config)
    engine = make_engine(module)
    engine.train()
    scope = WordRows(NUM_NODES, WordVectorsConfig(width=encoder.width), seed=0) if config.teacher else None
    head = TReaderHead(config, NUM_LABELS, scope, seed=0)
    targets = make_batch(NUM_LABELS)[2]
    generator = torch.Generator().manual_seed(1)
    weights = 1.0 / torch.arange(1, NUM_NODES + 1, dtype=torch.float64)
    nodes = torch.multinomial(weights, BATCH * SCOPE, replacement=True, generator=generator)
    lists = (
        (nodes.view(BATCH, SCOPE), torch.rand(BATCH, SCOPE, generator=generator)) if config.teacher else ()
    )

    def step() -> None:
        loss = head.loss(engine(*head.look_up(ids, mask, *lists)), targets, lr=1e-4)
        engine.backward(loss)
        head.learn(1e-4, 1.0)
        engine.step()

    return step


def main() -> None:
    start_group()
    ids, mask, _ = make_batch(NUM_LABELS)
    works = {"encoder": encoder_step(ids, mask)}
    works |= {name: whole_step(config, ids, mask) for name, config in CASES.items()}
    times: dict[str, list[float]] = {name: [] for name in works}
    for i in range(STEPS + 2):
        for name, work in works.items():
            took = seconds(work)
            if i >= 2:  # the first steps warm caches up
                times[name].append(took)
    medians = {name: statistics.median(values) for name, values in times.items()}
    results = {
        name: {"step_s": round(value, 4), "of_the_encoder_alone": round(value / medians["encoder"], 3)}
        for name, value in medians.items()
    }
    settings = {"batch": BATCH, "tokens": TOKENS, "steps": STEPS, "labels": NUM_LABELS, "scope_nodes": SCOPE}
    record("treader_layer", settings | {"encoder": "minilm"}, results)


if __name__ == "__main__":
    main()
