"""How likely a label is to be recorded where it applies (Jain et al. 2016), from its train frequency alone."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from xmc.errors import InputError

DEFAULT_PARAMETERS = (0.55, 1.5)

# By exact data set: Wiki10-31K and AmazonCat-13K look alike but take the default. Names compare without case
# and with "_" as "-", so that a preset's name (amazon_670k) finds its data set.
_PARAMETERS = {
    "wikilshtc-325k": (0.5, 0.4),
    "wikipedia-500k": (0.5, 0.4),
    "wiki-500k": (0.5, 0.4),  # the papers' name of Wikipedia-500K
    "amazon-670k": (0.6, 2.6),
    "amazon-3m": (0.6, 2.6),
}


@dataclass(frozen=True)
class PropensityConfig:
    """The parameters of the propensity curve; None takes the published value of the data set."""

    # Exponent: larger weighs rare labels more. Greater than 0.
    a: float | None = None
    # Offset of the frequency: larger flattens the rare end. Greater than 0.
    b: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("a", self.a), ("b", self.b)):
            if value is not None and not value > 0:
                raise InputError(f"propensity.{name} is {value}; it must be greater than 0")

    def resolve(self, data_set: str) -> tuple[float, float]:
        """(a, b) for a data set of this name: what is set here, else what was published for it."""
        a, b = parameters_of(data_set)
        return (a if self.a is None else self.a, b if self.b is None else self.b)


def parameters_of(data_set: str) -> tuple[float, float]:
    """The published (a, b) of a data set by its exact name; the common default for every other."""
    return _PARAMETERS.get(data_set.lower().replace("_", "-"), DEFAULT_PARAMETERS)


def inverse_propensity(
    train_frequency: NDArray | float, num_train_documents: int, a: float, b: float
) -> NDArray[np.float64]:
    """1/p_l = 1 + C (N_l + b)^−a with C = (ln N − 1)(b + 1)^a, in the shape of `train_frequency`.

    C turns negative below three documents, where the curve means nothing: it is held at 0, which is p = 1.
    """
    c = max(0.0, (math.log(max(num_train_documents, 1)) - 1) * (b + 1) ** a)
    return 1 + c * (np.asarray(train_frequency, np.float64) + b) ** -a
