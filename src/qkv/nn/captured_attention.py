"""A look at the weights of a model's heads while it runs."""

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
    """α of each layer by its name: (batch, heads, n, m), or (…, n, m) of a layer without heads.

    `show()` and `to_html(path)` open the heads of the batch's first sequence.
    """

    def __repr__(self) -> str:
        heads = {name: f", {x.shape[1]} heads" if x.dim() == 4 else "" for name, x in self.items()}
        lines = [f"  {name}: {tuple(x.shape)}{heads[name]}" for name, x in self.items()]
        if not self:
            return "CapturedAttention: nothing yet"
        return "\n".join(["CapturedAttention, by layer:", *lines])

    def plot(self, item: int = 0, **options: Any) -> Figure:
        """A heatmap for each head of one sequence: layers from the top down.

        `options` go to `qkv.plot.heatmaps`.
        """
        grid = self.grid(item)
        heads = range(grid.shape[1])
        options.setdefault("titles", [[f"{name}, head {i}" for i in heads] for name in self])
        return heatmaps(grid, **options)

    def grid(self, item: int = 0) -> torch.Tensor:
        """α of one sequence, (layers, heads, n, m)."""
        if not self:
            raise ArgumentError("nothing was recorded: run the model inside `with capture(model)`")
        shapes = {name: tuple(x.shape) for name, x in self.items()}
        if len(set(shapes.values())) > 1 or any(len(x) != 4 for x in shapes.values()):
            raise ShapeError(f"a grid takes layers of one shape (batch, heads, n, m), not {shapes}")
        return torch.stack([x[item] for x in self.values()])

    def head_weights(self, most: int) -> HeadWeights:
        return HeadWeights(self.grid().numpy(), list(self))

    def select_sequence(self, item: int) -> CapturedAttention:
        """One sequence of the batch alone: `seen.one(1).show()`."""
        return CapturedAttention(zip(self, self.grid(item)[:, None], strict=True))


@contextmanager
def capture(module: nn.Module) -> Iterator[CapturedAttention]:
    """Record α of every attention layer inside a module while it runs.

    The weights are made beside the pass, without gradients and without dropout, and kept whole on
    the host: for inputs short enough to be looked at. The last pass is the one that stays.

    >>> from qkv.nn import TransformerEncoder
    >>> model = TransformerEncoder(2, 8, nhead=2, dim_feedforward=16)
    >>> with capture(model) as seen:
    ...     _ = model(torch.zeros(1, 5, 8))
    >>> seen
    CapturedAttention, by layer:
      layers.0.self_attn: (1, 2, 5, 5), 2 heads
      layers.1.self_attn: (1, 2, 5, 5), 2 heads
    """
    seen = CapturedAttention()
    layers = {name: x for name, x in module.named_modules() if isinstance(x, ATTENTION_LAYERS)}
    if not layers:
        raise ArgumentError(
            f"{type(module).__name__} has no attention layer of qkv.nn inside: for a model of "
            "Hugging Face there is qkv.transformers.capture"
        )
    with ExitStack() as hooks:
        for name, layer in layers.items():
            hook = _make_recorder(seen, name or "(itself)")
            hooks.enter_context(layer.register_forward_hook(hook, with_kwargs=True))
        yield seen


def _make_recorder(seen: CapturedAttention, name: str) -> Any:
    def record_weights(layer: Any, given: tuple[Any, ...], named: dict[str, Any], _: Any) -> None:
        if named.get("cache") is not None:
            raise ArgumentError(
                "capture looks at whole passes, not at steps with a cache: run the model on the "
                "whole sequence"
            )
        if isinstance(layer, MultiHeadAttention):
            names = ("query", "key", "value", "key_padding_mask", "need_weights", "attn_mask",
                     "average_attn_weights", "is_causal")  # fmt: skip
            named = dict(zip(names, given, strict=False)) | named
            given, named = (), named | {"need_weights": True, "average_attn_weights": False}
        else:
            named = {"need_weights": True} | named
        training, layer.training = layer.training, False
        try:
            with torch.no_grad():
                alpha = layer.forward(*given, **named)[1]
        finally:
            layer.training = training
        seen[name] = alpha.float().cpu()

    return record_weights
