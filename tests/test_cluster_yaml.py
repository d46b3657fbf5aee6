from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

ROOT = Path(__file__).parent.parent


def test_ray_accepts_the_cluster_file():
    validate_config(prepare_config(yaml.safe_load((ROOT / "cluster.yaml").read_text())))


def test_the_check_can_fail():
    config = yaml.safe_load((ROOT / "cluster.yaml").read_text())
    config["no_such_key"] = 1
    with pytest.raises(Exception, match="no_such_key"):
        validate_config(prepare_config(config))
