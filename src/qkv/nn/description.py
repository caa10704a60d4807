"""`describe`: a table of a model's layers, with shapes, parameter counts and engines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from qkv.attention import explain
from qkv.errors import DtypeError, validate_sizes
from qkv.nn import weightings
from qkv.nn.attention import Attention, SelfAttention
from qkv.nn.heads import MultiHeadAttention
from qkv.nn.models import BahdanauDecoder, KernelRegression
from qkv.nn.scores import build_score, score_name


@dataclass(frozen=True)
class LayerDescription:
    """One line of a `Description`: a layer's name, type, shapes, parameter count and engine."""

    name: str
    kind: str
    shapes: str
    parameters: int
    engine: str
    reason: str = ""


@dataclass(frozen=True)
class Description:
    """The result of `describe`; its repr is a table."""

    layers: tuple[LayerDescription, ...]
    parameters: int
    length: int

    def __repr__(self) -> str:
        head = ("layer", "kind", "shapes", "parameters", "engine")
        rows = [
            (x.name or "(itself)", x.kind, x.shapes, f"{x.parameters:,}", x.engine)
            for x in self.layers
        ]
        widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in (head, *rows)
        ]
        total = f"{self.parameters:,} parameters; engines for {self.length:,} queries and keys"
        return "\n".join([*lines, total])


def describe(module: nn.Module, length: int = 1024, batch: int = 1) -> Description:
    """List a module's attention layers, and its other layers with parameters.

    The engine is the one that `attend` chooses for `length` queries and keys, on the device and in
    the dtype of the module's parameters. `qkv.explain` gives the reasons for one call.

    >>> from qkv.nn import FeedForward
    >>> print(describe(FeedForward(4, 8), length=16))
    layer    kind    shapes   parameters  engine
    linear1  Linear  4 → 8    40
    linear2  Linear  8 → 4    36
    76 parameters; engines for 16 queries and keys
    """
    if not isinstance(module, nn.Module):
        raise DtypeError(f"module must be a torch.nn.Module, not {type(module).__name__}")
    validate_sizes(length=length, batch=batch)
    layers = []
    described: list[str] = []  # prefixes of the modules that an earlier line includes
    for name, layer in module.named_modules():
        if any(f"{name}.".startswith(outer) for outer in described):
            continue
        calls = _example_inputs(layer, length, batch)
        own = sum(x.numel() for x in layer.parameters(recurse=False))
        if calls is not None:
            # The decoder's other modules get their own lines.
            counted = layer.score if isinstance(layer, BahdanauDecoder) else layer
            inner = "score." if isinstance(layer, BahdanauDecoder) else ""
            described.append(f"{name}.{inner}" if name else inner)
            count = (
                sum(x.numel() for x in counted.parameters())
                if hasattr(counted, "parameters")
                else 0
            )
            layers.append(_describe_attention(name, layer, calls, count))
        elif own:
            layers.append(
                LayerDescription(name, type(layer).__name__, _parameter_shapes(layer), own, "")
            )
    total = sum(x.numel() for x in module.parameters())
    return Description(tuple(layers), total, length)


def _describe_attention(name: str, layer: Any, calls: Any, count: int) -> LayerDescription:
    query, key, value = calls
    with torch.no_grad():
        score = build_score(layer.score, query.dtype)
        weighting = weightings.build_weighting(layer.weighting, query.dtype)
        plan = explain(query, key, value, score=score, weighting=weighting)
    kind = (
        f"{type(layer).__name__} · {score_name(layer.score)} → "
        f"{weightings.weighting_name(layer.weighting)}"
    )
    widths = f"{query.shape[-1]}·{key.shape[-1]} → {value.shape[-1]}"
    heads = f"{query.shape[-3]} heads of {widths}" if query.dim() == 4 else widths
    if query.dim() == 4 and key.shape[-3] != query.shape[-3]:
        heads += f", {key.shape[-3]} of keys"
    return LayerDescription(name, kind, heads, count, plan.engine, plan.detail)


def _example_inputs(layer: Any, length: int, batch: int) -> Any:
    """Return zeros shaped as the layer passes them to `attend`; None if it does not call it."""
    like = next(layer.parameters(), None) if isinstance(layer, nn.Module) else None

    def zeros(*shape: int) -> Any:
        return torch.zeros(shape) if like is None else like.new_zeros(shape)

    if isinstance(layer, MultiHeadAttention):
        width = layer.head_dim
        query = zeros(batch, layer.num_heads, length, width)
        key = zeros(batch, layer.num_kv_heads, length, width)
        return query, key, key
    if isinstance(layer, SelfAttention):
        x = [w.shape[1] for w in (layer.w_query, layer.w_key, layer.w_value)]
        return tuple(zeros(batch, length, width) for width in x)
    if isinstance(layer, Attention):
        d_q, d_k = _score_widths(layer.score)
        return zeros(batch, length, d_q), zeros(batch, length, d_k), zeros(batch, length, d_k)
    if isinstance(layer, BahdanauDecoder):
        memory = zeros(batch, length, layer.start.in_features)
        return zeros(batch, 1, layer.cell.hidden_size), memory, memory
    if isinstance(layer, KernelRegression):
        value = layer.value if layer.value.dim() == 2 else layer.value[:, None]
        return layer.key.new_zeros(length, layer.key.shape[1]), layer.key, value
    return None


def _score_widths(score: Any) -> tuple[int, int]:
    """Return d_q and d_k of a learned score; 64 and 64 for a score without fixed widths."""
    if hasattr(score, "w"):
        return int(score.w.shape[0]), int(score.w.shape[1])
    if hasattr(score, "w_query"):
        return int(score.w_query.shape[-1]), int(score.w_key.shape[-1])
    return 64, 64


def _parameter_shapes(layer: Any) -> str:
    if isinstance(layer, nn.Linear):
        return f"{layer.in_features} → {layer.out_features}"
    own = [tuple(x.shape) for x in layer.parameters(recurse=False)]
    return ", ".join(map(str, own))
