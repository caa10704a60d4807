"""Layers of torch as options of tests/transforms.py, and what the frameworks have themselves.

A layer is a function of its inputs and its parameters, so that both are differentiated and mapped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.transforms import Function, Option


def _layer(make: Callable[[], Any], call: Function) -> Option:
    """call(layer, query, key, value), of the vectors of one head."""
    made: list[Any] = []  # before any transform looks on

    def parameters(n: int) -> list[np.ndarray]:
        if not made:
            made.append(make().double())
        rng = np.random.default_rng(3)
        return [rng.normal(size=tuple(x.shape)) / 2 for x in made[0].parameters()]

    def function(query: Any, key: Any, value: Any, *held: Any) -> Any:
        import torch

        names = [name for name, _ in made[0].named_parameters()]
        now = dict(zip(names, held, strict=True))
        rows = (query[:, 0], key[:, 0], value[:, 0])
        return call(lambda *x: torch.func.functional_call(made[0], now, x), *rows)

    def apart() -> Function:
        """The same with a layer per thread: functional_call is not thread-safe."""
        own = _layer(make, call)
        own.extra(0)
        return own.call

    function.apart = apart  # type: ignore[attr-defined]
    return Option("layers", function, parameters)


def _heads(**options: Any) -> Option:
    def make() -> Any:
        from qkv import nn

        return nn.MultiHeadAttention(3, 3, batch_first=True, **options)

    return _layer(make, lambda layer, *x: layer(*x)[0])


def _block() -> Any:
    from qkv import nn

    return nn.TransformerBlock(3, 3, 4, dropout=0.0, cross=True)


LAYERS: dict[str, Option] = {
    "MultiHeadAttention": _heads(),
    "MultiHeadAttention, additive, entmax15": _heads(score="additive", weighting="entmax15"),
    "TransformerBlock": _layer(_block, lambda block, query, key, value: block(query, key)),
}


def _sdpa(*x: Any) -> Any:
    import torch

    return torch.nn.functional.scaled_dot_product_attention(*x)


SDPA = "scaled_dot_product_attention"
PEER: dict[str, Option] = {SDPA: Option("torch's own", _sdpa)}
"""What torch has itself: a cell that it fills must not be empty here."""

GAPS: dict[str, tuple[str, ...]] = {
    "jacfwd": (SDPA,),
    "hessian": (SDPA,),
    "jvp": (SDPA,),
    "forward AD": (SDPA,),
    "checkpoint, second derivative": (SDPA, "TransformerBlock"),
}
"""Options that a transform of torch refuses, by an error."""
