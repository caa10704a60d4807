"""`capture`: record the attention weights of a Hugging Face model within a memory limit."""

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
    AttentionImplementation,
    register_implementation,
)
from qkv.transformers.models import (
    ATTENTION_PATTERN,
    get_family,
    register_model,
    uses_attention_interface,
)

MAX_WORKING_BYTES = 2**26
"""The most bytes of weights that are computed at once, before they are reduced."""


@contextmanager
def capture(
    model: Any,
    *,
    budget: int = DEFAULT_BUDGET_BYTES,
    top: int | None = None,
    pool: int | None = None,
) -> Iterator[CapturedAttention]:
    """Record α of every attention layer while `model` runs, in at most `budget` bytes.

    - If the weights fit into `budget` bytes, all are stored. Otherwise they are pooled: each stored
      cell is the largest weight of a block.
    - `top=k` stores the k largest weights of each row instead.
    - `pool=size` stores at most `size` rows and columns.

    Dropout is not applied to the recorded weights. A new forward pass replaces the weights of the
    previous one. Only forward passes in this thread are recorded.

    `model` is a PreTrainedModel or a module that contains one. Inside the context it runs with
    qkv's attention, whatever implementation it was loaded with.

        with capture(model) as captured:
            model(**tokenizer(text, return_tensors="pt"))
        captured.weights                              # NumPy float32, (layers, heads, n, n)
        captured.words(tokenizer, text).plot(layer=2)
    """
    validate_sizes(budget=budget)
    validate_optional_sizes(top=top, pool=pool)
    if top is not None and pool is not None:
        raise CombinationError("top and pool cannot be combined: pass one of them")
    names = _find_attention_modules(model)
    captured = CapturedAttention([], budget=budget, unseen=_find_unseen_modules(model, names))
    recorder = Recorder(names, captured, top, pool)
    switched: list[Any] = []
    before = OBSERVERS.get()
    with ExitStack() as cleanup:
        for part in model.modules():
            if isinstance(part, PreTrainedModel):
                register_model(part)
                cleanup.enter_context(part.register_forward_pre_hook(recorder.begin_pass))
                hook = part.register_forward_hook(recorder.end_pass, always_call=True)
                cleanup.enter_context(hook)
        cleanup.callback(OBSERVERS.set, before)
        OBSERVERS.set((*before, recorder.record_layer))
        cleanup.callback(_restore_configs, switched)
        _switch_configs(_find_configs(model), switched)
        yield recorder.captured


def _find_attention_modules(model: Any) -> dict[Any, str]:
    """Return the modules that use transformers' AttentionInterface, with their names."""
    if not isinstance(model, torch.nn.Module):
        raise DtypeError(
            f"model must be a transformers model, not {type(model).__name__}: for a pipeline pass "
            "pipeline.model"
        )
    kinds: Any = {type(module) for module in model.modules()}
    kinds = {kind for kind in kinds if uses_attention_interface(kind)}
    names = {module: name for name, module in model.named_modules() if type(module) in kinds}
    if names:
        return names
    models = [type(x).__name__ for x in model.modules() if isinstance(x, PreTrainedModel)]
    if not models:
        raise ArgumentError(
            f"model is a {type(model).__name__} that contains no PreTrainedModel: pass a "
            "transformers model"
        )
    raise ArgumentError(
        f"model: {models[0]} has no attention, or computes it by itself, not through transformers' "
        "AttentionInterface, so capture cannot record it"
    )


def _find_unseen_modules(model: Any, names: dict[Any, str]) -> tuple[str, ...]:
    """Return the names of attention modules that do not use the AttentionInterface.

    These are modules with "attention" in their class name that neither contain nor belong to a
    module of `names`.
    """
    recorded, unseen = [f"{name}." for name in names.values()], list[str]()
    for name, module in model.named_modules():
        if not ATTENTION_PATTERN.search(type(module).__name__) or isinstance(
            module, PreTrainedModel
        ):
            continue
        path = f"{name}."
        if not any(path.startswith(x) or x.startswith(path) for x in (*recorded, *unseen)):
            unseen.append(path)
    return tuple(path[:-1] for path in unseen)


