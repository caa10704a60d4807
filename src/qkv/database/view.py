"""One version of a database as it is read: rows with their vectors, found by key or by place."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from qkv.arrays import of
from qkv.arrays.ragged import Query, Wide, beside
from qkv.arrays.rows import Rows, Stored
from qkv.database import cells, codes, columns, spelled
from qkv.database.compare import Texts
from qkv.database.faults import Damaged
from qkv.database.piece import Piece
from qkv.database.query_input import as_key, is_number_key
from qkv.database.schema import LOST, Schema
from qkv.database.store import Snapshot, sizes
from qkv.database.where import Among, as_text, columns_in, condition
from qkv.deadline import check_deadline
from qkv.errors import ArgumentError, DtypeError, ShapeError

if TYPE_CHECKING:  # loaded when keys are encoded
    from qkv.database.encoders import Encoder
    from qkv.database.encoding import Precision
    from qkv.scores import Score, ScoreLike

CHUNK = 8192
"""Rows that are read together."""

SAMPLED, NAMED = 256, 5
"""Rows in which a hint looks for values of a column, and how many columns and values it names."""

CONDITIONS = 2**26
"""Bytes, one for each row, of the conditions that are remembered."""

FEW = 0.25
"""The share of rows up to which those that may answer are picked out, not masked."""

REMEMBERED = 64
"""Texts whose vectors are kept."""

FIELDS = {
    "key": ("code", "scale", "sparse"),
    "value": ("value",),
    "near": ("near", "near.bounds", "near.block"),
}
"""The tensors of what is `Stored`."""

PLAIN = frozenset({str, int, float, bool, bytes, type(None)})
"""Types of cells that nobody can change after they were remembered."""


class View:
    """The rows of one snapshot under their schema; a row's place is its position among the live.

    `encoder` is one that may be the stored one already, so that it need not be built again.
    """

    def __init__(self, snapshot: Snapshot, encoder: Encoder | None = None):
        self.snapshot, self._given = snapshot, encoder
        self._asked: dict[str, Query] = {}
        self.version = snapshot.version
        self._short: dict[int, dict[str, Any]] = {}
        self._passed: dict[str, np.ndarray] = {}
        self._censuses: dict[str, np.ndarray] = {}
        self._aside: dict[bool, dict[Any, np.ndarray]] = {False: {}, True: {}}
        self._bounds: dict[Any, Any] = {}
        self.texts: dict[tuple[str, int, int], Texts] = {}

    def __len__(self) -> int:
        return len(self.snapshot)

    @cached_property
    def settings(self) -> dict[str, Any]:
        return self.snapshot.settings

    def count(self, name: str) -> int:
        """A number of the settings; 0 where it is none."""
        told = self.settings.get(name)
        return told if isinstance(told, int) else 0

    @property
    def begun(self) -> bool:
        """Whether there were ever rows, which fixed the schema: it may be lost, not made anew."""
        return "schema" in self.settings or len(self.snapshot) > 0

    @cached_property
    def schema(self) -> Schema:
        found = Schema.from_dict(self.settings.get("schema", {}))
        needed = {f"kinds/{x}" for x in found.columns if found.vectors.get(x) != "key"} | {"code"}
        if len(self.snapshot) and not needed <= {*self.snapshot.names}:
            raise Damaged(LOST)
        return found

    @cached_property
    def encoder(self) -> Encoder:
        from qkv.database import encoders

        told, given, learned = self.settings.get("encoder", {}), self._given, self.snapshot.arrays()
        if given is not None and given.settings() == told and not (given.arrays() or learned):
            return given
        return encoders.load(told, learned, given)

    def encoded(self, queries: Any) -> Query:
        """The vectors of queries; those of the last single texts are remembered, as an answer asks
        for its own again."""
        single = len(queries) == 1 and type(queries[0]) is str
        if single and (known := self._asked.get(queries[0])) is not None:
            return known
        try:
            found = self.encoder.asked(queries)
        except (ArgumentError, DtypeError, ShapeError) as fault:  # which tells of keys in rows
            told = re.sub(r"(^|where )key(?= \d)", r"\1query", str(fault))
            raise type(fault)(told.removesuffix(": leave that row out")) from None
        self.check(found)
        wide = np.result_type(found.code, np.float32)
        found = found._replace(code=np.ascontiguousarray(found.code, dtype=wide))
        if single:
            if len(self._asked) >= REMEMBERED:
                self._asked = {}
            self._asked[queries[0]] = found
        return found

    def score(self, wish: ScoreLike | None) -> Score:
        """The score that is wished for; without a wish, as the encoder says."""
        if wish is None:
            return self._own_score
        from qkv import scores

        return scores.resolve(wish)

    @cached_property
    def _own_score(self) -> Score:
        return self.encoder.score(len(self))

    @cached_property
    def wordy(self) -> bool:
        """Whether sparse vectors lie beside the keys' vectors."""
        return "sparse" in self.snapshot.names

    @property
    def ids(self) -> np.ndarray:
        """The id of each place, (m,): the rows whose vectors can be read."""
        return self._listed[0]

    @property
    def pieces(self) -> int:
        """How many times a scan goes on elsewhere."""
        return self._listed[1]

    @cached_property
    def _listed(self) -> tuple[np.ndarray, int]:
        parts = self.snapshot.parts()
        live = [part.ids if part.live is None else part.ids[part.live] for part in parts]
        return self.snapshot.whole(np.concatenate([np.zeros(0, np.int64), *live])), len(live)

    def inherit(self, old: View) -> None:
        """Take over what an older view of the same vectors has built."""
        same = {**old.settings, "promise": 0} == {**self.settings, "promise": 0}
        if same and "encoder" in vars(old):  # a promise changes no vector
            vars(self)["encoder"] = old.encoder

    def find(self, key: Any) -> list[int]:
        """The ids of the rows with exactly this key, oldest first."""
        digest = self._digest(key)
        return [] if digest is None else self.snapshot.find(digest)

    def value(self, key: Any, default: Any) -> Any:
        """The value of the last row with exactly this key, or the default where there is none."""
        digest = self._digest(key)
        found = None if digest is None else self.snapshot.newest(digest)
        if found is None:
            return default
        row = cells.loads(found[1])
        if self.apart:
            self._filled(found[:1], [row])
        return self.schema.value_of(row)

    def latest(self, key: Any, default: Any) -> Any:
        """The same in the newest version, where nothing of a value lies apart: rows are of one
        schema in all versions."""
        digest = self._digest(key)
        found = None if digest is None else self.snapshot.latest(digest)
        return default if found is None else self.schema.value_of(cells.loads(found[1]))

    @cached_property
    def apart(self) -> bool:
        """Whether values are vectors, which lie beside the keys' and not in the records."""
        return not self.schema.vectors.keys().isdisjoint(self.schema.value)

    def _digest(self, key: Any) -> bytes | None:
        if not self.begun:
            return None
        try:
            if type(key) is not str:
                key = as_key(key, self.schema.key_kind)
            found = self.schema.digest(key)
        except (TypeError, ValueError):
            return None  # what cannot be kept is nobody's key
        if self.schema.key_kind == "date" and not self.snapshot.find(found):
            others = map(self.schema.digest, spelled.alike(spelled.moment(key)))
            return next(filter(self.snapshot.find, others), found)
        return found

    @cached_property
    def key_kinds(self) -> dict[str, str]:
        """What the first row has in each column of the key."""
        row = next((row for _, row in self.all_rows()), {})
        return {name: cells.kind(row[name]) for name in self.schema.key if name in row}

    @cached_property
    def has_number_keys(self) -> bool:
        """Whether keys are tuples of numbers or dates, so that an array of numbers may be one."""
        if self.schema.key_kind != "tuple":
            return False
        encoder: Any = getattr(self.encoder, "base", self.encoder)
        if encoder.kind == "columns" and any(head.kind != "numbers" for head in encoder.heads):
            return False
        row = next((row for _, row in self.all_rows()), None)
        return row is not None and is_number_key(self.schema.key_of(row))

    def rows(self, ids: Sequence[int]) -> list[dict[str, Any]]:
        short, fresh = self._short, {}
        new = [id_ for id_ in ids if id_ not in short]
        if new:
            if len(short) + len(new) > sizes.KNOWN:
                self._short = {}
            for id_, text in zip(new, self.snapshot.records(new), strict=True):
                fresh[id_] = row = cells.loads(text)
                if len(text) <= sizes.SHORT and PLAIN.issuperset(map(type, row.values())):
                    self._short[id_] = row
        return self._filled(ids, [(fresh if i in fresh else short)[i].copy() for i in ids])

    def values(self, ids: Sequence[int]) -> list[Any]:
        return self.schema.values_of(self.rows(ids)) if len(ids) else []

    def all_rows(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Every id and row, oldest first."""
        ids: list[int] = []
        rows: list[dict[str, Any]] = []
        some = self.ids if self.begun and self.schema.vectors else None
        for id_, text in self.snapshot.rows(some):
            ids.append(id_)
            rows.append(cells.loads(text))
            if len(ids) == CHUNK:
                check_deadline()
                yield from zip(ids, self._filled(ids, rows), strict=True)
                ids, rows = [], []
        yield from zip(ids, self._filled(ids, rows), strict=True)

    def all_keys(self) -> Any:
        """Every key: a list, or an array of vectors."""
        if self.schema.key_kind == "vector":
            return self._given_keys(self.ids)
        return [self.schema.key_of(cells.loads(text)) for _, text in self.snapshot.rows()]

    def _given_keys(self, ids: Sequence[int] | np.ndarray) -> np.ndarray:
        """The vectors that were given as keys."""
        given = "key" in self.snapshot.names
        return np.asarray(self.snapshot.tensor("key", ids)) if given else self.codes(ids)

    def _filled(
        self, ids: Sequence[int] | np.ndarray, rows: list[dict[str, Any]]
    ) -> list[dict[str, Any]]:
        """Rows with the vectors that are kept beside them."""
        if not rows:
            return rows
        for column, role in self.schema.vectors.items():
            of_key = role == "key"
            vectors = self._given_keys(ids) if of_key else self.snapshot.tensor(role, ids)
            for row, vector in zip(rows, vectors, strict=True):
                row[column] = vector
        return rows

    def where(self, wish: Any) -> np.ndarray | None:
        """Which rows pass a condition, (m,); None where all do."""
        census = None
        if isinstance(wish, Among):
            wish, census = wish.where, wish.census.__getitem__
        if wish is None:
            return None
        if callable(wish):
            passed = [id_ for id_, row in self.all_rows() if wish(row)]
            return np.isin(self.ids, np.array(passed, np.int64), assume_unique=True)
        known = self._passed.get(wish) if isinstance(wish, str) else None
        if known is not None:
            return known
        passes = condition(wish, self.schema.columns if self.begun else ())
        parts = [passes(Piece(self, part, census)).true for part in self._parts()]
        found = np.concatenate(parts) if parts else np.zeros(0, bool)
        if isinstance(wish, str):
            if (len(self._passed) + 1) * len(found) > CONDITIONS:
                self._passed = {}
            self._passed[wish] = found
        return found

    def why_none_pass(self, where: Any) -> str:
        """That no row passes a condition, with values that its columns have among the first rows;
        empty where some row passes, or there is no condition."""
        passed = self.where(where)
        if passed is None or passed.any():
            return ""
        told = f"No rows match {as_text(where)}"
        names = [x for x in columns_in(where, self.schema.columns) if x not in self.schema.vectors]
        rows = self.rows(self.ids[:SAMPLED].tolist()) if names else []
        for name in names[:NAMED]:
            values = {
                cells.shown(row[name]): None for row in rows if not cells.is_missing(row[name])
            }
            some = list(values)[:NAMED]
            whole = len(rows) == len(self) and len(some) == len(values)
            such = ("is" if len(some) < 2 else "has the values") if whole else "has values such as"
            told += f"; column {name!r} {such} {', '.join(some)}" if some else ""
        return told

    @cached_property
    def present(self) -> np.ndarray | None:
        """Which rows have a value, (m,); None where all do. Of several columns all must be missing,
        or one that is to be pooled."""
        parts = [piece.present() for piece in self._pieces()]
        found = np.concatenate(parts) if parts else np.zeros(0, bool)
        return None if found.all() else found

    def having_values(self, allowed: np.ndarray | None) -> tuple[np.ndarray | None, int]:
        """The rows that are allowed and have a value, and how many of the allowed have none."""
        present = self.present
        if present is None:
            return allowed, 0
        both = present if allowed is None else present & allowed
        asked = len(present) if allowed is None else int(np.count_nonzero(allowed))
        return both, asked - int(np.count_nonzero(both))

    @property
    def rounded(self) -> bool:
        """Whether the keys' vectors are kept in 8 bits."""
        return "scale" in self.snapshot.names

    @property
    def kept(self) -> Precision:
        """How the keys' vectors are kept."""
        from qkv.database.encoding import Precision

        told = self.settings.get("precision")
        return Precision(self.rounded, told, coded="near.bounds" in self.snapshot.names)

    @property
    def precision(self) -> str | None:
        """The numbers of a key's vector, and their type; None before the first row."""
        found = self.snapshot.kind("code")
        return None if found is None else f"{' × '.join(map(str, found[1]))} {found[0].name}"

    def census(self, name: str) -> np.ndarray:
        """How many cells of a column are of each kind of `columns`, (6,)."""
        if name not in self._censuses:
            total = np.zeros(len(columns.KINDS), np.int64)
            for piece in self._pieces():
                total += np.bincount(piece.kinds(name), minlength=len(total))
            self._censuses[name] = total
        return self._censuses[name]

    def dated(self, name: str) -> bool:
        """Whether what a column holds of text and dates is dates: the first of them tells."""
        for piece in self._pieces():
            at = np.flatnonzero(piece.kinds(name) == columns.TEXT)[:1]
            if len(at):
                return not isinstance(piece.cells(name, at)[0], str)
        return False

    def whole(self, name: str, bits: int = 64) -> bool:
        """Whether each number of a column is an int of so many bits, or equal to one."""
        codes = (piece.column(name).numbers for piece in self._pieces())
        most = 2.0 ** (bits - 1)
        return all(bool(np.all((np.abs(x) < most) & (x == np.trunc(x)))) for x in codes)

    def _pieces(self) -> Iterator[Piece]:
        return (Piece(self, part) for part in self._parts())

    def vectors(
        self, allowed: np.ndarray | None = None, *, value: bool = False, asked: Any = None
    ) -> Rows:
        """The keys' vectors, and the values if they are numbers, to be attended over.

        `allowed` (m,) rules some of them out. Sparse vectors come beside, for the places that a
        `Query` has `asked`. Where memory is scarce, pages are let go as the next part is read.
        """
        kept, (picked, count) = self._aside[asked is not None], self.picked(allowed)
        if picked is not None:
            allowed, kept = None, {kind: x[picked] for kind, x in kept.items()}

        def read(fields: Collection[str] = ()) -> Iterable[Stored]:
            parts = self._parts([name for field in fields for name in FIELDS[field]])
            return map(stored, parts) if picked is None else some(parts, picked)

        def some(parts: Iterable[Any], picked: np.ndarray) -> Iterator[Stored]:
            at = 0
            for part in parts:
                live = np.ones(len(part.ids), bool) if part.live is None else part.live.copy()
                size = int(np.count_nonzero(live))
                live[live], at = picked[at : at + size], at + size
                yield stored(part)._replace(live=live)

        def stored(part: Any) -> Stored:
            tensors, scale = part.tensors, part.tensors.get("scale")
            key, near = tensors["code"], None
            if asked is not None:
                key, scale = Wide(key, tensors["sparse"], asked, scale), None
            else:
                near = codes.found(tensors)
            return Stored(key, tensors.get(named), part.live, scale, near, part.check)

        named, (width, wide) = "value" if value else "", self._widths
        shape, wide = (count, width + beside(asked)), wide if value else 0
        bounds = self._bounds if picked is None else None
        return Rows(read, shape, wide, allowed, self._scarce, kept, bounds, ahead=read)

    def picked(self, allowed: np.ndarray | None) -> tuple[np.ndarray | None, int]:
        """The rows that are allowed where they are so few that they are read alone, else None; and
        how many are read."""
        count = 0 if allowed is None else int(np.count_nonzero(allowed))
        few = 0 < count <= FEW * len(self.ids)
        return (allowed, count) if few else (None, len(self.ids))

    def codes(self, ids: Sequence[int] | np.ndarray) -> np.ndarray:
        """The vectors of some rows' keys, (len(ids), width)."""
        read = self.snapshot.tensor
        scale = read("scale", ids) if self.rounded else None
        return Stored(read("code", ids), scale=scale).vectors()

    def _parts(self, ahead: Collection[str] = ()) -> Iterable[Any]:
        if self._few is None:
            return self.snapshot.parts(ahead=ahead)
        for part in self._few:
            part.check()
        return self._few

    @cached_property
    def _few(self) -> list[Any] | None:
        """The parts of few rows, which are read in less time than they are listed."""
        return list(self.snapshot.parts()) if len(self) <= CHUNK else None

    @cached_property
    def _scarce(self) -> bool:
        return self.snapshot.scarce()

    @cached_property
    def _widths(self) -> tuple[int, int]:
        """Numbers in the vector of a key, and of a value."""
        tensors = next(self.snapshot.parts()).tensors
        return tensors["code"].shape[1], tensors["value"].shape[1] if "value" in tensors else 0

    def check(self, asked: Query) -> None:
        """Refuse vectors that cannot be compared with the keys'."""
        query, width = asked.code, self._widths[0] + beside(asked.asked)
        if len(query.shape) != 2 or query.shape[-1] != width:
            raise ShapeError(
                f"query has shape {tuple(query.shape)}, but the keys are vectors of {width} "
                f"numbers ({self.encoder.kind}): expected (queries, {width})"
            )
        if not of(query).dtype(query).endswith(("float16", "float32", "float64")):
            raise DtypeError(f"query is an array of {of(query).dtype(query)}: cast it to floats")
