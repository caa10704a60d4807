"""α: how scores become weights. Pick one by name or build one."""

from __future__ import annotations

from qkv.errors import DtypeError, unknown
from qkv.weightings.average import Average
from qkv.weightings.base import State, Weighting, pool
from qkv.weightings.hard import Hard
from qkv.weightings.normalized import Normalized, Raw, Sigmoid
from qkv.weightings.softmax import Softmax, TopK
from qkv.weightings.sparse import Entmax, Sparsemax

NAMES: dict[str, type[Weighting]] = {
    "softmax": Softmax,
    "hard": Hard,
    "average": Average,
    "normalized": Normalized,
    "raw": Raw,
    "sigmoid": Sigmoid,
    "sparsemax": Sparsemax,
    "entmax15": Entmax,
}

__all__ = [
    "NAMES",
    "Average",
    "Entmax",
    "Hard",
    "Normalized",
    "Raw",
    "Sigmoid",
    "Softmax",
    "Sparsemax",
    "State",
    "TopK",
    "Weighting",
    "pool",
    "resolve",
]


def resolve(weighting: str | Weighting) -> Weighting:
    """A weighting from its name or itself.

    >>> resolve("entmax15")
    Entmax(alpha=1.5)
    """
    if isinstance(weighting, Weighting):
        return weighting
    if isinstance(weighting, str):
        if weighting in NAMES:
            return NAMES[weighting]()
        if weighting.lower() == "topk":
            raise DtypeError("weighting 'topk' has a parameter: pass weightings.TopK(k)")
        raise unknown("weighting", weighting, NAMES)
    if isinstance(weighting, type) and issubclass(weighting, Weighting):
        name = weighting.__name__
        raise DtypeError(f"weighting is the class {name}: build it, {name}(…)")
    raise DtypeError(f"weighting must be a name or a weighting, not {type(weighting).__name__}")
