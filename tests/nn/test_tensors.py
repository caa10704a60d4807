"""What is no tensor is refused by its name, with what to do."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from qkv.errors import ArgumentError, DtypeError, ShapeError  # noqa: E402
from qkv.nn import (  # noqa: E402
    AdditiveScore,
    Attention,
    BahdanauDecoder,
    FeedForward,
    GaussianScore,
    KernelRegression,
    MultiHeadAttention,
    Rotary,
    SelfAttention,
    SqueezeExcitation,
    TransformerBlock,
    TransformerDecoder,
    TransformerEncoder,
)

T = torch.ones(1, 3, 4)
ROWS = np.ones((1, 3, 4), np.float32)
HEADS = MultiHeadAttention(4, 2, batch_first=True)
KERNEL = KernelRegression(T[0], T[0])
BLOCK = {"dim_feedforward": 4}
CALLS = {
    "heads": ("query", lambda x: HEADS(x, x, x)),
    "heads, masked": ("query", lambda x: HEADS(x, x, x, is_causal=True)),
    "heads, key": ("key", lambda x: HEADS(T, x, T)),
    "heads, value": ("value", lambda x: HEADS(T, T, x)),
    "self": ("x", lambda x: SelfAttention(4)(x)),
    "attention": ("query", lambda x: Attention()(x, T, T)),
    "attention, key": ("key", lambda x: Attention()(T, x, T)),
    "attention, value": ("value", lambda x: Attention()(T, T, x)),
    "block": ("x", lambda x: TransformerBlock(4, 2, **BLOCK)(x)),
    "block, norm first": ("x", lambda x: TransformerBlock(4, 2, norm_first=True, **BLOCK)(x)),
    "block, memory": ("memory", lambda x: TransformerBlock(4, 2, cross=True, **BLOCK)(T, x)),
    "encoder": ("x", lambda x: TransformerEncoder(1, 4, 2, **BLOCK)(x)),
    "decoder": ("memory", lambda x: TransformerDecoder(1, 4, 2, **BLOCK)(T, x)),
    "bahdanau": ("tokens", lambda x: BahdanauDecoder(5, 2, 3, 4)(x, T)),
    "bahdanau, memory": ("memory", lambda x: BahdanauDecoder(5, 2, 3, 4)(T[0].long(), x)),
    "regression, examples": ("key", lambda x: KernelRegression(x, x)),
    "regression": ("query", lambda x: KERNEL(x)),
    "score": ("query", lambda x: AdditiveScore(4, 4, 2)(x, T)),
    "score, key": ("key", lambda x: GaussianScore()(T, x)),
    "network": ("x", lambda x: FeedForward(4)(x)),
    "rotary": ("x", lambda x: Rotary(4)(x)),
    "channels": ("x", lambda x: SqueezeExcitation(3)(x)),
}


@pytest.mark.parametrize("given", [ROWS, ROWS.tolist()], ids=["ndarray", "list"])
@pytest.mark.parametrize("name, call", CALLS.values(), ids=CALLS)
def test_what_is_no_tensor_is_named(name, call, given):
    kind = type(given).__name__
    with pytest.raises(DtypeError, match=rf"^{name} .*not {kind}: pass torch.as_tensor\({name}\)"):
        call(given)


@pytest.mark.parametrize("dtype", [torch.float64, torch.long])
@pytest.mark.parametrize(
    "call", [name for name in CALLS if name.startswith(("heads", "self", "block"))]
)
def test_another_dtype_than_the_parameters_is_refused(call, dtype):
    name, function = CALLS[call]
    with pytest.raises(
        DtypeError, match=rf"{name} is {dtype} but .* pass {name}.to\(torch.float32"
    ):
        function(T.to(dtype))


WIDE = torch.ones(1, 3, 5)


@pytest.mark.parametrize(
    "call, error, says",
    [
        (lambda: SelfAttention(4)(WIDE), ShapeError, r"x must be \(…, 4\), .* not \(1, 3, 5\)"),
        (lambda: FeedForward(4)(WIDE), ShapeError, r"x must be \(…, 4\), .* not \(1, 3, 5\)"),
        (lambda: AdditiveScore(4, 4, 2)(WIDE, T), ShapeError, "Additive: "),
        (lambda: GaussianScore()(WIDE, T), ShapeError, "query has 5 numbers a row and key 4"),
        (lambda: GaussianScore(np.ones(4)), DtypeError, "one number; features=d"),
        (lambda: FeedForward(None), ArgumentError, "d must be a whole number above 0, not None"),
        (lambda: MultiHeadAttention(4, 2, kdim=-1), ArgumentError, "kdim must be a whole number"),
    ],
)
def test_another_size_than_the_layer_is_refused(call, error, says):
    with pytest.raises(error, match=says):
        call()
