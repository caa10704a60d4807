"""Build the kernels of random calls as far as Triton checks their types, without a GPU.

python -m bench.typed [CALLS] [SEED] [EACH]

The interpreter runs a kernel as Python and accepts what the compiler refuses: a local whose type
changes in a loop, for example. The calls are drawn as in `bench.fuzz`; EACH is the number of
kernels of one name that are built. The exit code is 1 if a kernel is refused.
"""

from __future__ import annotations

import sys
from collections import Counter
from random import Random
from typing import Any

import triton
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from bench import fuzz
from qkv.engines import triton as engine
from qkv.engines.triton.launching import launch
from qkv.engines.validation import build_call
from qkv.errors import QkvError

HOPPER = GPUTarget("cuda", 90, 32)


class Driver:
    """The driver of a Hopper GPU that is not there."""

    launcher_cls = staticmethod(lambda src, metadata: None)
    get_current_device = get_current_stream = staticmethod(lambda *args: 0)
    get_current_target = staticmethod(lambda: HOPPER)


class Built:
    """What stands for a compiled kernel: its text in Triton's first language."""

    def __init__(self, text: str) -> None:
        self.text = text


def build(src: Any, target: Any, options: dict[str, Any], **_: Any) -> Built:
    """Build Triton's intermediate code of a kernel, which checks every type."""
    backend = triton.compiler.make_backend(target)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    parsed = backend.parse_options(options)
    made = src.make_ir(
        target,
        parsed,
        backend.get_codegen_implementation(parsed),
        backend.get_module_map(),
        context,
    )
    return Built(str(made))


def find_kernels(drawn: fuzz.Drawn) -> dict[Any, Any]:
    """Return the jobs that compile the kernels of a call and of its gradients."""
    given = {name: x.detach().requires_grad_() for name, x in drawn.arrays.items()}
    options = drawn.how(given)
    call = build_call(
        given["query"], given["key"], given["value"], options["score"], options["weighting"],
        options.get("mask"), options.get("dropout_p", 0.0), options.get("seed"), None,
    )  # fmt: skip
    return engine.find_missing_kernels(call)


def build_kernel(job: Any) -> None:
    """Build one kernel of `find_missing_kernels`."""
    kernel, grid, inputs, named, _ = job.args
    first = inputs[0]
    if isinstance(first, tuple):
        first = type(first)(*map(triton.MockTensor.wrap_dtype, first))
    kernel.warmup(first, *inputs[1:], grid=grid, **named)


def main(calls: int = 500, seed: int = 0, each: int = 1_000_000) -> int:
    """Build the kernels of so many calls, at most `each` of one name; return the exit code."""
    triton.runtime.driver.set_active(Driver())
    launch.has_tma = lambda device: True
    launch.count_processors = lambda device: 132  # of an H200
    # Each kernel sets its own compiler when it is first launched; this one stays.
    JITFunction.compile = property(lambda self: build, lambda self, value: None)
    random, seen = Random(seed), set()
    names: Counter[str] = Counter()
    wrong = 0
    for _ in range(calls):
        drawn = fuzz.draw(random, random, "cpu", False)
        try:
            jobs = find_kernels(drawn)
        except QkvError:  # some drawn calls are invalid
            continue
        for key, job in jobs.items():
            if key in seen or names[key.name] == each:
                continue
            seen.add(key)
            names[key.name] += 1
            try:
                build_kernel(job)
            except Exception as error:
                wrong += 1
                print(f"{key.name}: {drawn.description}\n{error}\n", flush=True)
    for name, count in sorted(names.items()):
        print(f"{name:30} {count}")
    print(f"{sum(names.values())} kernels built, {wrong} refused")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
