"""`import qkv` loads NumPy and nothing heavier, and shows its public names all the same."""

import json
import resource
import subprocess
import sys

import pytest

import qkv

HEAVY = [
    "anywidget",
    "datasets",
    "duckdb",
    "haystack",
    "jax",
    "keras",
    "langchain_core",
    "llama_index",
    "matplotlib",
    "mxnet",
    "onnx",
    "pandas",
    "prometheus_client",
    "ray",
    "safetensors",
    "scipy",
    "starlette",
    "tensorflow",
    "torch",
    "transformers",
    "typer",
    "uvicorn",
]


def python(code: str) -> str:
    """What a fresh interpreter prints; this one has long imported everything."""
    return subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout


def seconds(code: str) -> float:
    """What an interpreter takes of a processor, whoever else keeps it busy."""

    def spent() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    def once() -> float:
        start = spent()
        python(code)
        return spent() - start

    return min(once() for _ in range(3))


def test_import_loads_numpy_and_nothing_heavier() -> None:
    loaded = json.loads(python("import sys, json, qkv; print(json.dumps(list(sys.modules)))"))
    roots = {name.partition(".")[0] for name in loaded}
    assert roots.isdisjoint(HEAVY), sorted(roots.intersection(HEAVY))


def test_the_command_loads_nothing_before_it_minds_an_interrupt() -> None:
    code = "import sys; old = {*sys.modules}; import qkv.__main__; print({*sys.modules} - old)"
    assert eval(python(code)) <= {"__future__", "gc", "qkv", "qkv.__main__"}


def test_layers_load_no_compiler() -> None:
    pytest.importorskip("torch")
    code = "import sys, qkv.nn; print('torch._dynamo' in sys.modules)"
    assert python(code) == "False\n"


def test_import_is_silent() -> None:
    assert python("import warnings; warnings.simplefilter('error'); import qkv") == ""


def test_import_is_quick() -> None:
    # Generous, for a busy machine: the real figure is measured in bench/.
    assert seconds("import qkv") - seconds("pass") < 1.5


def test_dir_lists_the_public_names() -> None:
    # In a fresh interpreter: here, tests may have loaded what was still lazy.
    listed = json.loads(python("import json, qkv; print(json.dumps(dir(qkv)))"))
    assert set(qkv.__all__) <= set(listed)
    assert {"attend", "weights", "explain", "scaled_dot_product_attention"} <= set(listed)


def test_who_looks_at_every_name_loads_no_framework() -> None:
    look = "import inspect, json, sys, qkv; inspect.getmembers(qkv)"
    loaded = set(json.loads(python(f"{look}; print(json.dumps([*sys.modules]))")))
    assert not {"torch", "tensorflow", "keras", "jax", "transformers"} & loaded


def test_every_public_name_resolves() -> None:
    assert len(qkv.__all__) == len(set(qkv.__all__))
    for name in qkv.__all__:
        getattr(qkv, name)


def test_star_import_gives_the_public_names() -> None:
    namespace: dict[str, object] = {}
    exec("from qkv import *", namespace)
    assert set(qkv.__all__) <= namespace.keys()
