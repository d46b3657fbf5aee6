"""Search spaces for `python -m xmc.tune PRESET --space NAME`: one module a space.

A space is a function `space(trial, preset)` that asks an Optuna trial for values (trial.suggest_float, suggest_int,
suggest_categorical: each with a name) and returns the settings that follow from them, by their dotted names. They are
put over the preset's settings, which `preset` has. Conditions are plain Python. An order between settings is kept by
asking for a factor, not by drawing again.

A space of your own is a Python file: `--space my_space.py`.
"""
