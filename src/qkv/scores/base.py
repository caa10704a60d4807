"""What a score is: a function of a query and a key, and a few facts about it."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple, TypeAlias

from qkv.errors import DtypeError, ShapeError, validate_positive
from qkv.frameworks import get_framework, is_array
from qkv.frameworks.tree import Record
from qkv.util.types import Array, Shape


class DotProductForm(NamedTuple):
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

    def augmented_vectors(self) -> tuple[Array, Array]:
        """φ and ψ with the scale in φ, and bias and offset as two more of their numbers."""
        query = self.query if self.scale == 1 else self.query * self.scale
        if self.bias is None and self.offset is None:
            return query, self.key
        fw = get_framework(self.query)
        query, key = [query], [self.key]
        if self.bias is not None:
            query.append(fw.full((*self.query.shape[:-1], 1), 1.0, self.query))
            key.append(self.bias)
        if self.offset is not None:
            query.append(self.offset)
            key.append(fw.full((*self.key.shape[:-1], 1), 1.0, self.key))
        return fw.xp.concat(query, axis=-1), fw.xp.concat(key, axis=-1)

    def compute_scores(self) -> Array:
        """s (…, n, m)"""
        s = get_framework(self.query).inner_products(*self.augmented_vectors())
        if self.gate_query is None or self.gate_key is None:
            return s
        fw = get_framework(s)
        return fw.sigmoid(self.gate_query + fw.xp.matrix_transpose(self.gate_key)) * s


class AffineForm(NamedTuple):
    """s = factor(k) φ(q)·k + bias(k) + offset(q), of keys that are known by their lengths; then
    cap · tanh(s / cap), if there is one; or φ(q)·k σ(a(q) + w·k), with `gate` = (a, w, a
    number that no sum on the way to a goes beyond).

    φ (n, d), factor and bias (m,), offset and a (n,), w (d,)."""

    query: Array
    key_factor: Array | None = None
    bias: Array | None = None
    offset: Array | None = None
    softcap: float | None = None
    gate: tuple[Array, Array, Array] | None = None


Lowering: TypeAlias = "tuple[Score, float] | str"
"""A score that has a `dot_product_form`, and a bound on its error; or why there is none."""


class Score(Record):
    """s = score(query, key): (…, n, d_q), (…, m, d_k) → (…, n, m).

    Every entry depends on its own pair alone, so any block of scores can be made by itself.
    Subclasses are frozen dataclasses; each array among their fields receives gradients.
    """

    is_nonnegative: ClassVar[bool] = False
    """Whether no score is ever below zero, so that scores can be weights as they are."""

    compares_keys: ClassVar[bool] = False
    """Whether a database compares the keys themselves, which need not be vectors."""

    needs_range: ClassVar[bool] = False
    """Whether `find_lowering` must look at the range of its arguments first."""

    number_fields: ClassVar[dict[str, bool]] = {}
    """Fields that are a number, above 0 unless the class says else, or an array of one for each
    batch; and whether it may be of one for each column too."""

    compares_elementwise: ClassVar[bool] = False
    """Whether a query and a key are compared number by number, all of which are held at once."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "__call__" in vars(cls):  # another formula: what its base says of its own is not so here
            for name in FORMULA_MEMBERS.difference(vars(cls)):
                setattr(cls, name, vars(Score)[name])

    def __post_init__(self) -> None:
        for name in self.number_fields:
            validate_positive(self, name)

    @property
    def is_linear(self) -> bool:
        """Whether s(q, c k) = c s(q, k) for any number c."""
        return False

    @property
    def is_radial(self) -> bool:
        """Whether s falls with ‖q − k‖₂ and hangs on nothing else."""
        return False

    @property
    def ranking_score(self) -> Score | None:
        """The same score, which still ranks the keys beyond its reach; None where it has none."""
        return None

    def __call__(self, query: Array, key: Array) -> Array:
        raise NotImplementedError("a score says how a query and a key are compared")

    def dot_product_form(self, query: Array, key: Array) -> DotProductForm:
        """The same as a dot product, for a score that is one."""
        raise NotImplementedError(f"{type(self).__name__} is no dot product")

    def find_lowering(
        self, query: Array, key: Array, tolerance: float | None, dtype: str
    ) -> Lowering:
        """A score that has a `dot_product_form`, as near to this one as asked, and a bound on its
        error.

        `tolerance` None asks for the accuracy of the caller's dtype. Or why there is none.
        """
        if type(self).dot_product_form is Score.dot_product_form:
            return f"{type(self).__name__} has no form as a dot product"
        return self, 0.0

    def key_terms(self, key: Array) -> Array | None:
        """What of each key (m, d) hangs on no query, (m,): whoever scores these keys again may keep
        it. None where there is nothing to keep, or digits would be lost."""
        return None

    def score_with_key_terms(self, query: Array, key: Array, aside: Array) -> Array:
        """The scores, with what was kept of the keys."""
        raise NotImplementedError(f"{type(self).__name__} keeps nothing of a key")

    def affine_form(self, query: Array, norm: Array) -> AffineForm | None:
        """The score as a product with the key itself, for keys of these lengths (m,) and beside
        arrays of NumPy's; None where it is none."""
        return None

    def dot_product_width(self, width: int) -> int:
        """Numbers in each vector of the form, for a query of this width."""
        return width

    def check_shapes(self, query: Shape, key: Shape) -> None:
        """Raise where arrays of these shapes cannot be compared."""
        if query[-1] != key[-1]:
            raise ShapeError(
                f"{type(self).__name__} compares vectors of one width: query has {query[-1]} "
                f"numbers a row and key {key[-1]}. Multiplicative and Additive take two widths."
            )
        for name, by_column in self.number_fields.items():
            check_number_field(self, name, query, query[-1] if by_column else 1)

    def numbers_per_pair(self, width: int) -> int:
        """Numbers held at once per pair, for vectors of this width: it sets the block size."""
        return max(width, 1) if self.compares_elementwise else 1


