"""The gated score: another score times a sigmoid of query and key."""

from __future__ import annotations

from dataclasses import dataclass, replace
from numbers import Real

from qkv.errors import CombinationError, DtypeError, ShapeError
from qkv.frameworks import get_framework, is_array, to_numpy
from qkv.scores.base import (
    AffineForm,
    DotProductForm,
    Lowering,
    Score,
    require_array_field,
    sizes_differ,
)
from qkv.scores.registry import resolve_inner_score
from qkv.util.keyword_hints import suggest_keywords
from qkv.util.types import Array, Shape


@suggest_keywords
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
    # The default is a name because torch.compile cannot trace an object here.
    score: Score = "dot"  # type: ignore[assignment]

    def __post_init__(self) -> None:
        require_array_field(self, "w_query", "d_q")
        require_array_field(self, "w_key", "d_k")
        resolve_inner_score(self)
        if self.score.needs_positions:
            inner = type(self.score).__name__
            raise CombinationError(
                f"Gated cannot gate {inner}, whose scores depend on positions: put the gate "
                f"inside, {inner}(…, score=Gated(…))"
            )
        if not (self.bias is None or is_array(self.bias) or isinstance(self.bias, Real)):
            raise DtypeError(f"Gated: bias must be a number or an array, not {self.bias!r}")
        if is_array(self.bias) and tuple(self.bias.shape) not in ((), (1,)):  # type: ignore[union-attr]
            raise ShapeError(
                f"Gated: bias must be one number, not an array of shape {tuple(self.bias.shape)}"  # type: ignore[union-attr]
            )

    def __call__(self, query: Array, key: Array) -> Array:
        from_query, from_key = self.gate_terms(query, key)
        logit = from_query + get_framework(query).xp.matrix_transpose(from_key)
        return get_framework(logit).sigmoid(logit) * self.score(query, key)

    @property
    def needs_range(self) -> bool:  # type: ignore[override]
        return self.score.needs_range

    def gate_terms(self, query: Array, key: Array) -> tuple[Array, Array]:
        """Return the query's and the key's part of the gate's logit, (…, n, 1) and (…, m, 1)."""
        xp = get_framework(query).xp
        from_query = xp.matmul(query, self.w_query[..., :, None])
        if self.bias is not None:
            from_query = from_query + self.bias
        return from_query, xp.matmul(key, self.w_key[..., :, None])

    def dot_product_form(self, query: Array, key: Array) -> DotProductForm:
        from_query, from_key = self.gate_terms(query, key)
        return self.score.dot_product_form(query, key)._replace(
            gate_query=from_query, gate_key=from_key
        )

    def find_lowering(
        self, query: Array, key: Array, tolerance: float | None, dtype: str
    ) -> Lowering:
        if isinstance(self.score, Gated):
            return "a gate inside a gate has no dot product form"
        inner = self.score.find_lowering(query, key, tolerance, dtype)
        if isinstance(inner, str):
            return inner
        return replace(self, score=inner[0]), inner[1]

    def affine_form(self, query: Array, norm: Array) -> AffineForm | None:
        inner = self.score.affine_form(query, norm)
        if inner is None or any(x is not None for x in inner[1:]):
            return None
        w_query, w_key = to_numpy(self.w_query), to_numpy(self.w_key)
        if w_key.ndim > 1:
            return None
        bias = 0.0 if self.bias is None else to_numpy(self.bias).reshape(-1)
        most = abs(query) @ abs(w_query) + abs(bias)
        return inner._replace(gate=(query @ w_query + bias, w_key, most))

    def check_shapes(self, query: Shape, key: Shape) -> None:
        for name, w, width in (("w_query", self.w_query, query), ("w_key", self.w_key, key)):
            if sizes_differ(w.shape[-1], width[-1]):
                raise ShapeError(
                    f"Gated: {name} must be ({width[-1]},) for vectors of width {width[-1]}, "
                    f"not {tuple(w.shape)}"
                )
        self.score.check_shapes(query, key)

    def numbers_per_pair(self, width: int) -> int:
        return self.score.numbers_per_pair(width) + 1
