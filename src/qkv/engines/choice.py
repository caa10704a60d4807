"""The choice of an engine: the first one, in order of speed, that gives no reason against it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, Literal

from qkv.engines import (
    dense,
    linear,
    lowered,
    native,
    single_row,
    streaming,
    triton,
    weights,
    whole_matrix,
)
from qkv.engines.call import Call
from qkv.engines.gaussian_pruning import engine as near
from qkv.errors import EngineError, unknown_name_error
from qkv.frameworks.tree import format_record
from qkv.util.logging import debug_logger
from qkv.util.types import Array

ENGINES: tuple[ModuleType, ...] = (
    single_row,
    weights,
    native,
    linear,
    near,
    triton,
    lowered,
    streaming,
    dense,
)
WEIGHTS_ENGINES = (single_row, weights)
"""The engines that return weights themselves."""
ENGINES_BY_NAME = {engine.NAME: engine for engine in ENGINES}
EngineName = Literal[
    "single_row",
    "weights",
    "native",
    "linear",
    "near",
    "triton",
    "lowered",
    "streaming",
    "dense",
]


@dataclass(frozen=True)
class EngineChoice:
    """The engine for a call, and the reasons against the engines before it."""

    engine: ModuleType
    refusals: tuple[tuple[str, str], ...]

    def run(self, call: Call) -> tuple[Array | None, Array | None, Array | None]:
        return self.add_weights(call, self.engine.run(call))

    def build_runner(self, call: Call) -> Callable[[Call], Any]:
        """Return `run` for later calls with this signature.

        The returned function may return None. Then the caller must choose an engine again.
        """
        # A caller who names an engine gets its own computation.
        run: Any = whole_matrix.build_whole_runner(call, self.engine) if self.refusals else None
        if run is None:
            run = (
                self.engine.build_runner(call)
                if hasattr(self.engine, "build_runner")
                else self.engine.run
            )
        if not call.wants_weights:
            return run  # type: ignore[no-any-return]

        def run_with_weights(call: Call) -> Any:
            results = run(call)
            return None if results is None else self.add_weights(call, results)

        return run_with_weights

    def build_direct_runner(self, call: Call) -> Any:
        """Return the engine as a function of `attend`'s arguments; None if it has no such form."""
        returns_all = not call.wants_weights or self.engine in WEIGHTS_ENGINES
        return (
            self.engine.build_direct_runner(call)
            if returns_all and hasattr(self.engine, "build_direct_runner")
            else None
        )

    def build_replay_runner(self, call: Call) -> Any:
        """Return a function that replays calls with a mask, a function or a gradient, or None.

        It takes query, key, value, score and mask, and a function that builds the call.
        """
        build = getattr(self.engine, "build_replay_runner", None)
        return None if build is None or call.wants_weights else build(call)

    def add_weights(
        self, call: Call, results: tuple[Array | None, Array | None, Array | None]
    ) -> tuple[Array | None, Array | None, Array | None]:
        """Return the results with weights, for an engine that does not compute them."""
        if not call.wants_weights or self.engine in WEIGHTS_ENGINES:
            return results
        weights_only = replace(call, value=None, wants_lse=False)
        return *results[:2], weights.run(weights_only)[2]


def choose_engine(call: Call, name: str | None = None) -> EngineChoice:
    """Return the engine for a call. A name selects one, even if another is faster.

    Raise EngineError if the named engine does not support the call.
    """
    if name is not None:
        if not isinstance(name, str) or name not in ENGINES_BY_NAME:
            raise unknown_name_error("engine", name, ENGINES_BY_NAME)
        reason = _precision_refusal(ENGINES_BY_NAME[name], call) or ENGINES_BY_NAME[
            name
        ].unsupported_reason(call)
        if reason:
            raise EngineError(f"engine {name!r} does not support this call: {reason}")
        return EngineChoice(ENGINES_BY_NAME[name], ())
    refusals: list[tuple[str, str]] = []
    for engine in ENGINES:
        reason = _precision_refusal(engine, call)
        reason = reason or (
            engine.shape_based_reason(call) if hasattr(engine, "shape_based_reason") else None
        )
        reason = reason or engine.unsupported_reason(call) or engine.slower_reason(call)
        if not reason:
            choice = EngineChoice(engine, tuple(refusals))
            _log_choice(call, choice)
            return choice
        refusals.append((engine.NAME, reason))
    raise EngineError("no engine supports this call: " + "; ".join(r for _, r in refusals))


