"""A model as MLflow's pyfunc serves it. MLflow runs this file when it loads one: nothing is unpickled.

Input: a column of texts (or a list). Output: one row a text with `labels` and `scores`, best first.
"""

from __future__ import annotations

from typing import Any

import mlflow.pyfunc
import pandas as pd


class LabelTexts(mlflow.pyfunc.PythonModel):
    def load_context(self, context: Any) -> None:
        from xmc.model import load

        self._model = load(context.artifacts["model"])

    # MLflow reads type hints of the input as a schema, and warns of those that it does not know.
    def predict(self, context, model_input, params=None) -> pd.DataFrame:  # type: ignore[no-untyped-def]
        column = model_input.iloc[:, 0] if isinstance(model_input, pd.DataFrame) else model_input
        found = self._model.predict([str(text) for text in column], k=int((params or {}).get("k", 10)))
        return pd.DataFrame(
            {
                "labels": [[label for label, _ in row] for row in found],
                "scores": [[score for _, score in row] for row in found],
            }
        )


mlflow.models.set_model(LabelTexts())