FORMULA_MEMBERS = {
    "affine_form",
    "key_terms",
    "score_with_key_terms",
    "ranking_score",
    "dot_product_form",
    "dot_product_width",
    "is_linear",
    "find_lowering",
}
FORMULA_MEMBERS |= {"is_radial", "needs_range"}
"""What a score says of its formula, or how it comes to the same in another way."""


def require_array_field(owner: Any, name: str, *axes: str) -> Shape:
    """The shape of an array field, refused unless it has these axes."""
    value = getattr(owner, name)
    if not is_array(value):
        step = ": pass its .weight" if hasattr(value, "weight") else ""
        raise DtypeError(
            f"{type(owner).__name__}: {name} must be an array ({', '.join(axes)}), "
            f"not {type(value).__name__}{step}"
        )
    shape = get_framework(value).static_shape(value)
    if len(shape) != len(axes):
        raise ShapeError(
            f"{type(owner).__name__}: {name} must be ({', '.join(axes)}), not of shape {shape}"
        )
    return shape


def sizes_differ(one: int | None, two: int | None) -> bool:
    """Whether two sizes are not the same; one that only a run will tell may be any."""
    return one is not None and two is not None and one != two


def check_number_field(owner: Any, name: str, query: Shape, columns: int = 1) -> None:
    """Refuse an array field unless it is one number, one for each of these columns, or (…, 1, 1)
    one for each batch of the query's: one for each row would have no meaning in a block of them."""
    value = getattr(owner, name)
    if value is None or isinstance(value, int | float):  # a graph's is not asked for more
        return
    shape = tuple(getattr(value, "shape", ()))
    row = zip(reversed(shape), (columns, 1), strict=False)
    lead = [
        pair for pair in zip(shape[-3::-1], query[-3::-1], strict=False) if sizes_differ(pair[1], 1)
    ]
    if any(sizes_differ(axis, 1) and sizes_differ(axis, size) for axis, size in (*row, *lead)):
        each = (
            f"of the {columns} columns, ({columns},), or of each batch" if columns != 1 else "batch"
        )
        batch = ", ".join(map(str, query[:-2])) or "…"
        raise ShapeError(
            f"{type(owner).__name__}: {name} has shape {shape}; expected a number, or one for each "
            f"{each}, ({batch}, 1, 1)"
        )


def check_equal_sizes(owner: Any, what: str, **sizes: int) -> None:
    """Refuse sizes that should be one size."""
    first, *others = sizes.values()
    if any(sizes_differ(size, first) for size in others):  # a size that is traced has no hash
        told = ", ".join(f"{name} has {size}" for name, size in sizes.items())
        raise ShapeError(f"{type(owner).__name__}: {what} must be one number, but {told}")


def broadcast_pairs(query: Array, key: Array) -> tuple[Array, Array]:
    """(…, n, 1, d) and (…, 1, m, d), ready to be compared number by number."""
    if len(query.shape) == len(key.shape) > 4 and query.shape[:-2] != key.shape[:-2]:
        # TensorFlow broadcasts no six axes of which now the one and now the other array has 1.
        fw, axes = get_framework(key), range(len(key.shape) - 2)
        lead = [fw.axis_length(query if key.shape[axis] == 1 else key, axis) for axis in axes]
        query, key = (
            fw.xp.broadcast_to(x, (*lead, *fw.dynamic_shape(x)[-2:])) for x in (query, key)
        )
    return query[..., None, :], key[..., None, :, :]


def resolve_inner_score(owner: Any) -> None:
    """Let the `score` field of a score be given by name or as a function too."""
    from qkv.scores import resolve

    object.__setattr__(owner, "score", resolve(owner.score))