def _precision_refusal(engine: ModuleType, call: Call) -> str | None:
    if call.may_exceed_float64 and not hasattr(engine, "CHECKS_OVERFLOW"):
        return (
            f"the scores of {format_record(call.score)} may overflow float64, and this engine does "
            "not check that"
        )
    if hasattr(engine, "UPCASTS") or not call.exceeds_float32:
        return None
    return (
        f"the scores of {format_record(call.score)} may overflow float32, and this engine does not "
        "compute in float64"
    )


def _log_choice(call: Call, choice: EngineChoice) -> None:
    # Compiled graphs contain no logging.
    log = None if call.fw.is_traced(call.query) else debug_logger()
    if log is not None:
        chosen = (
            f"engine {choice.engine.NAME} for {format_record(call.score)}, "
            f"{format_record(call.weighting)}"
        )
        log.debug("; ".join([chosen, *(f"not {name}: {why}" for name, why in choice.refusals)]))


@dataclass(frozen=True)
class Explanation:
    """The result of `explain`. Print the object to read which engine runs and why."""

    engine: str
    refusals: tuple[tuple[str, str], ...]
    call: Call
    detail: str
    is_plan_cached: bool = False
    pending_compilation: str | None = None

    @property
    def flops(self) -> float | None:
        """Floating-point operations of the forward pass, in blocks that the mask does not exclude.

        None if a length is unknown.
        """
        if not self._has_known_shapes:
            return None
        call = self.call
        pairs = call.n * call.m
        if call.rule is not None:
            tiling = streaming.build_tiling(call, *streaming.block_size(call))
            pairs = sum(rows.size * span.size for rows, keys in tiling for span in keys)
        each = call.fw.static_shape(call.query)[-1] * 2 + streaming.numbers_per_pair(call) * 4 + 4
        each += 0 if call.value is None else call.fw.static_shape(call.value)[-1] * 2
        return float(math.prod(call.lead) * pairs * each)

    @property
    def bytes(self) -> float | None:
        """Bytes of the arguments and the output; None if a length is unknown."""
        if not self._has_known_shapes:
            return None
        call = self.call
        arrays = [x for x in (call.query, call.key, call.value) if x is not None]
        numbers = sum(math.prod(call.fw.static_shape(x)) for x in arrays)
        width = call.m if call.value is None else call.fw.static_shape(call.value)[-1]
        numbers += math.prod(call.lead) * call.n * width
        size = {"float64": 8, "float32": 4}.get(call.fw.dtype_name(call.query), 2)
        return float(numbers * size)

    @property
    def _has_known_shapes(self) -> bool:
        shapes = (
            *self.call.fw.static_shape(self.call.query),
            *self.call.fw.static_shape(self.call.key),
        )
        return None not in shapes

    def __repr__(self) -> str:
        call = self.call
        shape = (*call.lead, call.n, call.m)
        formula = f"{format_record(call.score)} → {format_record(call.weighting)}"
        formula += "" if call.rule is None else f" with mask {call.rule}"
        formula += f", scores {shape}, {call.fw.dtype_name(call.query)} on {call.fw.name}"
        lines = [f"engine: {self.engine} ({self.detail})", f"call:   {formula}"]
        if self.flops is not None and self.bytes is not None:
            work = f"{_format_si(self.flops)}FLOP forward, {_format_si(self.bytes)}B in and out"
            lines.append(f"work:   about {work}")
        if self.is_plan_cached:
            lines.append("plan:   cached by an earlier call with the same signature")
        if self.pending_compilation is not None:
            lines.append(f"kernels: {self.pending_compilation}")
        lines += [f"not {name}: {reason}" for name, reason in self.refusals]
        return "\n".join(lines)


@dataclass(frozen=True)
class WarmupReport:
    """The result of `warm`: the engine of later calls, and the kernels that were compiled."""

    engine: str
    compiled: tuple[str, ...]
    seconds: float
    is_plan_cached: bool

    def __repr__(self) -> str:
        lines = [
            f"engine: {self.engine}",
            f"plan:   {'cached' if self.is_plan_cached else 'not cached'}",
        ]
        if not self.compiled:
            return "\n".join([*lines, "nothing to compile"])
        lines.append(f"compiled in {self.seconds:.1f} s:")
        return "\n".join([*lines, *(f"  {name}" for name in self.compiled)])


def _format_si(number: float) -> str:
    for size, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g} {prefix}"
    return f"{number:.0f} "
