from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import pytest
import yaml

from xmc.errors import InputError
from xmc.settings import flatten, from_mapping, from_overrides, merge, parse_overrides, to_mapping, to_yaml


@dataclass(frozen=True)
class Inner:
    rate: float = 1e-3
    workers: int = 1
    kind: Literal["a", "b"] = "a"
    fractions: tuple[float, ...] = (0.5, 0.5)
    min_df: int | float = 1
    note: str | None = None
    on: bool = False


@dataclass(frozen=True)
class Outer:
    path: str
    train: Inner = field(default_factory=Inner)
    seed: int = 1


def test_values_arrive_with_their_types():
    settings = from_overrides(
        Outer,
        [
            "path=7",
            "train.rate=1e-4",
            "train.fractions=[0.1, 0.9]",
            "train.min_df=0.5",
            "train.note=null",
            "train.on=true",
        ],
    )
    assert settings == Outer("7", Inner(rate=1e-4, fractions=(0.1, 0.9), min_df=0.5, on=True))
    assert isinstance(from_overrides(Inner, ["min_df=2"]).min_df, int)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["path=x", "trian.rate=1"], "unknown setting trian; did you mean train"),
        (["path=x", "train.wrokers=1"], "did you mean train.workers"),
        (["path=x", "workers=1"], "did you mean train.workers"),
        (["path=x", "zzz=1"], "--print-config"),
        (["path=x", "train.workers=two"], "train.workers is 'two'; it takes a whole number"),
        (["path=x", "train.workers=1.5"], "whole number"),
        (["path=x", "train.on=1"], "true or false"),
        (["path=x", "train.kind=c"], "one of: a, b"),
        (["path=x", "train.fractions=0.5"], "takes a list"),
        (["path=x", "train=3"], "group of settings"),
        (["seed=1"], "path must be given"),
        (["path"], "not a setting"),
        (["path=x", "train.rate=[1"], "takes a number"),
    ],
)
def test_mistakes_are_named(words: list[str], message: str):
    with pytest.raises(InputError, match=message.replace("[", r"\[")):
        from_overrides(Outer, words)


@pytest.mark.parametrize(
    ("text", "value"), [(",", ","), ("|", "|"), (" ", " "), ("null", None), ("'x'", "x")]
)
def test_separators_survive(text: str, value: str | None):
    assert from_overrides(Inner, [f"note={text}"]).note == value


def test_yaml_round_trip():
    settings = Outer("x", Inner(fractions=(0.7, 0.2, 0.1), note="a: b"))
    assert from_mapping(Outer, yaml.safe_load(to_yaml(settings))) == settings


def test_merge_and_flatten():
    merged = merge(to_mapping(Outer("x")), parse_overrides(["train.workers=4"]))
    assert flatten(merged)["train.workers"] == 4
    assert flatten(merged)["train.rate"] == 1e-3


@dataclass(frozen=True)
class Tuned:
    train: Inner = field(default_factory=lambda: Inner(workers=7))


def test_a_group_keeps_the_defaults_that_its_owner_gives_it():
    assert from_mapping(Tuned, {"train": {"rate": 0.5}}, "test").train == Inner(rate=0.5, workers=7)
