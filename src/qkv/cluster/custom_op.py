"""`cluster.torch.attend` as one operator of a compiled graph, which does not look into it.

How many keys the others have is told by the run alone, so the operator is the eager call. What it
is given beside arrays is spelled as text, which a graph that was kept on disk still has.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from qkv.cluster.process_group import attend_in_group
from qkv.errors import CombinationError
from qkv.frameworks import get_framework, is_array
from qkv.frameworks.tree import field_names

AUTOGRAD_DISPATCH_KEYS = [
    getattr(torch._C.DispatchKey, name)
    for name in ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor")
]
"""What autograd records by."""


def attend_compiled(
    query: Tensor, key: Tensor, value: Tensor, group: Any, return_lse: bool, **how: Any
) -> Any:
    """`process_group.attend_in_group` of these arguments."""
    query, key, value = (get_framework(x).apply_autocast(x) for x in (query, key, value))
    held: list[Tensor] = []
    told = encode_arguments({**how, "group": None if group is None else group.group_name}, held)
    found = torch.ops.qkv.attend_in_group([query, key, value, *held], told, return_lse)
    return tuple(found) if return_lse else found[0]


def encode_arguments(thing: Any, held: list[Tensor]) -> str:
    """As JSON: records by the place of their class, arrays by their place in `held`."""
    if thing is None or isinstance(thing, bool):
        return {None: "null", True: "true", False: "false"}[thing]
    if isinstance(thing, int):
        return str(int(thing))
    if isinstance(thing, float):
        return f'{{"float": "{float(thing)!r}"}}'
    if isinstance(thing, str):
        return _quote_json(thing)
    if is_array(thing):
        numpy = get_framework(thing).name == "numpy"
        held.append(torch.as_tensor(thing) if numpy else thing)
        return f'{{"array": {len(held) - 1}, "numpy": {"true" if numpy else "false"}}}'
    if isinstance(thing, list | tuple):
        return f"[{', '.join([encode_arguments(x, held) for x in thing])}]"
    kind = type(thing)
    if kind is dict:
        items = thing.items()
    else:
        names = field_names(thing)
        if names is None:
            raise CombinationError(
                "keys that several processes hold cannot be compiled with a function inside of "
                "score or mask: leave attend out of the graph, torch.compiler.disable(attend)"
            )
        items = [(name, getattr(thing, name)) for name in names]
    inside = ", ".join([f"{_quote_json(name)}: {encode_arguments(x, held)}" for name, x in items])
    where = "" if kind is dict else f"{kind.__module__}:{kind.__qualname__}"
    return f'{{"kind": "{where}", "fields": {{{inside}}}}}'


def _quote_json(text: str) -> str:
    """As JSON has it, but for control characters: Dynamo reads no `json.dumps`."""
    text = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{text}"'


def decode_arguments(told: Any, held: list[Tensor]) -> Any:
    """What `encode_arguments` spelled, once it is JSON no more."""
    if isinstance(told, list):
        return tuple(decode_arguments(x, held) for x in told)
    if not isinstance(told, dict):
        return told
    if "float" in told:
        return float(told["float"])
    if "array" in told:
        x = held[told["array"]]
        return x.numpy() if told["numpy"] else x
    inside = {name: decode_arguments(x, held) for name, x in told["fields"].items()}
    if not told["kind"]:
        return inside
    module, _, name = told["kind"].partition(":")
    record = object.__new__(getattr(import_module(module), name))
    for field, x in inside.items():
        object.__setattr__(record, field, x)
    return record


def _run_eager(arrays: list[Tensor], told: str, lse: bool) -> list[Tensor]:
    query, key, value, *held = arrays
    how = decode_arguments(json.loads(told, strict=False), held)
    name = how.pop("group")
    group = None if name is None else _resolve_process_group(name)
    found = attend_in_group(query, key, value, group, return_lse=lse, **how)
    return [x.clone() for x in found] if lse else [found]  # no two of them from one storage


@torch.library.custom_op("qkv::attend_in_group", mutates_args=())
def _attend_op(arrays: list[Tensor], how: str, lse: bool) -> list[Tensor]:
    return _run_eager(arrays, how, lse)


@_attend_op.register_fake
def _(arrays: list[Tensor], how: str, lse: bool) -> list[Tensor]:
    query, key, value = arrays[:3]
    size = max(x.ndim for x in (query, key, value)) - 2
    leads = [(1,) * (size + 2 - x.ndim) + tuple(x.shape[:-2]) for x in (query, key, value)]
    # The last of the leading axes is the heads, of which a key may have fewer.
    lead = [next((n for n in sizes if n != 1), 1) for sizes in zip(*leads, strict=True)]
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    rows = (*lead, query.shape[-2])
    out = [query.new_empty((*rows, value.shape[-1]))]
    return [*out, query.new_empty(rows, dtype=wide)] if lse else out


@torch.library.custom_op("qkv::attend_in_group_backward", mutates_args=())
def _attend_backward_op(
    gradients: list[Tensor], arrays: list[Tensor], how: str, lse: bool
) -> list[Tensor]:
    with ExitStack() as stack:
        for kind in AUTOGRAD_DISPATCH_KEYS:  # which stand aside inside of an operator
            stack.enter_context(torch._C._SetExcludeDispatchKeyGuard(kind, False))
        stack.enter_context(torch.enable_grad())
        leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in arrays]
        outputs = _run_eager(leaves, how, lse)
        smooth = [x for x in leaves if x.requires_grad]
        zeros = {"allow_unused": True, "materialize_grads": True}
        found = iter(torch.autograd.grad(outputs, smooth, gradients, **zeros))
        # Those that were summed over the processes are parts of one vector.
        return [next(found).clone() if x.requires_grad else torch.zeros_like(x) for x in leaves]


@_attend_backward_op.register_fake
def _(gradients: list[Tensor], arrays: list[Tensor], how: str, lse: bool) -> list[Tensor]:
    return [torch.empty_like(x) for x in arrays]


def _save_for_backward(ctx: Any, inputs: Any, output: list[Tensor]) -> None:
    arrays, ctx.how, ctx.lse = inputs
    ctx.save_for_backward(*arrays)


def _run_backward(ctx: Any, gradients: list[Tensor]) -> Any:
    found = torch.ops.qkv.attend_in_group_backward(
        list(gradients), list(ctx.saved_tensors), ctx.how, ctx.lse
    )
    return found, None, None


_attend_op.register_autograd(_run_backward, setup_context=_save_for_backward)
