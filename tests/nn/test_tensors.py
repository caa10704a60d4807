"""What is no tensor is refused by its name, with what to do."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import qkv  # noqa: E402
from qkv import masks, scores, weightings  # noqa: E402
from qkv.errors import ArgumentError, CombinationError, DtypeError, QkvError, ShapeError  # noqa: E402
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


@pytest.mark.parametrize("value", [ROWS, ROWS.tolist()], ids=["ndarray", "list"])
@pytest.mark.parametrize("name, call", CALLS.values(), ids=CALLS)
def test_what_is_no_tensor_is_named(name, call, value):
    kind = type(value).__name__
    with pytest.raises(DtypeError, match=rf"^{name} .*not {kind}: pass torch.as_tensor\({name}\)"):
        call(value)


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
        (lambda: GaussianScore()(WIDE, T), ShapeError, "query has 5 columns and key 4"),
        (lambda: GaussianScore(np.ones(4)), DtypeError, "one number: pass features=d"),
        (lambda: FeedForward(None), ArgumentError, "d must be a whole number above 0, not None"),
        (lambda: MultiHeadAttention(4, 2, kdim=-1), ArgumentError, "kdim must be a whole number"),
    ],
)
def test_another_size_than_the_layer_is_refused(call, error, says):
    with pytest.raises(error, match=says):
        call()


NESTED = {
    "a mask": lambda x: qkv.attend(T, T, T, mask=x),
    "lengths": lambda x: qkv.attend(T, T, T, mask=masks.lengths(x)),
    "documents": lambda x: qkv.attend(T, T, T, mask=masks.documents(x)),
    "in a score": lambda x: qkv.attend(T, T, T, score=scores.Gaussian(x)),
    "a score's matrix": lambda x: scores.Multiplicative(x),
    "in a weighting": lambda x: qkv.attend(T, T, T, weighting=weightings.Entmax(x)),
    "a learned score": lambda x: AdditiveScore(4, 4)(x, T),
    "its keys": lambda x: GaussianScore()(T, x),
    "heads, mask": lambda x: HEADS(T, T, T, mask=x),
    "heads, padding": lambda x: HEADS(T, T, T, key_padding_mask=x),
    "heads, attn_mask": lambda x: HEADS(T, T, T, attn_mask=x),
    "rotary": lambda x: Rotary(4)(x),
    "channels": lambda x: SqueezeExcitation(3)(x),
    "examples": lambda x: KernelRegression(x, T[0]),
    "decoder": lambda x: BahdanauDecoder(5, 2, 3, 4)(torch.zeros(2, 2).long(), x),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.parametrize("name", NESTED)
def test_a_nested_tensor_is_refused_in_our_words(name, layout):
    """torch's own tell of an internal error."""
    x = torch.nested.nested_tensor([torch.ones(3, 4), torch.ones(2, 4)], layout=layout)
    with pytest.raises(QkvError):
        NESTED[name](x)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_a_nested_tensor_goes_through_the_network(layout):
    parts = [torch.randn(3, 4), torch.randn(2, 4)]
    network = FeedForward(4)
    out = network(torch.nested.nested_tensor(parts, layout=layout)).unbind()
    for result, x in zip(out, parts, strict=True):
        torch.testing.assert_close(result, network(x))
    with pytest.raises(ShapeError, match=r"not \("):
        FeedForward(5)(torch.nested.nested_tensor(parts, layout=layout))


@pytest.mark.parametrize("layer", [HEADS, SelfAttention(4), FeedForward(4)])
def test_an_error_of_torch_fx_suggests_a_leaf_module(layer):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            out = self.layer(x, x, x)[0] if layer is HEADS else self.layer(x)
            return out + 1

    class Whole(torch.fx.Tracer):
        def is_leaf_module(self, module, name):
            return module is layer or super().is_leaf_module(module, name)

    model = Model()
    with pytest.raises(DtypeError, match=r"torch\.fx.*is_leaf_module.*torch\.export"):
        torch.fx.symbolic_trace(model)
    traced = torch.fx.GraphModule(model, Whole().trace(model))
    torch.testing.assert_close(traced(T), model(T))


class Attending(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return qkv.attend(x, x, x)


SCRIPTED = {
    "Attention": Attention,
    "SelfAttention": lambda: SelfAttention(4),
    "MultiHeadAttention": lambda: torch.nn.Sequential(
        MultiHeadAttention(4, 2, weighting="entmax15")
    ),
    "TransformerEncoder": lambda: torch.nn.Sequential(TransformerEncoder(1, 4, 2)),
    "TransformerBlock": lambda: TransformerBlock(4, 2),
    "AdditiveScore": lambda: BahdanauDecoder(5, 2, 3, 4),
    "FeedForward": lambda: FeedForward(4),
    "SqueezeExcitation": lambda: SqueezeExcitation(4),
    "Rotary": lambda: Rotary(4),
    "attend": Attending,
    "weights": lambda: qkv.weights,
    "scaled_dot_product_attention": lambda: qkv.scaled_dot_product_attention,
}


@pytest.mark.filterwarnings("ignore:.*deprecated")
@pytest.mark.parametrize("name", SCRIPTED)
def test_an_error_for_torchscript_names_the_replacement(name):
    with pytest.raises(
        CombinationError, match=rf"jit.script cannot compile {name}, .*torch.export"
    ):
        torch.jit.script(SCRIPTED[name]())
