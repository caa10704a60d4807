"""`PairFunctions`: the rule and the score function of a call as Triton functions."""

from __future__ import annotations

import linecache
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from qkv.engines.call import Call
from qkv.engines.triton.launching.joined_arrays import join_flat
from qkv.engines.triton.pair_functions.expressions import (
    MAX_NUMBERS,
    CapturedTensor,
    Expressions,
    TranslationError,
    Value,
)
from qkv.engines.triton.pair_functions.rules import RuleTranslator
from qkv.engines.triton.pair_functions.signatures import MaskSignatureBuilder, NoSignatureError
from qkv.engines.triton.pair_functions.trace import trace_function
from qkv.engines.triton.tile_functions.score_tile import fast_tanh
from qkv.engines.triton.tile_functions.tiles import float_position, gather
from qkv.masks import Mask
from qkv.util.caches import create_table, insert_bounded, memoize

PAIR_PARAMETERS = "b, h, i, j, given, z, F"
"""Parameters of every function: batch, head, positions, kernel arguments, compile-time constants.
"""


class CapturedGradient(NamedTuple):
    """A captured number that is learned: its functions and what its index depends on.

    `gradient_function` names the function that returns its part of a score's gradient, and
    `index_function` the one that returns its place in `captured_floats`.
    """

    gradient_function: str
    index_function: str
    positions: frozenset[str]
    by_distance: bool


@dataclass(frozen=True)
class PairFunctions:
    """Triton functions of one pair, equal if their source is equal.

    - rule: the name of the function that says whether the pair counts; None: all do.
    - modify, gradient: the names of score_mod and of its vjp; None: there is no score_mod.
    - rule_positions: the positions among b, h, q and k that the rule depends on.
    - captured: the captured numbers that are learned.
    """

    source: str
    rule: str | None = field(compare=False)
    modify: str | None = field(compare=False)
    gradient: str | None = field(compare=False)
    rule_positions: frozenset[str] = field(compare=False)
    captured: tuple[CapturedGradient, ...] = field(compare=False)

    def __repr__(self) -> str:
        return f"PairFunctions({_source_name(self.source)})"

    def function(self, name: str | None) -> Any:
        return None if name is None else _compile_source(self.source)[name]


class CapturedArrays(NamedTuple):
    """The captured tensors of a call, packed, and what the kernels know as `z.c0 …`."""

    floats: Tensor | None = None
    integers: Tensor | None = None
    numbers: tuple[int, ...] = (0,) * MAX_NUMBERS


class Translation(NamedTuple):
    """A cached translation: its functions, or the reason why there are none.

    - tensors: which of the tensors that the signature collected it captures, in order.
    - numbers: those of `Expressions`.
    """

    functions: PairFunctions | None
    tensors: tuple[int, ...] = ()
    numbers: tuple[tuple[str, int, int], ...] = ()
    error: str = ""


_TRANSLATIONS: dict[Any, Translation] = create_table("triton.translations")
MAX_CACHED_TRANSLATIONS = 256


def translate_call(
    call: Call, rules: Sequence[Mask], score_mods: Sequence[Callable[..., Any]],
    temperature: Tensor | None = None,
) -> tuple[PairFunctions, CapturedArrays]:  # fmt: skip
    """Return the functions of these rules and score_mods, and the tensors that they capture.

    Raise TranslationError if one of them has no translation. Translations are cached by the
    signatures of the functions, and read the tensors of the current call.
    """
    builder = MaskSignatureBuilder(lambda x: call.fw.cached_constant(x, call.query, "bool"))
    try:
        signature: Any = (
            builder.build((tuple(rules), tuple(score_mods), temperature)),
            len(call.lead), call.lead[1:-1], call.query.device, torch.is_grad_enabled(),
        )  # fmt: skip
    except NoSignatureError:
        signature = None
    known = None if signature is None else _TRANSLATIONS.get(signature)
    if known is None:
        known, tensors = _translate(call, rules, score_mods, temperature)
        places = {id(x): i for i, x in enumerate(builder.tensors)}
        if signature is not None and all(id(x) in places for x in tensors):
            cached = known._replace(tensors=tuple(places[id(x)] for x in tensors))
            insert_bounded(_TRANSLATIONS, signature, cached, MAX_CACHED_TRANSLATIONS)
    else:
        tensors = [builder.tensors[i] for i in known.tensors]
    if known.functions is None:
        raise TranslationError(known.error)
    return known.functions, _pack_captured(tensors, known.numbers)


def _translate(
    call: Call, rules: Sequence[Mask], score_mods: Sequence[Callable[..., Any]],
    temperature: Tensor | None,
) -> tuple[Translation, list[Tensor]]:  # fmt: skip
    """Return the translation, and the tensors that it captures."""
    made = Expressions()
    try:
        functions = _translate_functions(call, rules, score_mods, temperature, made)
    except TranslationError as error:
        return Translation(None, error=str(error)), []
    return Translation(functions, (), tuple(made.numbers)), [x.tensor for x in made.tensors]


