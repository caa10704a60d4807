"""A database as the memory of a model."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Never

import numpy as np
import torch
from torch import Tensor, nn

from qkv import attention
from qkv.database.database import Database, open
from qkv.database.memory_rows import (
    MemoryRows,
    can_update_keys,
    encode_memory_query,
    find_memory_rows,
    forget_rows,
    own_score,
    update_memory_rows,
)
from qkv.errors import ArgumentError, CombinationError, DtypeError, ShapeError, validate_sizes
from qkv.nn import weightings
from qkv.nn.scores import LayerScore, build_score, resolve_score, score_name
from qkv.nn.tensors import called_as, check_tensors
from qkv.util.keyword_hints import reject_call_keywords, reject_torchscript, suggest_keywords
from qkv.weightings import TopK, WeightingLike


@suggest_keywords
class Memory(nn.Module):
    """Σᵢ α(q, kᵢ) vᵢ over the rows of a database: query (…, n, h·d) → (…, n, h·d_v), h the heads.

    Each head asks with its d numbers, which live where the vectors of the keys do (numbers are in
    the units of the keys), compared as the encoder says, or by a `score`. The rows stay in the
    store: of a `TopK`, the k best of each query are found by reading all keys once, block by block,
    on the query's device, and only these come into the graph. Another weighting, or a `tolerance`,
    is `Database.attend`: certified where no gradient is wanted, else exact.

    Gradients reach the query and the score. With `learn` they also reach the values that were
    looked at, and the keys where those are vectors: `step` moves these rows, as a new version.

    The rows are no part of `state_dict`. A copy has the same database; a pickle opens the same
    store, or holds all rows of one in memory.

    >>> import torch, qkv
    >>> facts = qkv.Database(torch.eye(3), torch.tensor([[10.0], [20.0], [30.0]]))
    >>> memory = Memory(facts, weighting=TopK(1))
    >>> memory(torch.tensor([[0.0, 9.0, 0.0]]))
    tensor([[20.]])
    >>> memory.forget(torch.tensor([0.0, 1.0, 0.0]))
    1
    >>> memory(torch.tensor([[0.1, 9.0, 0.0]]))
    tensor([[10.]])
    """

    __prepare_scriptable__ = reject_torchscript

    def __init__(
        self,
        database: Database[Any, Any] | str | os.PathLike[str],
        heads: int = 1,
        *,
        score: LayerScore | None = None,
        weighting: WeightingLike = TopK(32),  # noqa: B008
        tolerance: float | None = None,
        learn: bool = False,
    ) -> None:
        super().__init__()
        validate_sizes(heads=heads)
        self._shared = SharedDatabase(database)
        self.heads, self.tolerance, self.learn = heads, tolerance, learn
        self.score = None if score is None else resolve_score(score, self._score_widths())
        self.weighting = weightings.resolve_weighting(weighting)
        self._max_support = (
            getattr(self.weighting, "max_support", None) if tolerance is None else None
        )
        if learn and self._max_support is None:
            raise CombinationError(
                "learn: rows are moved where a query looks at few: pass weighting=TopK(k) and no "
                "tolerance"
            )
        self._touched: list[tuple[MemoryRows, Tensor, Tensor]] = []

    @property
    def database(self) -> Database[Any, Any]:
        return self._shared.database

    def _score_widths(self) -> tuple[int, int] | None:
        """Of query and key; None while there are no keys."""
        encoder = self.database.encoder if len(self.database) else None
        return None if encoder is None else (encoder.width, encoder.width)

    def forward(self, query: Tensor, **wrong: Never) -> Tensor:
        if wrong:
            reject_call_keywords(self, wrong)
        check_tensors(query=query)
        if query.shape[-1] % self.heads:
            raise ShapeError(
                f"query: its {query.shape[-1]} numbers are no multiple of {self.heads} heads"
            )
        asked = query.reshape(-1, query.shape[-1] // self.heads)
        out = self._attend_rows(asked)
        return out.reshape(*query.shape[:-1], -1)

    if TYPE_CHECKING:

        @called_as(forward)
        def __call__(self) -> None: ...

    @torch._disable_dynamo  # a graph can open no file; compiler.disable loads all of dynamo here
    def _attend_rows(self, query: Tensor) -> Tensor:
        score = None if self.score is None else build_score(self.score, query.dtype)
        weighting = weightings.build_weighting(self.weighting, query.dtype)
        if self._max_support is None:
            how: Any = {"score": score, "weighting": weighting, "tolerance": self.tolerance}
            return self.database.attend(query, **how)
        found = find_memory_rows(self.database, query, self._max_support, score)
        key, value = (torch.as_tensor(x).to(query) for x in (found.key, found.value))
        if self.learn and torch.is_grad_enabled():
            key.requires_grad_(can_update_keys(self.database))
            self._touched.append((found, key, value.requires_grad_()))
        if score is None:
            score = own_score(self.database, query)
        at = torch.as_tensor(found.row_positions, device=query.device)
        live = torch.as_tensor(found.is_found, device=query.device)
        mask = None if found.is_found.all() else live[:, None, :]
        code = encode_memory_query(self.database, query).to(query.dtype)[:, None, :]
        how = {"score": score, "weighting": weighting, "mask": mask}
        out = attention.attend(code, key[at], value[at], **how)
        return out[:, 0, :]

    def step(self, lr: float) -> int:
        """row ← row − lr · gradient, for the rows that were looked at since the last step: a new
        version of the database. How many rows moved; those that were taken out meanwhile stay out.
        """
        looked, self._touched = self._touched, []
        looked = [x for x in looked if x[2].grad is not None]
        if not looked:
            return 0
        ids = np.unique(np.concatenate([found.ids for found, _, _ in looked]))
        moved = np.zeros(len(ids), bool)
        rows = []
        for first, part in zip(looked[0][1:], (0, 1), strict=True):
            now, slope = first.new_zeros(2, len(ids), first.shape[1])
            for found, *tensors in looked:
                x = tensors[part]
                at = torch.as_tensor(np.searchsorted(ids, found.ids), device=x.device)
                now[at] = x.detach()
                if x.grad is not None:
                    slope.index_add_(0, at, x.grad)
            moved |= slope.any(-1).cpu().numpy()
            rows.append((now - lr * slope).cpu().numpy())
        if not moved.any():
            return 0
        key, value = (x[moved] for x in rows)
        if not (np.isfinite(key).all() and np.isfinite(value).all()):
            raise ArgumentError(
                "step: rows would become NaN or infinite, and stay as they are: look at the loss, "
                "or take a smaller lr"
            )
        keys = key if can_update_keys(self.database) else None
        return update_memory_rows(self.database, ids[moved], keys, value)

    def forget(self, keys: Any) -> int:
        """Take out the rows of these keys (one, or a list): answers are then as if they had never
        been there, but for what `database.learn` made of pairs that named them. How many went.
        `database.compact()` takes them out of the files, too."""
        return forget_rows(self.database, keys)

    def extra_repr(self) -> str:
        score = "the encoder's" if self.score is None else score_name(self.score)
        where = self.database.path or "in memory"
        return (
            f"{where}, heads={self.heads}, score={score}, "
            f"weighting={weightings.weighting_name(self.weighting)}"
        )


class SharedDatabase:
    """A database that belongs to the caller, or the one in a folder; copies are the same one."""

    def __init__(self, database: Database[Any, Any] | str | os.PathLike[str]) -> None:
        if isinstance(database, str | os.PathLike):
            database = open(os.fspath(database), create=False)
        if not isinstance(database, Database):
            raise DtypeError(
                f"database must be a Database or the path of one, not {type(database).__name__}"
            )
        self.database = database

    def __deepcopy__(self, memo: Any) -> SharedDatabase:
        return self

    def __reduce__(self) -> Any:
        return SharedDatabase, (self.database,)
