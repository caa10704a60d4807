"""A score times a gate that opens and closes with its query and key."""

from __future__ import annotations

from dataclasses import dataclass, replace
from numbers import Real

from qkv.arrays import is_array, of, to_numpy
from qkv.errors import DtypeError, ShapeError
from qkv.scores.base import Affine, Form, Lowering, Score, array_of, differ, inner_score
from qkv.types import Array, Shape


@dataclass(frozen=True)
class Gated(Score):
    """s = σ(w_query·q + w_key·k + bias) · score(q, k), with w_query (d_q,), w_key (d_k,).

    >>> import numpy as np
    >>> zero = np.zeros(2)
    >>> Gated(zero, zero)(np.array([[1.0, 2.0]]), np.array([[3.0, 4.0]]))
    array([[5.5]])
    """

    w_query: Array
    w_key: Array
    bias: float | Array | None = None
    score: Score = "dot"  # type: ignore[assignment]  # no object: torch.compile traces none here

    def __post_init__(self) -> None:
        array_of(self, "w_query", "d_q")
        array_of(self, "w_key", "d_k")
        inner_score(self)
        if not (self.bias is None or is_array(self.bias) or isinstance(self.bias, Real)):
            raise DtypeError(f"Gated: bias must be a number or an array, not {self.bias!r}")
        if is_array(self.bias) and tuple(self.bias.shape) not in ((), (1,)):  # type: ignore[union-attr]
            raise ShapeError("Gated: bias is one number, not an array of many")

    def __call__(self, query: Array, key: Array) -> Array:
        from_query, from_key = self.halves(query, key)
        logit = from_query + of(query).xp.matrix_transpose(from_key)
        return of(logit).sigmoid(logit) * self.score(query, key)

    @property
    def ranged(self) -> bool:  # type: ignore[override]
        return self.score.ranged

    def halves(self, query: Array, key: Array) -> tuple[Array, Array]:
        """The two summands of the gate's logit, (…, n, 1) and (…, m, 1)."""
        xp = of(query).xp
        from_query = xp.matmul(query, self.w_query[..., :, None])
        if self.bias is not None:
            from_query = from_query + self.bias
        return from_query, xp.matmul(key, self.w_key[..., :, None])

    def form(self, query: Array, key: Array) -> Form:
        from_query, from_key = self.halves(query, key)
        return self.score.form(query, key)._replace(gate_query=from_query, gate_key=from_key)

    def lowered(self, query: Array, key: Array, tolerance: float | None, dtype: str) -> Lowering:
        if isinstance(self.score, Gated):
            return "a gate within a gate is no dot product"
        inner = self.score.lowered(query, key, tolerance, dtype)
        if isinstance(inner, str):
            return inner
        return replace(self, score=inner[0]), inner[1]

    def affine(self, query: Array, norm: Array) -> Affine | None:
        inner = self.score.affine(query, norm)
        if inner is None or any(x is not None for x in inner[1:]):
            return None
        w_query, w_key = to_numpy(self.w_query), to_numpy(self.w_key)
        if w_key.ndim > 1:
            return None
        bias = 0.0 if self.bias is None else to_numpy(self.bias).reshape(-1)
        most = abs(query) @ abs(w_query) + abs(bias)
        return inner._replace(gate=(query @ w_query + bias, w_key, most))

    def check(self, query: Shape, key: Shape) -> None:
        for name, w, width in (("w_query", self.w_query, query), ("w_key", self.w_key, key)):
            if differ(w.shape[-1], width[-1]):
                raise ShapeError(
                    f"Gated: {name} must be ({width[-1]},) for rows of {width[-1]} numbers, "
                    f"not {tuple(w.shape)}"
                )
        self.score.check(query, key)

    def footprint(self, width: int) -> int:
        return self.score.footprint(width) + 1
