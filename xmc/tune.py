"""Search for good settings.

    python -m xmc.tune PRESET --space NAME --trials N [--metric P@1] [--minimise step_seconds] [key=value …]

e.g. `python -m xmc.tune light_xml.sample --space light_xml --trials 16 corpus.valid_fraction=0.1`. Every trial is a
real training run, measured on the validation part of the corpus. The same command again goes on where it stopped, and
with more trials it adds to them.
"""

from __future__ import annotations

import argparse

from xmc import config
from xmc.errors import exit_on_input_error
from xmc.evaluation.trials import Objective


def main() -> None:
    from xmc import sweep

    parser = argparse.ArgumentParser(prog="python -m xmc.tune", description="Search for good settings.")
    parser.add_argument("preset", help="a preset's name, e.g. light_xml, or a YAML file")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="settings put over the preset's")
    parser.add_argument(
        "--space", required=True, help=f"what is searched: {', '.join(sweep.space_names())}, or a .py file"
    )
    parser.add_argument("--trials", type=int, required=True, metavar="N", help="how many to end with")
    parser.add_argument("--metric", default="P@1", help="what is to be high on validation (default: P@1)")
    parser.add_argument(
        "--minimise",
        choices=sweep.MINIMISED,
        help="what is to be low as well: the best compromises are marked",
    )
    arguments = parser.parse_intermixed_args()
    space = sweep.find_space(arguments.space)
    # A sweep's directory is not that of the preset's own run.
    default = f"run.dir=runs/{config.preset_path(arguments.preset).stem}-{space.name}"
    chosen = config.load(arguments.preset, [default, *arguments.settings])
    sweep.sweep(chosen, space, Objective(arguments.metric, arguments.minimise), arguments.trials)


if __name__ == "__main__":
    exit_on_input_error(main)
