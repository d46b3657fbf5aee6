"""Train a model.

    python -m xmc.train PRESET [key=value …]

e.g. `python -m xmc.train light_xml corpus.path=DIR run.dir=DIR train.workers=2 seed=1`. PRESET is a name (see
xmc/presets) or a YAML file. The same command again skips what is done and resumes what is half done.
"""

from __future__ import annotations

import argparse

from xmc import config, settings
from xmc.errors import exit_on_input_error


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m xmc.train", description="Train a model.")
    parser.add_argument("preset", help="a preset's name, e.g. light_xml, or a YAML file")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="settings put over the preset's")
    parser.add_argument("--print-config", action="store_true", help="print the full settings and stop")
    arguments = parser.parse_args()
    chosen = config.load(arguments.preset, arguments.settings)
    if arguments.print_config:
        print(settings.to_yaml(chosen), end="")
        return
    from xmc import run

    run.train(chosen)


if __name__ == "__main__":
    exit_on_input_error(main)
