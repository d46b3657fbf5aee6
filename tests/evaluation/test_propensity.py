from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp
from napkinxc.metrics import Jain_et_al_inverse_propensity

from xmc.errors import InputError
from xmc.evaluation.propensity import PropensityConfig, inverse_propensity, parameters_of


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("WikiLSHTC-325K", (0.5, 0.4)),
        ("Wikipedia-500K", (0.5, 0.4)),
        ("wiki_500k", (0.5, 0.4)),
        ("Amazon-670K", (0.6, 2.6)),
        ("amazon_670k", (0.6, 2.6)),
        ("Amazon-3M", (0.6, 2.6)),
        # Alike by prefix only.
        ("Wiki10-31K", (0.55, 1.5)),
        ("AmazonCat-13K", (0.55, 1.5)),
        ("Amazon-670K-mine", (0.55, 1.5)),
        ("EUR-Lex-4K", (0.55, 1.5)),
        ("", (0.55, 1.5)),
    ],
)
def test_parameters_go_by_the_exact_data_set(name, expected):
    assert parameters_of(name) == expected


def test_settings_override_the_data_set():
    assert PropensityConfig(a=0.7).resolve("Amazon-3M") == (0.7, 2.6)
    assert PropensityConfig(b=1.0).resolve("mine") == (0.55, 1.0)
    with pytest.raises(InputError, match=r"propensity\.a"):
        PropensityConfig(a=0.0)


def test_equals_napkinxc():
    truth = sp.random(400, 50, 0.1, format="csr", random_state=0)
    truth.data[:] = 1
    frequency = np.asarray(truth.sum(axis=0)).ravel()
    for a, b in ((0.55, 1.5), (0.6, 2.6), (0.5, 0.4)):
        ours = inverse_propensity(frequency, 400, a, b)
        np.testing.assert_allclose(ours, Jain_et_al_inverse_propensity(truth, a, b), rtol=1e-12)


def test_few_documents_do_not_give_probabilities_above_one():
    assert (inverse_propensity(np.array([0, 1, 2]), 2, 0.55, 1.5) == 1).all()
    assert (inverse_propensity(np.array([0, 1, 2]), 3, 0.55, 1.5) > 1).all()
