"""Weightings with parameters of their own, as torch modules."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import fields
from typing import Any

from torch import nn

from qkv import weightings
from qkv.errors import warn_at_caller
from qkv.frameworks import is_array, load_framework, tree
from qkv.weightings import Weighting

HOOK_WARNING = (
    "a hook on a layer's weighting never runs, for the weighting is no step by itself: its weights "
    "are seen by qkv.nn.capture(model), or by a hook on the layer, called with need_weights=True"
)


class LearnedWeighting(nn.Module):
    """A weighting whose arrays belong to a layer, under the names of their fields.

    `build(dtype)` is the weighting over the parameters as they stand: what `attend` takes.

    >>> import torch
    >>> layer = resolve_weighting(weightings.Entmax(nn.Parameter(torch.full((2,), 1.5))))
    >>> layer, list(layer.state_dict())
    (Entmax(alpha=(2,)), ['alpha'])
    """

    def __init__(self, weighting: Weighting) -> None:
        super().__init__()
        fw = load_framework("torch")
        self.names = [f.name for f in fields(weighting) if is_array(getattr(weighting, f.name))]  # type: ignore[arg-type]
        for name in self.names:
            x = getattr(weighting, name)
            put = self.register_parameter if isinstance(x, nn.Parameter) else self.register_buffer
            put(name, x)
        self.form = tree.map_arrays(fw, fw.without_data, weighting)

    def build(self, dtype: Any) -> Weighting:
        held = (getattr(self, name).to(dtype) for name in self.names)
        return tree.replace_arrays(load_framework("torch"), self.form, held)

    # What is never called runs no hooks: said where one is registered.

    def register_forward_hook(self, *given: Any, **named: Any) -> Any:
        warn_at_caller(HOOK_WARNING)
        return super().register_forward_hook(*given, **named)

    def register_forward_pre_hook(self, *given: Any, **named: Any) -> Any:
        warn_at_caller(HOOK_WARNING)
        return super().register_forward_pre_hook(*given, **named)

    def register_full_backward_hook(self, *given: Any, **named: Any) -> Any:
        warn_at_caller(HOOK_WARNING)
        return super().register_full_backward_hook(*given, **named)

    def __repr__(self) -> str:
        return tree.format_record(self.form)


def resolve_weighting(weighting: Any) -> Any:
    """The weighting of a layer, by its name or itself; with an `nn.Parameter` in it, a module."""
    found = weightings.resolve(weighting)
    return LearnedWeighting(found) if _is_learned(found) else found


def build_weighting(weighting: Any, dtype: Any) -> Any:
    """A learned weighting as the object that `attend` takes; anything else as it is."""
    return weighting.build(dtype) if isinstance(weighting, LearnedWeighting) else weighting


def copy_weighting(weighting: Weighting) -> Weighting:
    """The same weighting for one more layer, with parameters of its own."""
    return deepcopy(weighting) if _is_learned(weighting) else weighting


def weighting_name(weighting: Any) -> str:
    """A weighting in a word, for a layer's repr."""
    return type(getattr(weighting, "form", weighting)).__name__


def _is_learned(weighting: Weighting) -> bool:
    return any(isinstance(x, nn.Parameter) for x in vars(weighting).values())
