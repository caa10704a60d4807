"""The base class of scores, and the forms in which fast engines compute a score."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple, TypeAlias

from qkv.errors import DtypeError, ShapeError, validate_positive
from qkv.frameworks import get_framework, is_array
from qkv.frameworks.tree import Record
from qkv.util.types import Array, Shape


class DotProductForm(NamedTuple):
    """s = (scale φ·ψ + bias + offset) σ(gate_query + gate_key): the form that fast engines compute.

    Shapes: query φ (…, n, w), key ψ (…, m, w), bias (…, m, 1), offset (…, n, 1),
    gate_query (…, n, 1), gate_key (…, m, 1). If adding a constant to a row of scores does not
    change the weights, engines may leave out the offset.
    """

    query: Array
    key: Array
    bias: Array | None = None
    offset: Array | None = None
    gate_query: Array | None = None
    gate_key: Array | None = None
    scale: float = 1.0

    def augmented_vectors(self) -> tuple[Array, Array]:
        """Return φ and ψ with the scale in φ, and bias and offset as two further columns."""
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
        """Return the scores s (…, n, m)."""
        s = get_framework(self.query).inner_products(*self.augmented_vectors())
        if self.gate_query is None or self.gate_key is None:
            return s
        fw = get_framework(s)
        return fw.sigmoid(self.gate_query + fw.xp.matrix_transpose(self.gate_key)) * s


class AffineForm(NamedTuple):
    """The score as an affine function of the key, for error bounds over quantized keys.

    s = key_factor(k) φ(q)·k + bias(k) + offset(q), then softcap · tanh(s / softcap) if a softcap is
    set. With `gate` = (a, w, bound): s = φ(q)·k σ(a(q) + w·k), where `bound` limits every partial
    sum of a. Factor and bias depend on the key only through its norm.

    Shapes: φ (n, d), factor and bias (m,), offset and a (n,), w (d,).
    """

    query: Array
    key_factor: Array | None = None
    bias: Array | None = None
    offset: Array | None = None
    softcap: float | None = None
    gate: tuple[Array, Array, Array] | None = None


Lowering: TypeAlias = "tuple[Score, float] | str"
"""A score with a `dot_product_form` and a bound on its error; or the reason why there is none."""


class Score(Record):
    """s = score(query, key): (…, n, d_q), (…, m, d_k) → (…, n, m).

    Entry (i, j) depends only on query i and key j, so any block of scores can be computed
    separately. Subclasses are frozen dataclasses. Each array field receives gradients.

    A subclass of a concrete score may override `__call__` with another formula. Then it must also
    define the `FORMULA_MEMBERS` that it would inherit, since they describe the formula of its base
    class. Or it resets them: `class Mine(Dot, new_formula=True)`.
    """

    is_nonnegative: ClassVar[bool] = False
    """Whether no score is negative, so that scores can be used as weights."""

    compares_keys: ClassVar[bool] = False
    """Whether a database compares the keys themselves and not their vectors."""

    needs_range: ClassVar[bool] = False
    """Whether `find_lowering` reads the values of its arguments."""

    number_fields: ClassVar[dict[str, bool]] = {}
    """Fields that hold one number, or an array with one number for each batch. The value of the
    dict says whether one number for each column is allowed too. All numbers must be positive."""

    compares_elementwise: ClassVar[bool] = False
    """Whether `__call__` builds an array (…, n, m, d), such as the differences of all vectors."""

    needs_positions: ClassVar[bool] = False
    """Whether the score depends on the positions of query and key, by `score_block`."""

    uses_sum_differences: ClassVar[bool] = False
    """Whether `Framework.sum_differences` can spare it that array."""

    def __init_subclass__(cls, *, new_formula: bool = False, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "__call__" not in vars(cls):
            return
        inherited = [
            name
            for name in sorted(FORMULA_MEMBERS.difference(vars(cls)))
            if getattr(cls, name) is not getattr(Score, name)
        ]
        if new_formula:
            for name in inherited:
                setattr(cls, name, vars(Score)[name])
        elif inherited:
            raise DtypeError(
                f"{cls.__name__} overrides __call__ but inherits {', '.join(inherited)}, which "
                f"describe the formula of {cls.__mro__[1].__name__}: define them too, or write "
                f"class {cls.__name__}({cls.__mro__[1].__name__}, new_formula=True) to reset them"
            )

    def __post_init__(self) -> None:
        for name in self.number_fields:
            validate_positive(self, name)

    @property
    def is_linear(self) -> bool:
        """Whether s(q, c k) = c s(q, k) for any number c."""
        return False

    @property
    def is_radial(self) -> bool:
        """Whether s is a decreasing function of ‖q − k‖₂ only."""
        return False

    @property
    def ranking_score(self) -> Score | None:
        """A score with the same ranking that also ranks keys of score 0; None: this one does."""
        return None

    def __call__(self, query: Array, key: Array) -> Array:
        raise NotImplementedError(f"{type(self).__name__} does not define __call__(query, key)")

    def dot_product_form(self, query: Array, key: Array) -> DotProductForm:
        """Return the score in dot product form."""
        raise NotImplementedError(f"{type(self).__name__} has no dot product form")

    def find_lowering(
        self, query: Array, key: Array, tolerance: float | None, dtype: str
    ) -> Lowering:
        """Return a score with a `dot_product_form` and a bound on its error, or why there is none.

        The error of a score is at most `tolerance`. If that is None, the score is as accurate as
        `dtype`, the dtype of the caller's arrays.
        """
        if type(self).dot_product_form is Score.dot_product_form:
            return f"{type(self).__name__} has no dot product form"
        return self, 0.0

    def adapt_to_keys(self, sample: Array) -> Score:
        """Return a score with the same numbers that is faster for many keys like this sample.

        It may have `key_terms`. By default, it is the score itself.
        """
        return self

    @property
    def key_terms_signature(self) -> Any:
        """What the `key_terms` depend on besides the class and the keys."""
        return None

    def key_terms(self, key: Array) -> Array | None:
        """Return a term (m,) of each key (m, d) that callers may cache between queries.

        None if there is no such term, or if using it would lose precision.
        """
        return None

    def score_with_key_terms(self, query: Array, key: Array, terms: Array) -> Array:
        """Return the scores, given the `key_terms` of the keys."""
        raise NotImplementedError(f"{type(self).__name__} has no key terms")

    def affine_form(self, query: Array, norm: Array) -> AffineForm | None:
        """Return the affine form for keys with these norms (m,), in NumPy; None: there is none."""
        return None

    def dot_product_width(self, width: int) -> int:
        """Return the width of the vectors in the dot product form, for queries of this width."""
        return width

    def check_shapes(self, query: Shape, key: Shape) -> None:
        """Raise ShapeError if arrays of these shapes cannot be compared."""
        if query[-1] != key[-1]:
            raise ShapeError(
                f"{type(self).__name__} needs query and key of the same width, but query has "
                f"{query[-1]} columns and key {key[-1]}: project one of them, or use "
                "Multiplicative or Additive, which accept two widths"
            )
        for name, by_column in self.number_fields.items():
            check_number_field(self, name, query, query[-1] if by_column else 1)

    def numbers_per_pair(self, width: int) -> int:
        """Return how many numbers a pair needs in memory; engines derive the block size from it."""
        return max(width, 1) if self.compares_elementwise else 1


FORMULA_MEMBERS = {
    "adapt_to_keys",
    "affine_form",
    "key_terms",
    "score_with_key_terms",
    "ranking_score",
    "dot_product_form",
    "dot_product_width",
    "is_linear",
    "find_lowering",
    "is_radial",
    "needs_range",
}
"""Members that describe the formula of `__call__`, or compute the same in another way."""


def require_array_field(owner: Any, name: str, *axes: str) -> Shape:
    """Check that a field is an array with these axes, and return its shape."""
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
    """Return whether two sizes differ. None, a size unknown until a graph runs, equals any."""
    return one is not None and two is not None and one != two


def check_number_field(owner: Any, name: str, query: Shape, columns: int = 1) -> None:
    """Check that a field holds one number, one for each column, or (…, 1, 1) one for each batch.

    One number for each row is an error, because a block would not know which numbers are its own.
    """
    value = getattr(owner, name)
    if value is None or isinstance(value, int | float):
        return
    shape = tuple(getattr(value, "shape", ()))
    row = zip(reversed(shape), (columns, 1), strict=False)
    lead = [
        pair for pair in zip(shape[-3::-1], query[-3::-1], strict=False) if sizes_differ(pair[1], 1)
    ]
    if any(sizes_differ(axis, 1) and sizes_differ(axis, size) for axis, size in (*row, *lead)):
        each = (
            f"of the {columns} columns, ({columns},), or for each batch"
            if columns != 1
            else "batch"
        )
        batch = ", ".join(map(str, query[:-2])) or "…"
        raise ShapeError(
            f"{type(owner).__name__}: {name} has shape {shape}; expected a number, or one for each "
            f"{each}, ({batch}, 1, 1)"
        )


def check_equal_sizes(owner: Any, what: str, **sizes: int) -> None:
    """Raise ShapeError if the sizes are not all equal. `what` describes them in the message."""
    first, *others = sizes.values()
    if any(sizes_differ(size, first) for size in others):  # no set: a traced size has no hash
        listed = ", ".join(f"{name} has {size}" for name, size in sizes.items())
        raise ShapeError(f"{type(owner).__name__}: {what} must be equal, but {listed}")


def broadcast_pairs(query: Array, key: Array) -> tuple[Array, Array]:
    """Return query (…, n, 1, d) and key (…, 1, m, d), which broadcast to (…, n, m, d)."""
    if len(query.shape) == len(key.shape) > 4 and query.shape[:-2] != key.shape[:-2]:
        # TensorFlow cannot broadcast both arrays, on different axes, when there are six axes.
        fw, axes = get_framework(key), range(len(key.shape) - 2)
        lead = [fw.axis_length(query if key.shape[axis] == 1 else key, axis) for axis in axes]
        query, key = (
            fw.xp.broadcast_to(x, (*lead, *fw.dynamic_shape(x)[-2:])) for x in (query, key)
        )
    return query[..., None, :], key[..., None, :, :]
