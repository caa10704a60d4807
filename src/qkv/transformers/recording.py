"""A model's attention weights, recorded while it runs, within a budget of memory."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from transformers import AttentionInterface, PreTrainedModel

from qkv.errors import (
    ArgumentError,
    CombinationError,
    DtypeError,
    validate_optional_sizes,
    validate_sizes,
)
from qkv.transformers.captured_attention import (
    DEFAULT_BUDGET_BYTES,
    CapturedAttention,
    CapturedLayer,
)
from qkv.transformers.implementation import (
    CAPTURE_NAME,
    OBSERVERS,
    AttentionCall,
    Implementation,
    register_implementation,
)
from qkv.transformers.models import (
    ATTENTION_PATTERN,
    get_family,
    register_model,
    uses_attention_interface,
)

MAX_WORKING_BYTES = 2**26
"""Bytes of weights that are made at once, before they are thinned out."""


@contextmanager
def capture(
    model: Any,
    *,
    budget: int = DEFAULT_BUDGET_BYTES,
    top: int | None = None,
    pool: int | None = None,
) -> Iterator[CapturedAttention]:
    """Record α of every attention layer while `model` runs, in at most `budget` bytes.

    Weights are kept whole where they fit, else pooled down: each cell the largest weight in it.
    `top` keeps the k largest of each row instead, `pool` at most so many rows and columns. Dropout
    is left out. A new forward pass replaces the last; only those of this thread are recorded.

    `model` is a PreTrainedModel, or a module with some inside. For the time of the context it runs
    on qkv, whatever it was loaded with.

        with capture(model) as seen:
            model(**tokenizer(text, return_tensors="pt"))
        seen.weights                              # (layers, heads, n, n), float32 of NumPy
        seen.words(tokenizer, text).plot(layer=2)
    """
    validate_sizes(budget=budget)
    validate_optional_sizes(top=top, pool=pool)
    if top is not None and pool is not None:
        raise CombinationError("top keeps single weights and pool cells of many: pass one of them")
    names = _find_attention_modules(model)
    captured = CapturedAttention([], budget=budget, unseen=_find_unseen_modules(model, names))
    recorder = Recorder(names, captured, top, pool)
    switched: list[Any] = []
    before = OBSERVERS.get()
    with ExitStack() as undone:
        for part in model.modules():
            if isinstance(part, PreTrainedModel):
                register_model(part)
                undone.enter_context(part.register_forward_pre_hook(recorder.begin_pass))
                hook = part.register_forward_hook(recorder.end_pass, always_call=True)
                undone.enter_context(hook)
        undone.callback(OBSERVERS.set, before)
        OBSERVERS.set((*before, recorder.record_layer))
        undone.callback(_restore_configs, switched)
        _switch_configs(_find_configs(model), switched)
        yield recorder.captured


def _find_attention_modules(model: Any) -> dict[Any, str]:
    """The modules that ask transformers for their attention, and their names."""
    if not isinstance(model, torch.nn.Module):
        raise DtypeError(
            f"model must be a model of transformers, not {type(model).__name__}: a pipeline has "
            "one as .model"
        )
    kinds: Any = {type(module) for module in model.modules()}
    kinds = {kind for kind in kinds if uses_attention_interface(kind)}
    found = {module: name for name, module in model.named_modules() if type(module) in kinds}
    if found:
        return found
    models = [type(x).__name__ for x in model.modules() if isinstance(x, PreTrainedModel)]
    if not models:
        raise ArgumentError(
            f"model is a {type(model).__name__} without a PreTrainedModel inside: pass one of "
            "transformers' own"
        )
    raise ArgumentError(
        f"model: {models[0]} has no attention, or computes it by itself, not through transformers' "
        "AttentionInterface, so there is nothing to capture"
    )


def _find_unseen_modules(model: Any, names: dict[Any, str]) -> tuple[str, ...]:
    """The modules that are called an attention, and neither ask for it nor hold or lie in one that
    does."""
    seen, found = [f"{name}." for name in names.values()], list[str]()
    for name, module in model.named_modules():
        if not ATTENTION_PATTERN.search(type(module).__name__) or isinstance(
            module, PreTrainedModel
        ):
            continue
        own = f"{name}."
        if not any(own.startswith(x) or x.startswith(own) for x in (*seen, *found)):
            found.append(own)
    return tuple(name[:-1] for name in found)


# A model's configs say how it attends. They may be shared by models, threads and nested captures:
# the first capture keeps what they said, the last one puts it back.

_SWITCH_LOCK = threading.Lock()
_SWITCHED_CONFIGS: dict[int, tuple[Any, str | None, int]] = {}


def _find_configs(model: Any) -> list[Any]:
    found: dict[int, Any] = {}
    waiting = [module.config for module in model.modules() if hasattr(module, "config")]
    while waiting:
        config = waiting.pop()
        if id(config) not in found and hasattr(config, "_attn_implementation_internal"):
            found[id(config)] = config
            waiting += [getattr(config, name, None) for name in config.sub_configs]
    return [config for config in found.values() if get_family(config).uses_interface]


def _switch_configs(configs: Sequence[Any], switched: list[Any]) -> None:
    """Let them be seen; `switched` are those which are, should it be interrupted."""
    with _SWITCH_LOCK:
        if CAPTURE_NAME not in AttentionInterface._global_mapping:
            register_implementation(CAPTURE_NAME, Implementation(records=True))
        for config in configs:
            _, before, count = _SWITCHED_CONFIGS.get(
                id(config), (config, config._attn_implementation_internal, 0)
            )
            _SWITCHED_CONFIGS[id(config)] = config, before, count + 1
            switched.append(config)
            own = f"{CAPTURE_NAME}-{before}"
            known = own in AttentionInterface._global_mapping
            # Not by the property, which would set the configs inside as well.
            config._attn_implementation_internal = own if known else CAPTURE_NAME


def _restore_configs(configs: Sequence[Any]) -> None:
    with _SWITCH_LOCK:
        for config in configs:
            _, before, count = _SWITCHED_CONFIGS.pop(id(config))
            if count > 1:
                _SWITCHED_CONFIGS[id(config)] = config, before, count - 1
            else:
                config._attn_implementation_internal = before


@dataclass(eq=False)
class Recorder:
    """What one capture does while the model runs."""

    names: dict[Any, str]
    captured: CapturedAttention
    top: int | None
    pool: int | None
    depth: int = 0
    halvings: int = 0

    def begin_pass(self, *_: Any) -> None:
        """A model's forward pass begins; models lie in models."""
        if self.record_layer not in OBSERVERS.get():
            return
        if self.depth == 0:
            self._clear_layers()
        self.depth += 1

    def end_pass(self, *_: Any) -> None:
        if self.record_layer in OBSERVERS.get():
            self.depth -= 1

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def record_layer(self, module: Any, question: AttentionCall) -> None:
        # A layer that runs again on the way back, for its gradient, was seen before.
        if module not in self.names or torch._C._current_graph_task_id() != -1:
            return
        # Who calls model.forward() calls no hook: then a layer seen before tells a new pass.
        if self.depth == 0 and any(x.name == self.names[module] for x in self.captured.layers):
            self._clear_layers()
        batch, heads, n, m = question.shape
        layer, budget = CapturedLayer(self.names[module], n, m), self.captured.budget
        if self.top is not None:
            k = min(self.top, m)
            self._check_budget(8 * batch * heads * n * k)
            layer = replace(layer, top=_top_weights(question, k, budget))
        else:
            rows, cols = self._cell_shape(batch * heads, n, m)
            self._shrink_to_budget(batch * heads, rows, cols)
            cells = _pool_weights(question, rows, cols, budget)
            for _ in range(self.halvings):
                cells = _halve_cells(cells)
            layer = replace(layer, cells=cells)
        self.captured.layers.append(layer)

    def _clear_layers(self) -> None:
        self.captured.layers.clear()
        self.halvings = 0

    def _cell_shape(self, matrices: int, n: int, m: int) -> tuple[int, int]:
        """Rows and columns of what is kept of each of a layer's matrices."""
        if self.pool is not None:
            return min(self.pool, n), min(self.pool, m)
        share = self.captured.budget // (4 * matrices * len(self.names))
        if n * m <= share:
            return n, m
        shrink = math.sqrt(share / (n * m))
        return max(1, int(n * shrink)), max(1, int(m * shrink))

    def _shrink_to_budget(self, matrices: int, rows: int, cols: int) -> None:
        """Halve what is held until another layer fits.

        One module may serve as many layers, so that they turn out to be more than expected.
        """
        held, budget = self.captured, self.captured.budget

        def layer_bytes() -> int:
            part = 1 << self.halvings
            return 4 * matrices * math.ceil(rows / part) * math.ceil(cols / part)

        while (
            self.pool is None
            and layer_bytes() > 4 * matrices
            and held.nbytes + layer_bytes() > budget
        ):
            held.layers[:] = [replace(x, cells=_halve_cells(x.cells)) for x in held.layers]
            self.halvings += 1
        self._check_budget(layer_bytes())

    def _check_budget(self, size: int) -> None:
        held, budget = self.captured, self.captured.budget
        if held.nbytes + size <= budget:
            return
        asked = "top" if self.top is not None else "pool" if self.pool is not None else None
        raise ArgumentError(
            f"budget of {budget:,} bytes is too small: {len(held.layers) + 1} of "
            f"{len(self.names)} layers take {held.nbytes + size:,}. Pass a larger budget"
            + (f" or a smaller {asked}" if asked else "")
        )


