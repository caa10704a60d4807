"""Run a generated Triton function as Python on torch tensors: faster than the interpreter."""

from __future__ import annotations

from types import SimpleNamespace

import torch

LANGUAGE = SimpleNamespace(
    **{name: getattr(torch, name) for name in ("exp", "exp2", "log", "log2", "sqrt", "rsqrt", "sin",
                                               "cos", "erf", "floor", "ceil", "abs", "zeros_like")},
    where=lambda c, a, b: torch.where(c, torch.as_tensor(a), torch.as_tensor(b)),
    maximum=lambda a, b, **_: torch.maximum(torch.as_tensor(a), torch.as_tensor(b)),
    minimum=lambda a, b, **_: torch.minimum(torch.as_tensor(a), torch.as_tensor(b)),
    PropagateNan=SimpleNamespace(ALL=None), float32=torch.float32, int32=torch.int32,
    int64=torch.int64, int1=torch.bool,
)  # fmt: skip


def run_source(source: str, *args: object) -> torch.Tensor:
    """Return f(*given) of a source that defines f."""
    names = {
        "tl": LANGUAGE,
        "triton": SimpleNamespace(jit=lambda function: function),
        "fast_tanh": lambda x, _: torch.tanh(x),
        "F": SimpleNamespace(FAST=False),
    }
    exec(source, names)
    return names["f"](*args)  # type: ignore[operator]
