"""`capture`: record the attention weights of a model built from `qkv.nn` layers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from qkv.errors import ArgumentError, ShapeError
from qkv.nn.attention import Attention, SelfAttention
from qkv.nn.heads import MultiHeadAttention
from qkv.plot import heatmaps
from qkv.util.display import HeadsDisplayable, HeadWeights

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ATTENTION_LAYERS = (Attention, SelfAttention, MultiHeadAttention)


class CapturedAttention(dict[str, torch.Tensor], HeadsDisplayable):
    """A dictionary from layer name to its weights α.

    α is (batch, heads, n, m), or (…, n, m) for a layer without heads. `show()` and `to_html(path)`
    display the heads for the first sequence of the batch.
    """

    def __repr__(self) -> str:
        heads = {name: f", {x.shape[1]} heads" if x.dim() == 4 else "" for name, x in self.items()}
        lines = [f"  {name}: {tuple(x.shape)}{heads[name]}" for name, x in self.items()]
        if not self:
            return "CapturedAttention: nothing recorded yet"
        return "\n".join(["CapturedAttention, by layer:", *lines])

    def plot(self, item: int = 0, **options: Any) -> Figure:
        """Plot a heatmap for each head of sequence `item`: one row of heatmaps per layer.

        `options` are passed to `qkv.plot.heatmaps`.
        """
        grid = self.grid(item)
        heads = range(grid.shape[1])
        options.setdefault("titles", [[f"{name}, head {i}" for i in heads] for name in self])
        return heatmaps(grid, **options)

    def grid(self, item: int = 0) -> torch.Tensor:
        """Return α of sequence `item` of the batch, (layers, heads, n, m)."""
        if not self:
            raise ArgumentError("nothing was recorded: run the model inside `with capture(model)`")
        shapes = {name: tuple(x.shape) for name, x in self.items()}
        if len(set(shapes.values())) > 1 or any(len(x) != 4 for x in shapes.values()):
            raise ShapeError(f"grid needs layers of one shape (batch, heads, n, m), not {shapes}")
        return torch.stack([x[item] for x in self.values()])

    def head_weights(self, most: int) -> HeadWeights:
        return HeadWeights(self.grid().numpy(), list(self))

    def select_sequence(self, item: int) -> CapturedAttention:
        """Return only sequence `item` of the batch: `captured.select_sequence(1).show()`."""
        return CapturedAttention(zip(self, self.grid(item)[:, None], strict=True))


@contextmanager
def capture(module: nn.Module) -> Iterator[CapturedAttention]:
    """Record α of every attention layer inside a module while it runs.

    The weights are computed in addition to the forward pass, without gradients and dropout. All of
    them are stored in CPU memory, so keep the inputs short. A new forward pass replaces the weights
    of the previous one.

    >>> from qkv.nn import TransformerEncoder
    >>> model = TransformerEncoder(2, 8, nhead=2, dim_feedforward=16)
    >>> with capture(model) as captured:
    ...     _ = model(torch.zeros(1, 5, 8))
    >>> captured
    CapturedAttention, by layer:
      layers.0.self_attn: (1, 2, 5, 5), 2 heads
      layers.1.self_attn: (1, 2, 5, 5), 2 heads
    """
    captured = CapturedAttention()
    layers = {name: x for name, x in module.named_modules() if isinstance(x, ATTENTION_LAYERS)}
    if not layers:
        raise ArgumentError(
            f"{type(module).__name__} has no attention layer of qkv.nn: for a Hugging Face model "
            "use qkv.transformers.capture"
        )
    with ExitStack() as hooks:
        for name, layer in layers.items():
            hook = _make_recorder(captured, name or "(itself)")
            hooks.enter_context(layer.register_forward_hook(hook, with_kwargs=True))
        yield captured


def _make_recorder(captured: CapturedAttention, name: str) -> Any:
    def record_weights(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], _: Any) -> None:
        if kwargs.get("cache") is not None:
            raise ArgumentError(
                "capture does not support a cache: run the model on the whole sequence without one"
            )
        if isinstance(layer, MultiHeadAttention):
            names = ("query", "key", "value", "key_padding_mask", "need_weights", "attn_mask",
                     "average_attn_weights", "is_causal")  # fmt: skip
            kwargs = dict(zip(names, args, strict=False)) | kwargs
            args, kwargs = (), kwargs | {"need_weights": True, "average_attn_weights": False}
        else:
            kwargs = {"need_weights": True} | kwargs
        training, layer.training = layer.training, False
        try:
            with torch.no_grad():
                alpha = layer.forward(*args, **kwargs)[1]
        finally:
            layer.training = training
        captured[name] = alpha.float().cpu()

    return record_weights
