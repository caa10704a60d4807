"""Weightings with learned parameters, as torch modules."""

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
    "a hook on a layer's weighting never runs, because `attend` does not call it as a module: read "
    "the weights with qkv.nn.capture(model), or with a hook on the layer and need_weights=True"
)


class LearnedWeighting(nn.Module):
    """A weighting whose arrays are parameters or buffers of a module, named as its fields.

    `build(dtype)` returns the weighting with the current parameters, for `attend`.

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
        """Return the weighting with the current parameters, cast to `dtype`."""
        held = (getattr(self, name).to(dtype) for name in self.names)
        return tree.replace_arrays(load_framework("torch"), self.form, held)

    # The module is never called, so its hooks never run: warn when one is registered.

    def register_forward_hook(self, *args: Any, **kwargs: Any) -> Any:
        warn_at_caller(HOOK_WARNING)
        return super().register_forward_hook(*args, **kwargs)

    def register_forward_pre_hook(self, *args: Any, **kwargs: Any) -> Any:
        warn_at_caller(HOOK_WARNING)
        return super().register_forward_pre_hook(*args, **kwargs)

    def register_full_backward_hook(self, *args: Any, **kwargs: Any) -> Any:
        warn_at_caller(HOOK_WARNING)
        return super().register_full_backward_hook(*args, **kwargs)

    def __repr__(self) -> str:
        return tree.format_record(self.form)


def resolve_weighting(weighting: Any) -> Any:
    """Return a layer's weighting; a `LearnedWeighting` if it holds an `nn.Parameter`."""
    weighting = weightings.resolve(weighting)
    return LearnedWeighting(weighting) if _is_learned(weighting) else weighting


def build_weighting(weighting: Any, dtype: Any) -> Any:
    """Return the weighting to pass to `attend`; only a learned one has to be built."""
    return weighting.build(dtype) if isinstance(weighting, LearnedWeighting) else weighting


def copy_weighting(weighting: Weighting) -> Weighting:
    """Return the weighting for another layer; learned parameters are copied."""
    return deepcopy(weighting) if _is_learned(weighting) else weighting


def weighting_name(weighting: Any) -> str:
    """Return the class name of a weighting, for a layer's repr."""
    return type(getattr(weighting, "form", weighting)).__name__


def _is_learned(weighting: Weighting) -> bool:
    return any(isinstance(x, nn.Parameter) for x in vars(weighting).values())