# `capture` changes the attention implementation in the model's configs. Models, threads and nested
# captures may share a config: the first capture saves the old value, the last one restores it.

_SWITCH_LOCK = threading.Lock()
_SWITCHED_CONFIGS: dict[int, tuple[Any, str | None, int]] = {}


def _find_configs(model: Any) -> list[Any]:
    """Return the configs and sub-configs of models that use the AttentionInterface."""
    configs: dict[int, Any] = {}
    pending = [module.config for module in model.modules() if hasattr(module, "config")]
    while pending:
        config = pending.pop()
        if id(config) not in configs and hasattr(config, "_attn_implementation_internal"):
            configs[id(config)] = config
            pending += [getattr(config, name, None) for name in config.sub_configs]
    return [config for config in configs.values() if get_family(config).uses_interface]


def _switch_configs(configs: Sequence[Any], switched: list[Any]) -> None:
    """Switch the configs to a recording implementation.

    Appends each switched config to `switched`, so that an interrupt leaves none behind.
    """
    with _SWITCH_LOCK:
        if CAPTURE_NAME not in AttentionInterface._global_mapping:
            register_implementation(CAPTURE_NAME, AttentionImplementation(records=True))
        for config in configs:
            _, before, count = _SWITCHED_CONFIGS.get(
                id(config), (config, config._attn_implementation_internal, 0)
            )
            _SWITCHED_CONFIGS[id(config)] = config, before, count + 1
            switched.append(config)
            name = f"{CAPTURE_NAME}-{before}"
            is_registered = name in AttentionInterface._global_mapping
            # Not through the property, which would also set the sub-configs.
            config._attn_implementation_internal = name if is_registered else CAPTURE_NAME


def _restore_configs(configs: Sequence[Any]) -> None:
    """Restore the configs' implementations when the last capture that uses them ends."""
    with _SWITCH_LOCK:
        for config in configs:
            _, before, count = _SWITCHED_CONFIGS.pop(id(config))
            if count > 1:
                _SWITCHED_CONFIGS[id(config)] = config, before, count - 1
            else:
                config._attn_implementation_internal = before


