"""Calls with a gradient: replay the launches of the forward and of the backward pass.

A call differs from an earlier one with the same signature only in the values of its arrays. So the
arrays of the kernels are the same views of the arguments, and all numbers are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qkv.engines.triton import attend_operator
from qkv.engines.triton.backward import backward
from qkv.engines.triton.forward import forward
from qkv.engines.triton.launching import precompile
from qkv.engines.triton.launching.launch_replay import LaunchListCache, describe_arrays
from qkv.engines.triton.sparse import thresholds
from qkv.engines.triton.tile_functions.records import Arrays
from qkv.frameworks.torch import without_saved_tensor_hooks
from qkv.util.caches import insert_bounded

MAX_CACHED_RECIPES = 1024


class ArrayView(NamedTuple):
    """An array of the kernels as a view of an argument of the call."""

    at: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    def restore(self, arrays: Sequence[Tensor]) -> Tensor:
        x = arrays[self.at]
        if x.dtype != self.dtype:
            x = x.view(self.dtype)
        return x.as_strided(self.shape, self.strides)


class Recipe:
    """How the arguments of a call become those of `attend_operator.attend`.

    `found_names` are the arrays that `with_thresholds` adds; the first forward pass sets it.
    """

    def __init__(self, views: Sequence[ArrayView | None], numbers: Any) -> None:
        self.views, self.numbers = views, numbers
        self.found_names: tuple[str, ...] = ()

    def restore(self, arrays: Sequence[Tensor]) -> Arrays:
        return Arrays(*(None if x is None else x.restore(arrays) for x in self.views))


def _make_recipe(made: Arrays, numbers: Any, arrays: Sequence[Tensor]) -> Recipe | None:
    """Return the recipe of these kernel arrays; None if one of them is not a view."""
    places = {x.data_ptr(): i for i, x in reversed([*enumerate(arrays)])}
    views: list[ArrayView | None] = []
    for x in made:
        if x is None:
            views.append(None)
            continue
        at = places.get(x.data_ptr())
        if at is None or not x.numel() or x.element_size() != arrays[at].element_size():
            return None
        views.append(ArrayView(at, tuple(x.shape), x.stride(), x.dtype))
    return Recipe(views, numbers)


class GradientReplay:
    """Runs calls whose query, key or value needs a gradient; later ones replay launches.

    No other array may need one.
    """

    def __init__(self) -> None:
        self.recipes: dict[Any, Recipe | None] = {}
        self.forward_lists, self.backward_lists = LaunchListCache(), LaunchListCache()

    def __call__(
        self, build: Callable[[], tuple[Arrays, Any, Callable[[], None]]], arrays: Sequence[Tensor]
    ) -> Tensor | None:
        """Return the output; None if the kernels read arrays that are no views of these.

        `build` returns the arguments of `attend_operator.attend`, and a dry run for
        `compile_together`.
        """
        signature = describe_arrays(arrays)
        recipe = self.recipes.get(signature)
        if recipe is not None:
            return self._apply(signature, recipe, arrays)
        if signature in self.recipes:
            return None
        with without_saved_tensor_hooks():  # a checkpoint counts what is saved for a gradient
            made, numbers, dry_run = build()
        recipe = _make_recipe(made, numbers, arrays)
        insert_bounded(self.recipes, signature, recipe, MAX_CACHED_RECIPES)
        if recipe is None:
            return None
        with precompile.compile_together(dry_run):
            return self._apply(signature, recipe, arrays)

    def _apply(self, signature: Any, recipe: Recipe, arrays: Sequence[Tensor]) -> Tensor:
        output: Tensor = _Graph.apply(self, signature, recipe, *arrays)
        return output

    def run_forward(
        self, signature: Any, recipe: Recipe, arrays: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """Return the output, `kept`, and the arrays `found_names`."""

        def run() -> tuple[Tensor, ...]:
            given = recipe.restore(arrays)
            found = thresholds.with_thresholds(given, recipe.numbers)
            pairs = zip(Arrays._fields, given, found, strict=True)
            recipe.found_names = tuple(name for name, x, y in pairs if x is None is not y)
            out, _, kept = forward.attend_forward(*found, *recipe.numbers)
            return out, kept, *(getattr(found, name) for name in recipe.found_names)

        results: tuple[Tensor, ...] = self.forward_lists.replay_or_record(signature, run, arrays)
        return results

    def run_backward(
        self, signature: Any, recipe: Recipe, arrays: Sequence[Tensor], wishes: tuple[bool, bool]
    ) -> Sequence[Tensor]:
        """Return the gradients of query, key and value.

        `arrays` are ∂L/∂out, the results of `run_forward`, and the arguments of the call.
        """

        def run() -> Sequence[Tensor]:
            along, out, kept, *rest = arrays
            count = len(recipe.found_names)
            found = dict(zip(recipe.found_names, rest, strict=False))
            given = recipe.restore(rest[count:])._replace(**found)
            options = *recipe.numbers, *wishes, False, False
            function = attend_operator.attend_backward if learns else backward.attend_backward
            gradients: Sequence[Tensor] = function(along, None, out, kept, *given, *options)[:3]
            return gradients

        learns = torch.is_grad_enabled()
        if learns:  # for a second derivative, which is an error that names the next step
            return run()
        key = signature, wishes, describe_arrays(arrays)
        results: Sequence[Tensor] = self.backward_lists.replay_or_record(key, run, arrays)
        return results


class _Graph(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any, owner: GradientReplay, signature: Any, recipe: Recipe, *arrays: Tensor
    ) -> Tensor:
        results = owner.run_forward(signature, recipe, arrays)
        ctx.save_for_backward(*results, *arrays)
        ctx.known = owner, signature, recipe
        ctx.set_materialize_grads(False)
        return results[0]

    @staticmethod
    def backward(ctx: Any, along: Tensor | None) -> tuple[Tensor | None, ...]:
        needs = ctx.needs_input_grad
        if along is None:
            return (None,) * len(needs)
        arrays = along.contiguous(), *ctx.saved_tensors
        owner, signature, recipe = ctx.known
        wishes = needs[3], needs[4] or needs[5]
        found = owner.run_backward(signature, recipe, arrays, wishes)
        pairs = zip(found, needs[3:6], strict=True)
        gradients = (x if is_needed else None for x, is_needed in pairs)
        return None, None, None, *gradients, *[None] * (len(needs) - 6)