def _translate_functions(
    call: Call, rules: Sequence[Mask], score_mods: Sequence[Callable[..., Any]],
    temperature: Tensor | None, made: Expressions,
) -> PairFunctions:  # fmt: skip
    translator = RuleTranslator(call, made)
    allowed: Value | None = None
    for rule in rules:
        new = translator.translate(rule)
        allowed = new if allowed is None else made.logical("&", allowed, new)
    rule_loads, score = len(made.loads), made.score()
    for score_mod in score_mods:
        inputs = [score, *translator.positions.values()]
        score = made.cast(trace_function(score_mod, made, inputs, call.query.device), "float")
    if temperature is not None:
        score = made.divide(score, translator.load_per_row_of_head(temperature))
    del made.loads[:rule_loads]
    return _build_functions(made, allowed, score if score_mods else None)


def _build_functions(
    made: Expressions, allowed: Value | None, score: Value | None
) -> PairFunctions:
    parts: dict[str, tuple[str, Value, str]] = {}
    if allowed is not None:
        parts["allow_pair"] = PAIR_PARAMETERS, allowed, ""
    captured = []
    if score is not None:
        parts["modify_score"] = f"s, {PAIR_PARAMETERS}", score, "s"
        along = Value("g", "float")
        wanted = [made.score(), *(x.value for x in made.loads)]
        for i, x in enumerate(made.derivatives(score, along, wanted)):
            name = "score_gradient" if i == 0 else f"captured_gradient_{i - 1}"
            parts[name] = f"g, s, {PAIR_PARAMETERS}", x, "g"
        for i, load in enumerate(made.loads):
            index = _flat_index(made, load)
            parts[f"captured_index_{i}"] = PAIR_PARAMETERS, index, ""
            captured.append((i, index))
    own = [made.function_source(x, *part) for x, part in parts.items()]
    name = _source_name("\n".join([*made.distance_sources(), *own]))
    sources = made.distance_sources()
    sources += [made.function_source(f"{x}_{name}", *part) for x, part in parts.items()]
    given = {x: f"{x}_{name}" if x in parts else None for x in (
        "allow_pair", "modify_score", "score_gradient"
    )}  # fmt: skip
    return PairFunctions(
        "\n\n".join(sources), given["allow_pair"], given["modify_score"], given["score_gradient"],
        frozenset() if allowed is None else allowed.positions,
        tuple(
            CapturedGradient(
                f"captured_gradient_{i}_{name}", f"captured_index_{i}_{name}", index.positions,
                index.by_distance,
            )
            for i, index in captured
        ),
    )  # fmt: skip


def _flat_index(made: Expressions, load: Any) -> Value:
    """Return the place of a load in the packed array."""
    at = load.value.operands[0] if load.value.operands else made.constant(0)
    offset = next(x.offset for x in made.tensors if x.tensor is load.tensor)
    if offset is None:
        return at
    return made.operate("({0} + {1})", "int", at, Value(f"z.{offset}", "int"))


def _pack_captured(
    tensors: Sequence[Tensor], numbers: Sequence[tuple[str, int, int]]
) -> CapturedArrays:
    packed: list[Tensor | None] = []
    offsets: dict[int, int] = {}
    for is_float in (True, False):
        some = [(i, x) for i, x in enumerate(tensors) if x.is_floating_point() == is_float]
        first = 0
        for i, x in some:
            offsets[i] = first
            first += x.numel()
        packed.append(join_flat([x for _, x in some]))
    found = []
    for what, which, axis in numbers:
        if what == "length":
            found.append(tensors[which].shape[axis])
        else:
            found.append(offsets[which] if what == "offset" else which)
    floats, integers = packed
    return CapturedArrays(floats, integers, (*found, *[0] * (MAX_NUMBERS - len(found))))


def _source_name(source: str) -> str:
    return sha256(source.encode()).hexdigest()[:16]


@memoize("triton.pair_functions", 1024)
def _compile_source(source: str) -> dict[str, Any]:
    """Return the functions of a source by name.

    Triton reads the source of a function from its file: `linecache` serves it without one.
    """
    path = f"<qkv pair functions {_source_name(source)}>"
    linecache.cache[path] = (len(source), None, source.splitlines(keepends=True), path)
    found: dict[str, Any] = {"triton": triton, "tl": tl, "fast_tanh": fast_tanh, "gather": gather}
    found |= {"float_position": float_position, "__name__": __name__}
    exec(compile(source, path, "exec"), found)
    return found


__all__ = ["CapturedArrays", "CapturedTensor", "PairFunctions", "TranslationError"]
