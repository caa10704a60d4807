"""What a score is: a function of a query and a key, and a few facts about it."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple, TypeAlias

from qkv.arrays import is_array, of
from qkv.arrays.tree import Record
from qkv.errors import DtypeError, ShapeError, positive
from qkv.types import Array, Shape


class Form(NamedTuple):
    """s = (scale φ·ψ + bias + offset) σ(gate_query + gate_key): the one form fast engines know.

    query φ (…, n, w), key ψ (…, m, w); bias (…, m, 1), offset (…, n, 1), and the gate's two
    halves likewise. A weighting that is not moved by a shift of the whole row needs no offset.
    """

    query: Array
    key: Array
    bias: Array | None = None
    offset: Array | None = None
    gate_query: Array | None = None
    gate_key: Array | None = None
    scale: float = 1.0

    def products(self) -> tuple[Array, Array]:
        """φ and ψ with the scale in φ, and bias and offset as two more of their numbers."""
        query = self.query if self.scale == 1 else self.query * self.scale
        if self.bias is None and self.offset is None:
            return query, self.key
        fw = of(self.query)
        query, key = [query], [self.key]
        if self.bias is not None:
            query.append(fw.full((*self.query.shape[:-1], 1), 1.0, self.query))
            key.append(self.bias)
        if self.offset is not None:
            query.append(self.offset)
            key.append(fw.full((*self.key.shape[:-1], 1), 1.0, self.key))
        return fw.xp.concat(query, axis=-1), fw.xp.concat(key, axis=-1)

    def scores(self) -> Array:
        """s (…, n, m)"""
        s = of(self.query).inner(*self.products())
        if self.gate_query is None or self.gate_key is None:
            return s
        fw = of(s)
        return fw.sigmoid(self.gate_query + fw.xp.matrix_transpose(self.gate_key)) * s


class Affine(NamedTuple):
    """s = factor(k) φ(q)·k + bias(k) + offset(q), of keys that are known by their lengths; then
    cap · tanh(s / cap), if there is one; or φ(q)·k σ(a(q) + w·k), with `gate` = (a, w, a
    number that no sum on the way to a goes beyond).

    φ (n, d), factor and bias (m,), offset and a (n,), w (d,)."""

    query: Array
    factor: Array | None = None
    bias: Array | None = None
    offset: Array | None = None
    cap: float | None = None
    gate: tuple[Array, Array, Array] | None = None


Lowering: TypeAlias = "tuple[Score, float] | str"
"""A score that has a `form`, and a bound on its error; or why there is none."""


class Score(Record):
    """s = score(query, key): (…, n, d_q), (…, m, d_k) → (…, n, m).

    Every entry depends on its own pair alone, so any block of scores can be made by itself.
    Subclasses are frozen dataclasses; each array among their fields receives gradients.
    """

    nonnegative: ClassVar[bool] = False
    """Whether no score is ever below zero, so that scores can be weights as they are."""

    compares_keys: ClassVar[bool] = False
    """Whether a database compares the keys themselves, which need not be vectors."""

    ranged: ClassVar[bool] = False
    """Whether `lowered` must look at the range of its arguments first."""

    numbers: ClassVar[dict[str, bool]] = {}
    """Fields that are a number, above 0 unless the class says else, or an array of one for each
    batch; and whether it may be of one for each column too."""

    by_number: ClassVar[bool] = False
    """Whether a query and a key are compared number by number, all of which are held at once."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "__call__" in vars(cls):  # another formula: what its base says of its own is not so here
            for name in OTHERWISE.difference(vars(cls)):
                setattr(cls, name, vars(Score)[name])

    def __post_init__(self) -> None:
        for name in self.numbers:
            positive(self, name)

    @property
    def linear(self) -> bool:
        """Whether s(q, c k) = c s(q, k) for any number c."""
        return False

    @property
    def radial(self) -> bool:
        """Whether s falls with ‖q − k‖₂ and hangs on nothing else."""
        return False

    @property
    def closeness(self) -> Score | None:
        """The same score, which still ranks the keys beyond its reach; None where it has none."""
        return None

    def __call__(self, query: Array, key: Array) -> Array:
        raise NotImplementedError("a score says how a query and a key are compared")

    def form(self, query: Array, key: Array) -> Form:
        """The same as a dot product, for a score that is one."""
        raise NotImplementedError(f"{type(self).__name__} is no dot product")

    def lowered(self, query: Array, key: Array, tolerance: float | None, dtype: str) -> Lowering:
        """A score that has a `form`, as near to this one as asked, and a bound on its error.

        `tolerance` None asks for the accuracy of the caller's dtype. Or why there is none.
        """
        if type(self).form is Score.form:
            return f"{type(self).__name__} has no form as a dot product"
        return self, 0.0

    def aside(self, key: Array) -> Array | None:
        """What of each key (m, d) hangs on no query, (m,): whoever scores these keys again may keep
        it. None where there is nothing to keep, or digits would be lost."""
        return None

    def beside(self, query: Array, key: Array, aside: Array) -> Array:
        """The scores, with what was kept of the keys."""
        raise NotImplementedError(f"{type(self).__name__} keeps nothing of a key")

    def affine(self, query: Array, norm: Array) -> Affine | None:
        """The score as a product with the key itself, for keys of these lengths (m,) and beside
        arrays of NumPy's; None where it is none."""
        return None

    def form_width(self, width: int) -> int:
        """Numbers in each vector of the form, for a query of this width."""
        return width

    def check(self, query: Shape, key: Shape) -> None:
        """Raise where arrays of these shapes cannot be compared."""
        if query[-1] != key[-1]:
            raise ShapeError(
                f"{type(self).__name__} compares vectors of one width: query has {query[-1]} "
                f"numbers a row and key {key[-1]}. Multiplicative and Additive take two widths."
            )
        for name, by_column in self.numbers.items():
            fits(self, name, query, query[-1] if by_column else 1)

    def footprint(self, width: int) -> int:
        """Numbers held at once per pair, for vectors of this width: it sets the block size."""
        return max(width, 1) if self.by_number else 1


