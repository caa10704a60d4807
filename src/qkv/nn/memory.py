"""`Memory`: a layer that attends over the rows of a database."""

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

    Each head queries with d numbers. They are vectors in the space of the encoded keys; for keys
    that are numbers, in the units of the keys. The score is the encoder's, or `score`.

    The rows stay in the database. With a `TopK` weighting, the layer finds the k best rows of each
    query by reading all keys once, in blocks, on the query's device; only these rows enter the
    autograd graph. Another weighting, or a `tolerance`, calls `Database.attend`.

    Gradients reach the query and the score. With `learn` they also reach the retrieved values, and
    the retrieved keys if the keys are vectors; `step` then updates these rows and commits a new
    version of the database.

    The rows are not part of `state_dict`. A copy shares the database. A pickle holds the path of a
    stored database, or all rows of one in memory.

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
                "learn=True needs a weighting that selects few rows: pass weighting=TopK(k) and no "
                "tolerance"
            )
        self._retrieved: list[tuple[MemoryRows, Tensor, Tensor]] = []

    @property
    def database(self) -> Database[Any, Any]:
        return self._shared.database

    def _score_widths(self) -> tuple[int, int] | None:
        """Return the widths of query and key; None while the database is empty."""
        encoder = self.database.encoder if len(self.database) else None
        return None if encoder is None else (encoder.width, encoder.width)

    def forward(self, query: Tensor, **wrong: Never) -> Tensor:
        if wrong:
            reject_call_keywords(self, wrong)
        check_tensors(query=query)
        if query.shape[-1] % self.heads:
            raise ShapeError(
                f"query: its width {query.shape[-1]} is not a multiple of {self.heads} heads"
            )
        out = self._attend_rows(query.reshape(-1, query.shape[-1] // self.heads))
        return out.reshape(*query.shape[:-1], -1)

    if TYPE_CHECKING:

        @called_as(forward)
        def __call__(self) -> None: ...

    @torch._disable_dynamo  # a graph cannot read files; torch.compiler.disable would import dynamo
    def _attend_rows(self, query: Tensor) -> Tensor:
        score = None if self.score is None else build_score(self.score, query.dtype)
        weighting = weightings.build_weighting(self.weighting, query.dtype)
        if self._max_support is None:
            return self.database.attend(
                query, score=score, weighting=weighting, tolerance=self.tolerance
            )
        rows = find_memory_rows(self.database, query, self._max_support, score)
        key, value = (torch.as_tensor(x).to(query) for x in (rows.key, rows.value))
        if self.learn and torch.is_grad_enabled():
            key.requires_grad_(can_update_keys(self.database))
            self._retrieved.append((rows, key, value.requires_grad_()))
        if score is None:
            score = own_score(self.database, query)
        positions = torch.as_tensor(rows.row_positions, device=query.device)
        is_found = torch.as_tensor(rows.is_found, device=query.device)
        mask = None if rows.is_found.all() else is_found[:, None, :]
        code = encode_memory_query(self.database, query).to(query.dtype)[:, None, :]
        out = attention.attend(
            code, key[positions], value[positions], score=score, weighting=weighting, mask=mask
        )
        return out[:, 0, :]

    def step(self, lr: float) -> int:
        """Apply row ← row − lr · gradient to the rows retrieved since the last step.

        Commits a new version of the database and returns the number of updated rows. A row that was
        deleted meanwhile stays deleted.
        """
        retrieved, self._retrieved = self._retrieved, []
        retrieved = [x for x in retrieved if x[2].grad is not None]
        if not retrieved:
            return 0
        ids = np.unique(np.concatenate([rows.ids for rows, _, _ in retrieved]))
        has_gradient = np.zeros(len(ids), bool)
        updated = []
        for first, part in zip(retrieved[0][1:], (0, 1), strict=True):
            current, gradient = first.new_zeros(2, len(ids), first.shape[1])
            for rows, *tensors in retrieved:
                x = tensors[part]
                at = torch.as_tensor(np.searchsorted(ids, rows.ids), device=x.device)
                current[at] = x.detach()
                if x.grad is not None:
                    gradient.index_add_(0, at, x.grad)
            has_gradient |= gradient.any(-1).cpu().numpy()
            updated.append((current - lr * gradient).cpu().numpy())
        if not has_gradient.any():
            return 0
        key, value = (x[has_gradient] for x in updated)
        if not (np.isfinite(key).all() and np.isfinite(value).all()):
            raise ArgumentError(
                "step: rows would become NaN or infinite, so none is changed: check the loss, or "
                "use a smaller lr"
            )
        keys = key if can_update_keys(self.database) else None
        return update_memory_rows(self.database, ids[has_gradient], keys, value)

    def forget(self, keys: Any) -> int:
        """Delete the rows of one key or of a list of keys; return the number of deleted rows.

        Later answers do not depend on these rows, except through weights that `database.learn`
        fitted to pairs with these keys. `database.compact()` also removes them from the files.
        """
        return forget_rows(self.database, keys)

    def extra_repr(self) -> str:
        score = "the encoder's" if self.score is None else score_name(self.score)
        where = self.database.path or "in memory"
        return (
            f"{where}, heads={self.heads}, score={score}, "
            f"weighting={weightings.weighting_name(self.weighting)}"
        )


class SharedDatabase:
    """A reference to a database, given as an object or a path; copies share the database."""

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
