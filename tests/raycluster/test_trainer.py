from __future__ import annotations

import pytest

from raycluster import pool, trainer
from raycluster.job import TrainConfig, num_steps, rate_factor
from raycluster.rank import Plateau
from xmc.errors import InputError


def test_rates_rise_in_the_warm_up_and_fall_to_the_end():
    config = TrainConfig(schedule="linear", warmup=0.1)
    factors = [rate_factor(step, 100, config) for step in range(100)]
    assert factors[:10] == sorted(factors[:10])
    assert factors[10] == pytest.approx(1.0)
    assert factors[10:] == sorted(factors[10:], reverse=True)
    assert 0 < factors[-1] < 0.02
    assert {rate_factor(step, 100, TrainConfig()) for step in range(100)} == {1.0}


def test_rates_fall_when_nothing_was_gained():
    plateau = Plateau(0.5)
    for figure, factor in ((40.0, 1.0), (41.0, 1.0), (41.0, 0.5), (40.5, 0.25), (42.0, 0.25)):
        plateau.judge(figure)
        assert plateau.factor == factor
    by_loss = Plateau(0.1)
    for losses, factor in (((3.0, 1.0), 1.0), ((1.0,), 1.0), ((0.5, 1.7), 0.1)):
        for loss in losses:
            by_loss.saw(loss)
        by_loss.judge(None)
        assert by_loss.factor == pytest.approx(factor)
    resumed = Plateau(0.1)
    resumed.state = by_loss.state
    resumed.saw(0.2)
    resumed.judge(None)
    assert resumed.factor == pytest.approx(0.1)


def test_steps_of_an_epoch_fit_every_rank():
    assert num_steps(103, TrainConfig(batch_size=10)) == 11
    assert num_steps(103, TrainConfig(batch_size=10, workers=2)) == 11
    assert num_steps(5, TrainConfig(batch_size=4, workers=4)) == 1
    with pytest.raises(InputError, match="too few"):
        num_steps(3, TrainConfig(batch_size=4, workers=4))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"workers": 0}, "workers"),
        ({"batch_size": 1, "workers": 2}, "at least one document"),
        ({"warmup": 1.0}, "warmup"),
        ({"average_from": 4, "epochs": 3}, "nothing to average"),
        ({"label_rate": -1.0}, "label_rate"),
    ],
)
def test_impossible_settings(values: dict, message: str):
    with pytest.raises(InputError, match=message):
        TrainConfig(**values)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_a_group_and_a_driver_leave_a_whole_cpu(workers: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(trainer.ray, "cluster_resources", lambda: {"CPU": 2.0})
    assert 2.0 - workers * trainer.default_cpus(workers) - pool.DRIVER_CPUS >= 1.0
