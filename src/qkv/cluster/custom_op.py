"""`cluster.torch.attend` as one custom operator for torch.compile.

The number of keys of the other processes is known only at run time. So the operator runs the eager
call. All arguments except arrays are passed as JSON text, which torch.compile can cache on disk
with the graph.
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
"""The dispatch keys under which autograd records operations."""


def attend_compiled(
    query: Tensor, key: Tensor, value: Tensor, group: Any, return_lse: bool, **options: Any
) -> Any:
    """Run `process_group.attend_in_group` as one operator of the compiled graph."""
    query, key, value = (get_framework(x).apply_autocast(x) for x in (query, key, value))
    arrays: list[Tensor] = []
    group_name = None if group is None else group.group_name
    options_json = encode_arguments({**options, "group": group_name}, arrays)
    outputs = torch.ops.qkv.attend_in_group([query, key, value, *arrays], options_json, return_lse)
    return tuple(outputs) if return_lse else outputs[0]


def encode_arguments(thing: Any, arrays: list[Tensor]) -> str:
    """Return arguments as JSON text, and append the arrays in them to `arrays`.

    In the JSON, an object is its class name and its fields, and an array is its index in `arrays`.
    """
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
        arrays.append(torch.as_tensor(thing) if numpy else thing)
        return f'{{"array": {len(arrays) - 1}, "numpy": {"true" if numpy else "false"}}}'
    if isinstance(thing, list | tuple):
        return f"[{', '.join([encode_arguments(x, arrays) for x in thing])}]"
    kind = type(thing)
    if kind is dict:
        items = thing.items()
    else:
        names = field_names(thing)
        if names is None:
            raise CombinationError(
                "cluster.torch.attend cannot be compiled with a function in score or mask: "
                "exclude it from the graph with torch.compiler.disable(attend)"
            )
        items = [(name, getattr(thing, name)) for name in names]
    inside = ", ".join([f"{_quote_json(name)}: {encode_arguments(x, arrays)}" for name, x in items])
    class_name = "" if kind is dict else f"{kind.__module__}:{kind.__qualname__}"
    return f'{{"kind": "{class_name}", "fields": {{{inside}}}}}'


def _quote_json(text: str) -> str:
    """Return a string in JSON quotes; control characters stay as they are.

    Dynamo cannot trace `json.dumps`.
    """
    text = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{text}"'


def decode_arguments(data: Any, arrays: list[Tensor]) -> Any:
    """Rebuild the arguments from `data`, the parsed JSON of `encode_arguments`."""
    if isinstance(data, list):
        return tuple(decode_arguments(x, arrays) for x in data)
    if not isinstance(data, dict):
        return data
    if "float" in data:
        return float(data["float"])
    if "array" in data:
        x = arrays[data["array"]]
        return x.numpy() if data["numpy"] else x
    inside = {name: decode_arguments(x, arrays) for name, x in data["fields"].items()}
    if not data["kind"]:
        return inside
    module, _, name = data["kind"].partition(":")
    record = object.__new__(getattr(import_module(module), name))
    for field, x in inside.items():
        object.__setattr__(record, field, x)
    return record


def _run_eager(tensors: list[Tensor], options_json: str, lse: bool) -> list[Tensor]:
    """Run the call that `options_json` describes, on these arrays.

    Return the output and, if `lse` is true, the log-sum-exp.
    """
    query, key, value, *arrays = tensors
    options = decode_arguments(json.loads(options_json, strict=False), arrays)
    name = options.pop("group")
    group = None if name is None else _resolve_process_group(name)
    outputs = attend_in_group(query, key, value, group, return_lse=lse, **options)
    # Outputs of a custom operator must not share storage.
    return [x.clone() for x in outputs] if lse else [outputs]


@torch.library.custom_op("qkv::attend_in_group", mutates_args=())
def _attend_op(arrays: list[Tensor], options_json: str, lse: bool) -> list[Tensor]:
    return _run_eager(arrays, options_json, lse)


@_attend_op.register_fake
def _(arrays: list[Tensor], options_json: str, lse: bool) -> list[Tensor]:
    query, key, value = arrays[:3]
    size = max(x.ndim for x in (query, key, value)) - 2
    leads = [(1,) * (size + 2 - x.ndim) + tuple(x.shape[:-2]) for x in (query, key, value)]
    # The last leading axis holds the heads. Keys may have fewer heads than queries.
    lead = [next((n for n in sizes if n != 1), 1) for sizes in zip(*leads, strict=True)]
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    rows = (*lead, query.shape[-2])
    out = [query.new_empty((*rows, value.shape[-1]))]
    return [*out, query.new_empty(rows, dtype=wide)] if lse else out


@torch.library.custom_op("qkv::attend_in_group_backward", mutates_args=())
def _attend_backward_op(
    gradients: list[Tensor], arrays: list[Tensor], options_json: str, lse: bool
) -> list[Tensor]:
    with ExitStack() as stack:
        for kind in AUTOGRAD_DISPATCH_KEYS:  # PyTorch disables autograd inside an operator
            stack.enter_context(torch._C._SetExcludeDispatchKeyGuard(kind, False))
        stack.enter_context(torch.enable_grad())
        leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in arrays]
        outputs = _run_eager(leaves, options_json, lse)
        differentiable = [x for x in leaves if x.requires_grad]
        zeros = {"allow_unused": True, "materialize_grads": True}
        computed = iter(torch.autograd.grad(outputs, differentiable, gradients, **zeros))
        # Gradients summed over the processes are views of one vector, but outputs must not share
        # storage.
        return [next(computed).clone() if x.requires_grad else torch.zeros_like(x) for x in leaves]


@_attend_backward_op.register_fake
def _(gradients: list[Tensor], arrays: list[Tensor], options_json: str, lse: bool) -> list[Tensor]:
    return [torch.empty_like(x) for x in arrays]


def _save_for_backward(ctx: Any, inputs: Any, output: list[Tensor]) -> None:
    arrays, ctx.options_json, ctx.lse = inputs
    ctx.save_for_backward(*arrays)


def _run_backward(ctx: Any, gradients: list[Tensor]) -> Any:
    input_gradients = torch.ops.qkv.attend_in_group_backward(
        list(gradients), list(ctx.saved_tensors), ctx.options_json, ctx.lse
    )
    return input_gradients, None, None


_attend_op.register_autograd(_run_backward, setup_context=_save_for_backward)