@dataclass(eq=False)
class Recorder:
    """Records the layers of one capture while the model runs.

    `names` are the attention modules to record. `depth` counts nested forward passes. `halvings`
    counts how often the stored cells were halved to fit the budget.
    """

    names: dict[Any, str]
    captured: CapturedAttention
    top: int | None
    pool: int | None
    depth: int = 0
    halvings: int = 0

    def begin_pass(self, *_: Any) -> None:
        """Count a forward pass, also of a nested model; the outermost one drops earlier layers."""
        if self.record_layer not in OBSERVERS.get():
            return
        if self.depth == 0:
            self._clear_layers()
        self.depth += 1

    def end_pass(self, *_: Any) -> None:
        """Count the end of a forward pass."""
        if self.record_layer in OBSERVERS.get():
            self.depth -= 1

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def record_layer(self, module: Any, call: AttentionCall) -> None:
        """Record the weights of one layer."""
        # Gradient checkpointing runs layers again in the backward pass: do not record them twice.
        if module not in self.names or torch._C._current_graph_task_id() != -1:
            return
        # model.forward() runs no hooks: then a layer that is already recorded starts a new pass.
        if self.depth == 0 and any(x.name == self.names[module] for x in self.captured.layers):
            self._clear_layers()
        batch, heads, n, m = call.shape
        layer, budget = CapturedLayer(self.names[module], n, m), self.captured.budget
        if self.top is not None:
            k = min(self.top, m)
            self._check_budget(8 * batch * heads * n * k)
            layer = replace(layer, top=_top_weights(call, k, budget))
        else:
            rows, cols = self._cell_shape(batch * heads, n, m)
            self._shrink_to_budget(batch * heads, rows, cols)
            cells = _pool_weights(call, rows, cols, budget)
            for _ in range(self.halvings):
                cells = _halve_cells(cells)
            layer = replace(layer, cells=cells)
        self.captured.layers.append(layer)

    def _clear_layers(self) -> None:
        self.captured.layers.clear()
        self.halvings = 0

    def _cell_shape(self, matrices: int, n: int, m: int) -> tuple[int, int]:
        """Return the rows and columns to store for each matrix of a layer."""
        if self.pool is not None:
            return min(self.pool, n), min(self.pool, m)
        share = self.captured.budget // (4 * matrices * len(self.names))
        if n * m <= share:
            return n, m
        shrink = math.sqrt(share / (n * m))
        return max(1, int(n * shrink)), max(1, int(m * shrink))

    def _shrink_to_budget(self, matrices: int, rows: int, cols: int) -> None:
        """Halve the stored cells until another layer fits.

        One module may run several times, so there can be more layers than modules.
        """
        captured, budget = self.captured, self.captured.budget

        def layer_bytes() -> int:
            factor = 1 << self.halvings
            return 4 * matrices * math.ceil(rows / factor) * math.ceil(cols / factor)

        while (
            self.pool is None
            and layer_bytes() > 4 * matrices
            and captured.nbytes + layer_bytes() > budget
        ):
            captured.layers[:] = [replace(x, cells=_halve_cells(x.cells)) for x in captured.layers]
            self.halvings += 1
        self._check_budget(layer_bytes())

    def _check_budget(self, size: int) -> None:
        """Raise if `size` more bytes exceed the budget."""
        captured, budget = self.captured, self.captured.budget
        if captured.nbytes + size <= budget:
            return
        option = "top" if self.top is not None else "pool" if self.pool is not None else None
        raise ArgumentError(
            f"budget of {budget:,} bytes is too small: {len(captured.layers) + 1} of "
            f"{len(self.names)} layers take {captured.nbytes + size:,}. Pass a larger budget"
            + (f" or a smaller {option}" if option else "")
        )


def _weight_blocks(call: AttentionCall, budget: int) -> Iterator[tuple[int, Any]]:
    """Yield α in blocks of rows that fit into the budget, each with its first row."""
    batch, heads, n, m = call.shape
    step = max(1, min(MAX_WORKING_BYTES, budget) // (4 * batch * heads * m or 1))
    for start in range(0, n, step):
        yield start, call.compute_weights(start, min(start + step, n)).float()


def _top_weights(call: AttentionCall, k: int, budget: int) -> tuple[Any, Any]:
    """Return the k largest weights of each row and their keys, each (batch, heads, n, k)."""
    parts = [block.topk(k, -1) for _, block in _weight_blocks(call, budget)]
    alpha = torch.cat([part.values.cpu() for part in parts], -2)
    keys = torch.cat([part.indices.int().cpu() for part in parts], -2)
    return alpha.numpy(), keys.numpy()


def _pool_weights(call: AttentionCall, rows: int, cols: int, budget: int) -> Any:
    """Return α max-pooled to (batch, heads, rows, cols)."""
    batch, heads, n, m = call.shape
    cells = torch.full((batch, heads, rows, cols), -math.inf, device=call.query.device)
    for start, block in _weight_blocks(call, budget):
        stop = start + block.shape[-2]
        if (rows, cols) == (n, m):
            cells[:, :, start:stop] = block
            continue
        columns = torch.arange(m, device=block.device) * cols // m
        flat = block.new_full((batch, heads, stop - start, cols), -math.inf)
        flat.scatter_reduce_(-1, columns.expand_as(block), block, "amax")
        lines = torch.arange(start, stop, device=block.device) * rows // n
        cells.scatter_reduce_(-2, lines[:, None].expand_as(flat), flat, "amax")
    return cells.cpu().numpy()


def _halve_cells(cells: Any) -> Any:
    """Return half as many rows and columns; each cell is the maximum of four."""
    for axis in (-2, -1):
        cells = np.maximum.reduceat(cells, np.arange(0, cells.shape[axis], 2), axis=axis)
    return cells