def _weight_blocks(question: AttentionCall, budget: int) -> Iterator[tuple[int, Any]]:
    """α from top to bottom, as many rows at once as the budget leaves room for."""
    batch, heads, n, m = question.shape
    step = max(1, min(MAX_WORKING_BYTES, budget) // (4 * batch * heads * m or 1))
    for start in range(0, n, step):
        yield start, question.compute_weights(start, min(start + step, n)).float()


def _top_weights(question: AttentionCall, k: int, budget: int) -> tuple[Any, Any]:
    """The k largest weights of each row, and their keys: (batch, heads, n, k)."""
    parts = [block.topk(k, -1) for _, block in _weight_blocks(question, budget)]
    alpha = torch.cat([part.values.cpu() for part in parts], -2)
    keys = torch.cat([part.indices.int().cpu() for part in parts], -2)
    return alpha.numpy(), keys.numpy()


def _pool_weights(question: AttentionCall, rows: int, cols: int, budget: int) -> Any:
    """α as (batch, heads, rows, cols): each cell the largest weight in it."""
    batch, heads, n, m = question.shape
    cells = torch.full((batch, heads, rows, cols), -math.inf, device=question.query.device)
    for start, block in _weight_blocks(question, budget):
        stop = start + block.shape[-2]
        if (rows, cols) == (n, m):
            cells[:, :, start:stop] = block
            continue
        places = torch.arange(m, device=block.device) * cols // m
        flat = block.new_full((batch, heads, stop - start, cols), -math.inf)
        flat.scatter_reduce_(-1, places.expand_as(block), block, "amax")
        places = torch.arange(start, stop, device=block.device) * rows // n
        cells.scatter_reduce_(-2, places[:, None].expand_as(flat), flat, "amax")
    return cells.cpu().numpy()


def _halve_cells(cells: Any) -> Any:
    """Half as many rows and columns, each cell the largest of four."""
    for axis in (-2, -1):
        cells = np.maximum.reduceat(cells, np.arange(0, cells.shape[axis], 2), axis=axis)
    return cells
