"""The systems, one module each with the same parts in the same order: Config, stages, assemble, load_predictor.

Config                                   settings: a subclass of `xmc.config.CommonConfig`
stages(config, corpus, on_steps)         the stages between the corpus and what `assemble` needs
assemble(out, given)                     put the model's own files into a model directory
load_predictor(directory, config, L)     an object with `top_k(texts, k) -> TopK`
"""

from __future__ import annotations

import importlib
from types import ModuleType

SYSTEMS = ("attention_xml", "linear", "light_xml", "x_transformer", "aplc_xlnet", "treader_xml")


def find_system(name: str) -> ModuleType:
    """The module of a system."""
    return importlib.import_module(f"xmc.systems.{name}")
