"""The view Regression of a database of numbers."""

from __future__ import annotations

from typing import Any

import numpy as np

from qkv.database import Database
from qkv.errors import DtypeError
from qkv.scores import Gaussian


def points(shown: Database, title: str = "Regression") -> dict[str, Any]:
    """Return the view Regression of a database with a number as key and a number as value.

    It has the bandwidth of the database, so f(q) is `D.ask(q).value`. Rows without a value are
    left out.

    >>> view = points(Database({2.9: 58.0, 3.4: 70.0, 3.9: 88.0}))
    >>> view["view"], view["data"]["x"].tolist(), round(view["data"]["bandwidth"], 3)
    ('regression', [2.9, 3.4, 3.9], 0.25)
    """
    info = shown.info()
    kinds = info["key_kind"], info["value_kind"]
    if kinds != ("number", "number"):
        raise DtypeError(
            f"points needs numbers as key and value, not {kinds[0]} and {kinds[1]}: choose columns "
            "of numbers with D.by(key=…, value=…)"
        )
    pairs = [(x, y) for x, y in shown.items() if y is not None]
    x, y = np.array(pairs, np.float64).reshape(-1, 2).T
    known = ~np.isnan(y)
    data = {"x": x[known], "y": y[known], "names": [*info["key"], *info["value"]], "name": title}
    score = None if shown.encoder is None else shown.encoder.default_score(len(shown))
    if isinstance(score, Gaussian) and isinstance(score.bandwidth, float):
        data |= {"score": "gaussian", "bandwidth": score.bandwidth}
    return {"view": "regression", "title": title, "data": data}
