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

from qkv.errors import ArgumentError, CombinationError, DtypeError, sizes, sizes_or_none
from qkv.transformers.captured import BUDGET, Captured, Layer
from qkv.transformers.implementation import CAPTURE, WATCHERS, Implementation, Question, enter
from qkv.transformers.models import ATTENTION, asks, family, note

WORKING = 2**26
"""Bytes of weights that are made at once, before they are thinned out."""


@contextmanager
def capture(
    model: Any, *, budget: int = BUDGET, top: int | None = None, pool: int | None = None
) -> Iterator[Captured]:
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
    sizes(budget=budget)
    sizes_or_none(top=top, pool=pool)
    if top is not None and pool is not None:
        raise CombinationError("top keeps single weights and pool cells of many: pass one of them")
    names = _named_attention(model)
    captured = Captured([], budget=budget, unseen=_unseen(model, names))
    recorder = Recorder(names, captured, top, pool)
    switched: list[Any] = []
    before = WATCHERS.get()
    with ExitStack() as undone:
        for part in model.modules():
            if isinstance(part, PreTrainedModel):
                note(part)
                undone.enter_context(part.register_forward_pre_hook(recorder.begin))
                hook = part.register_forward_hook(recorder.end, always_call=True)
                undone.enter_context(hook)
        undone.callback(WATCHERS.set, before)
        WATCHERS.set((*before, recorder.see))
        undone.callback(_restore, switched)
        _switch(_configs(model), switched)
        yield recorder.captured


def _named_attention(model: Any) -> dict[Any, str]:
    """The modules that ask transformers for their attention, and their names."""
    if not isinstance(model, torch.nn.Module):
        raise DtypeError(
            f"model must be a model of transformers, not {type(model).__name__}: a pipeline has "
            "one as .model"
        )
    kinds: Any = {type(module) for module in model.modules()}
    kinds = {kind for kind in kinds if asks(kind)}
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


def _unseen(model: Any, names: dict[Any, str]) -> tuple[str, ...]:
    """The modules that are called an attention, and neither ask for it nor hold or lie in one that
    does."""
    seen, found = [f"{name}." for name in names.values()], list[str]()
    for name, module in model.named_modules():
        if not ATTENTION.search(type(module).__name__) or isinstance(module, PreTrainedModel):
            continue
        own = f"{name}."
        if not any(own.startswith(x) or x.startswith(own) for x in (*seen, *found)):
            found.append(own)
    return tuple(name[:-1] for name in found)


# A model's configs say how it attends. They may be shared by models, threads and nested captures:
# the first capture keeps what they said, the last one puts it back.

_LOCK = threading.Lock()
_SWITCHED: dict[int, tuple[Any, str | None, int]] = {}


def _configs(model: Any) -> list[Any]:
    found: dict[int, Any] = {}
    waiting = [module.config for module in model.modules() if hasattr(module, "config")]
    while waiting:
        config = waiting.pop()
        if id(config) not in found and hasattr(config, "_attn_implementation_internal"):
            found[id(config)] = config
            waiting += [getattr(config, name, None) for name in config.sub_configs]
    return [config for config in found.values() if family(config).takes]


def _switch(configs: Sequence[Any], switched: list[Any]) -> None:
    """Let them be seen; `switched` are those which are, should it be interrupted."""
    with _LOCK:
        if CAPTURE not in AttentionInterface._global_mapping:
            enter(CAPTURE, Implementation(records=True))
        for config in configs:
            _, before, count = _SWITCHED.get(
                id(config), (config, config._attn_implementation_internal, 0)
            )
            _SWITCHED[id(config)] = config, before, count + 1
            switched.append(config)
            own = f"{CAPTURE}-{before}"
            known = own in AttentionInterface._global_mapping
            # Not by the property, which would set the configs inside as well.
            config._attn_implementation_internal = own if known else CAPTURE


def _restore(configs: Sequence[Any]) -> None:
    with _LOCK:
        for config in configs:
            _, before, count = _SWITCHED.pop(id(config))
            if count > 1:
                _SWITCHED[id(config)] = config, before, count - 1
            else:
                config._attn_implementation_internal = before


