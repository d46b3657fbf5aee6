from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from xmc import config, run, settings
from xmc.errors import InputError


@pytest.mark.parametrize("path", sorted(config.PRESETS.glob("*.yaml")), ids=lambda p: p.stem)
def test_every_preset_loads_and_opens_with_its_command(path: Path):
    loaded = config.load(path.stem)
    assert loaded.system == path.stem.split(".")[0]
    first = path.read_text().splitlines()[0]
    assert first.startswith(f"# python -m xmc.train {path.stem}")


@pytest.mark.parametrize("path", sorted(config.PRESETS.glob("*.yaml")), ids=lambda p: p.stem)
def test_the_variants_and_members_of_every_preset_are_settings(path: Path):
    loaded = config.load(path.stem)
    variants = [run.variant_config(loaded, i, Path("runs")) for i in range(len(loaded.variants))]
    assert len({name for name, _ in variants}) == len(variants)
    for one in (loaded, *(variant for _, variant in variants)):
        for number in range(len(one.members)):
            run.member_config(one, number)


def test_a_wrong_key_of_a_variant_or_member_is_named():
    with pytest.raises(InputError, match=r"variants\[0\].*rankers"):
        run.variant_config(config.load("x_transformer", ["variants=[{rankers: {beam: 3}}]"]), 0, Path("runs"))
    with pytest.raises(InputError, match=r"members\[1\].*indx"):
        run.member_config(config.load("x_transformer", ["members=[{index: text_emb}, {indx: text_emb}]"]), 1)


def test_the_ablation_is_table_5_of_the_x_transformer_paper():
    loaded = config.load("x_transformer.ablation")
    variants = dict(run.variant_config(loaded, i, Path("runs")) for i in range(len(loaded.variants)))
    assert list(variants) == [str(number) for number in range(10)]
    assert [len(variants[str(number)].members) for number in range(10)] == [0] * 7 + [3, 3, 9]
    rankers = [(variants[name].ranker.inputs, variants[name].ranker.negatives) for name in "0123456789"]
    assert rankers == [("tfidf", "tfn"), ("both", "tfn"), *[("both", "tfn+man")] * 8]
    single = [(variants[name].index, variants[name].encoder.name) for name in "0123456"]
    assert single == [
        *[("pifa_tfidf", "bert-large-cased")] * 3,
        ("pifa_tfidf", "roberta-large"),
        ("pifa_tfidf", "xlnet-large-cased"),
        ("pifa_neural", "xlnet-large-cased"),
        ("text_emb", "xlnet-large-cased"),
    ]
    members = [run.member_config(variants["9"], number) for number in range(9)]
    assert len({(member.index, member.encoder.name) for member in members}) == 9


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


def test_a_preset_extends_another(tmp_path: Path):
    own = tmp_path / "own.yaml"
    own.write_text("extends: light_xml.sample\ntrain: {epochs: 7}\n")
    loaded, base = config.load(str(own)), config.load("light_xml.sample")
    assert loaded.train.epochs == 7
    assert loaded.train.batch_size == base.train.batch_size
    assert loaded.encoder == base.encoder
    again = tmp_path / "again.yaml"
    again.write_text(f"extends: {own}\nseed: 5\n")
    assert (config.load(str(again)).seed, config.load(str(again)).train.epochs) == (5, 7)
    own.write_text(f"extends: {again}\n")
    with pytest.raises(InputError, match="extends itself"):
        config.load(str(own))
    own.write_text("extends: light_xml.smaple\n")
    with pytest.raises(InputError, match=r"did you mean light_xml\.sample"):
        config.load(str(own))
