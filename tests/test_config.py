from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from xmc import config, settings
from xmc.errors import InputError


@pytest.mark.parametrize("path", sorted(config.PRESETS.glob("*.yaml")), ids=lambda p: p.stem)
def test_every_preset_loads_and_opens_with_its_command(path: Path):
    loaded = config.load(path.stem)
    assert loaded.system == path.stem.split(".")[0]
    first = path.read_text().splitlines()[0]
    assert first.startswith(f"# python -m xmc.train {path.stem}")


def test_overrides_unknown_keys_and_combinations():
    assert config.load("light_xml", ["train.workers=2", "seed=5"]).train.workers == 2
    with pytest.raises(InputError, match=r"did you mean train\.workers"):
        config.load("light_xml", ["train.wokers=2"])
    with pytest.raises(InputError, match="did you mean light_xml"):
        config.load("light_xlm")
    with pytest.raises(InputError, match=r"run\.top_k"):
        config.load("light_xml", ["metrics.ks=[1, 50]"])
    with pytest.raises(InputError, match="16-bit"):
        config.load("light_xml", ["engine.precision=bf16", "engine.zero_stage=0"])
    with pytest.raises(InputError, match="recall_epochs"):
        config.load("light_xml", ["model.head.negatives=static"])


def test_the_printed_file_is_the_whole_configuration(tmp_path: Path):
    command = [sys.executable, "-m", "xmc.train", "light_xml", "seed=7", "--print-config"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    file = tmp_path / "own.yaml"
    file.write_text(printed)
    assert yaml.safe_load(printed)["seed"] == 7
    assert config.load(str(file)) == config.load("light_xml", ["seed=7"])
    assert settings.to_yaml(config.load(str(file))) == printed


def test_a_mistake_ends_the_command_in_the_users_words():
    command = [sys.executable, "-m", "xmc.train", "light_xml", "train.epochs=many"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == "error: light_xml: train.epochs is 'many'; it takes a whole number\n"