@dataclass(eq=False)
class Recorder:
    """What one capture does while the model runs."""

    names: dict[Any, str]
    captured: Captured
    top: int | None
    pool: int | None
    depth: int = 0
    halvings: int = 0

    def begin(self, *_: Any) -> None:
        """A model's forward pass begins; models lie in models."""
        if self.see not in WATCHERS.get():
            return
        if self.depth == 0:
            self._clear()
        self.depth += 1

    def end(self, *_: Any) -> None:
        if self.see in WATCHERS.get():
            self.depth -= 1

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def see(self, module: Any, question: Question) -> None:
        # A layer that runs again on the way back, for its gradient, was seen before.
        if module not in self.names or torch._C._current_graph_task_id() != -1:
            return
        # Who calls model.forward() calls no hook: then a layer seen before tells a new pass.
        if self.depth == 0 and any(x.name == self.names[module] for x in self.captured.layers):
            self._clear()
        batch, heads, n, m = question.shape
        layer, budget = Layer(self.names[module], n, m), self.captured.budget
        if self.top is not None:
            k = min(self.top, m)
            self._afford(8 * batch * heads * n * k)
            layer = replace(layer, top=_top(question, k, budget))
        else:
            rows, cols = self._cells(batch * heads, n, m)
            self._make_room(batch * heads, rows, cols)
            cells = _pooled(question, rows, cols, budget)
            for _ in range(self.halvings):
                cells = _halved(cells)
            layer = replace(layer, cells=cells)
        self.captured.layers.append(layer)

    def _clear(self) -> None:
        self.captured.layers.clear()
        self.halvings = 0

    def _cells(self, matrices: int, n: int, m: int) -> tuple[int, int]:
        """Rows and columns of what is kept of each of a layer's matrices."""
        if self.pool is not None:
            return min(self.pool, n), min(self.pool, m)
        share = self.captured.budget // (4 * matrices * len(self.names))
        if n * m <= share:
            return n, m
        shrink = math.sqrt(share / (n * m))
        return max(1, int(n * shrink)), max(1, int(m * shrink))

    def _make_room(self, matrices: int, rows: int, cols: int) -> None:
        """Halve what is held until another layer fits.

        One module may serve as many layers, so that they turn out to be more than expected.
        """
        held, budget = self.captured, self.captured.budget

        def size() -> int:
            part = 1 << self.halvings
            return 4 * matrices * math.ceil(rows / part) * math.ceil(cols / part)

        while self.pool is None and size() > 4 * matrices and held.nbytes + size() > budget:
            held.layers[:] = [replace(x, cells=_halved(x.cells)) for x in held.layers]
            self.halvings += 1
        self._afford(size())

    def _afford(self, size: int) -> None:
        held, budget = self.captured, self.captured.budget
        if held.nbytes + size <= budget:
            return
        asked = "top" if self.top is not None else "pool" if self.pool is not None else None
        raise ArgumentError(
            f"budget of {budget:,} bytes is too small: {len(held.layers) + 1} of "
            f"{len(self.names)} layers take {held.nbytes + size:,}. Pass a larger budget"
            + (f" or a smaller {asked}" if asked else "")
        )


def _blocks(question: Question, budget: int) -> Iterator[tuple[int, Any]]:
    """α from top to bottom, as many rows at once as the budget leaves room for."""
    batch, heads, n, m = question.shape
    step = max(1, min(WORKING, budget) // (4 * batch * heads * m or 1))
    for start in range(0, n, step):
        yield start, question.weights(start, min(start + step, n)).float()


def _top(question: Question, k: int, budget: int) -> tuple[Any, Any]:
    """The k largest weights of each row, and their keys: (batch, heads, n, k)."""
    parts = [block.topk(k, -1) for _, block in _blocks(question, budget)]
    alpha = torch.cat([part.values.cpu() for part in parts], -2)
    keys = torch.cat([part.indices.int().cpu() for part in parts], -2)
    return alpha.numpy(), keys.numpy()


def _pooled(question: Question, rows: int, cols: int, budget: int) -> Any:
    """α as (batch, heads, rows, cols): each cell the largest weight in it."""
    batch, heads, n, m = question.shape
    cells = torch.full((batch, heads, rows, cols), -math.inf, device=question.query.device)
    for start, block in _blocks(question, budget):
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


def _halved(cells: Any) -> Any:
    """Half as many rows and columns, each cell the largest of four."""
    for axis in (-2, -1):
        cells = np.maximum.reduceat(cells, np.arange(0, cells.shape[axis], 2), axis=axis)
    return cells
