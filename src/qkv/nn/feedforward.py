"""The feed-forward network of a transformer block."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Never

from torch import Tensor, nn
from torch.nn import functional

from qkv.errors import DtypeError, unknown_name_error, validate_fraction, validate_sizes
from qkv.nn.tensors import called_as, check_tensors, check_width
from qkv.util.keyword_hints import reject_call_keywords, reject_torchscript, suggest_keywords

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": functional.relu,
    "gelu": functional.gelu,
    "silu": functional.silu,
}


@suggest_keywords
class FeedForward(nn.Module):
    """FFN(x) = W₂ f(W₁x + b₁) + b₂, applied to each position: (…, d) → (…, d).

    `activation` f is "relu", "gelu", "silu" or a function. `hidden` defaults to 4d.

    >>> import torch
    >>> FeedForward(4, hidden=16)(torch.zeros(2, 5, 4)).shape
    torch.Size([2, 5, 4])
    """

    __prepare_scriptable__ = reject_torchscript

    def __init__(
        self,
        d: int,
        hidden: int | None = None,
        activation: Any = "relu",
        dropout: float = 0.0,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        validate_sizes(d=d)
        hidden = 4 * d if hidden is None else hidden
        validate_sizes(hidden=hidden)
        self.activation = resolve_activation(activation)
        self.linear1 = nn.Linear(d, hidden, bias=bias, device=device, dtype=dtype)
        self.dropout = nn.Dropout(validate_fraction("dropout", dropout))
        self.linear2 = nn.Linear(hidden, d, bias=bias, device=device, dtype=dtype)

    def forward(self, x: Tensor, **wrong: Never) -> Tensor:
        if wrong:
            reject_call_keywords(self, wrong)
        check_tensors(x=x)
        width = getattr(
            self.linear1, "in_features", None
        )  # an adapter in its place may not have it
        if width is not None:
            check_width(width, x)
        return run_feedforward(self, x)

    if TYPE_CHECKING:

        @called_as(forward)
        def __call__(self) -> None: ...


def run_feedforward(layer: Any, x: Tensor) -> Tensor:
    """Apply the modules linear1, dropout, activation and linear2 of `layer`."""
    return layer.linear2(layer.dropout(layer.activation(layer.linear1(x))))


def resolve_activation(activation: Any) -> Callable[[Tensor], Tensor]:
    if callable(activation):
        return activation  # type: ignore[no-any-return]
    if not isinstance(activation, str):
        raise DtypeError(f"activation must be a name or a function, not {activation!r}")
    if activation not in ACTIVATIONS:
        raise unknown_name_error("activation", activation, ACTIVATIONS)
    return ACTIVATIONS[activation]