OTHERWISE = {"affine", "aside", "beside", "closeness", "form", "form_width", "linear", "lowered"}
OTHERWISE |= {"radial", "ranged"}
"""What a score says of its formula, or how it comes to the same in another way."""


def array_of(owner: Any, name: str, *axes: str) -> Shape:
    """The shape of an array field, refused unless it has these axes."""
    value = getattr(owner, name)
    if not is_array(value):
        step = ": pass its .weight" if hasattr(value, "weight") else ""
        raise DtypeError(
            f"{type(owner).__name__}: {name} must be an array ({', '.join(axes)}), "
            f"not {type(value).__name__}{step}"
        )
    shape = of(value).shape(value)
    if len(shape) != len(axes):
        raise ShapeError(
            f"{type(owner).__name__}: {name} must be ({', '.join(axes)}), not of shape {shape}"
        )
    return shape


def differ(one: int | None, two: int | None) -> bool:
    """Whether two sizes are not the same; one that only a run will tell may be any."""
    return one is not None and two is not None and one != two


def fits(owner: Any, name: str, query: Shape, columns: int = 1) -> None:
    """Refuse an array field unless it is one number, one for each of these columns, or (…, 1, 1)
    one for each batch of the query's: one for each row would have no meaning in a block of them."""
    value = getattr(owner, name)
    if value is None or isinstance(value, int | float):  # a graph's is not asked for more
        return
    shape = tuple(getattr(value, "shape", ()))
    row = zip(reversed(shape), (columns, 1), strict=False)
    lead = [pair for pair in zip(shape[-3::-1], query[-3::-1], strict=False) if differ(pair[1], 1)]
    if any(differ(axis, 1) and differ(axis, size) for axis, size in (*row, *lead)):
        each = (
            f"of the {columns} columns, ({columns},), or of each batch" if columns != 1 else "batch"
        )
        batch = ", ".join(map(str, query[:-2])) or "…"
        raise ShapeError(
            f"{type(owner).__name__}: {name} has shape {shape}; expected a number, or one for each "
            f"{each}, ({batch}, 1, 1)"
        )


def agree(owner: Any, what: str, **sizes: int) -> None:
    """Refuse sizes that should be one size."""
    first, *others = sizes.values()
    if any(differ(size, first) for size in others):  # a size that is traced has no hash
        told = ", ".join(f"{name} has {size}" for name, size in sizes.items())
        raise ShapeError(f"{type(owner).__name__}: {what} must be one number, but {told}")


def pairs(query: Array, key: Array) -> tuple[Array, Array]:
    """(…, n, 1, d) and (…, 1, m, d), ready to be compared number by number."""
    if len(query.shape) == len(key.shape) > 4 and query.shape[:-2] != key.shape[:-2]:
        # TensorFlow broadcasts no six axes of which now the one and now the other array has 1.
        fw, axes = of(key), range(len(key.shape) - 2)
        lead = [fw.length(query if key.shape[axis] == 1 else key, axis) for axis in axes]
        query, key = (fw.xp.broadcast_to(x, (*lead, *fw.sizes(x)[-2:])) for x in (query, key))
    return query[..., None, :], key[..., None, :, :]


def inner_score(owner: Any) -> None:
    """Let the `score` field of a score be given by name or as a function too."""
    from qkv.scores import resolve

    object.__setattr__(owner, "score", resolve(owner.score))
