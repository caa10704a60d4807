"""Wheel and sdist: built, installed with only the base dependencies, and queried."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import venv
from collections.abc import Iterator
from importlib.metadata import Distribution, distribution
from pathlib import Path
from zipfile import ZipFile

import pytest

pytest.importorskip("hatchling")

ROOT = Path(__file__).resolve().parent.parent
NEEDED = [
    *("Makefile", "pyproject.toml", "constraints.txt", "constraints-mxnet.txt", "CHANGELOG.md"),
    *("src/qkv/page/static/qkv.js", "src/qkv/py.typed", "frontend/package.json", "LICENSE"),
    *(
        "tools/run_checks.py",
        "bench/__main__.py",
        "tests/test_package.py",
        "examples/data/books.csv",
    ),
    *("docs/database.md", "ARCHITECTURE.md", "README.md"),
]


def run(*command: object, cwd: Path) -> str:
    ran = subprocess.run(list(map(str, command)), capture_output=True, text=True, cwd=cwd)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def build_distribution(what: str, source: Path, to: Path) -> Path:
    run(sys.executable, "-m", "hatchling", "build", "-t", what, "-d", to, cwd=source)
    (made,) = to.glob("*.whl" if what == "wheel" else "*.tar.gz")
    return made


def requirements(lines: list[str] | None, seen: set[str]) -> Iterator[Distribution]:
    """What is required without any extra, and what that requires; each once."""
    for line in lines or ():
        name = re.match(r"[\w.-]+", line)
        if name is None or name[0].lower() in seen or ";" in line:
            continue
        seen.add(name[0].lower())
        result = distribution(name[0])
        yield result
        yield from requirements(result.requires, seen)


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist, built and unpacked."""
    folder = tmp_path_factory.mktemp("sdist")
    with tarfile.open(build_distribution("sdist", ROOT, folder / "dist")) as archive:
        archive.extractall(folder, filter="data")
    (result,) = folder.glob("qkv-*")
    return result


def test_the_sdist_holds_what_make_test_needs(unpacked):
    assert [name for name in NEEDED if not (unpacked / name).is_file()] == []
    assert not (unpacked / "frontend" / "node_modules").exists()


def test_the_wheel_of_the_sdist_is_installed_and_asked(unpacked, tmp_path):
    wheel = build_distribution("wheel", unpacked, tmp_path / "dist")
    with ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata_file,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        lines = archive.read(metadata_file).decode().splitlines()
    assert "qkv/page/static/qkv.js" in names and "qkv/py.typed" in names
    assert {name.partition("/")[0] for name in names} == {"qkv", metadata_file.partition("/")[0]}

    venv.create(tmp_path / "env", symlinks=os.name != "nt")
    python = tmp_path / "env" / "bin" / "python"
    (site,) = (tmp_path / "env" / "lib").glob("python*/site-packages")
    required = [x.removeprefix("Requires-Dist: ") for x in lines if x.startswith("Requires-Dist: ")]
    for package in requirements(required, set()):
        for part in {file.parts[0] for file in package.files or ()} - {"..", "__pycache__"}:
            (site / part).symlink_to(package.locate_file(part))
    pip = (sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check")
    run(*pip, "install", "--quiet", "--no-deps", "--no-index", "--no-compile", wheel, cwd=tmp_path)

    ask = "import qkv; print(qkv.__file__, qkv.Database({'Li': 'Mu', 'Hu': 'Jo'}).ask('Lee').value)"
    assert run(python, "-I", "-c", ask, cwd=tmp_path).split() == [
        str(site / "qkv" / "__init__.py"),
        "Mu",
    ]
    qkv = tmp_path / "env" / "bin" / "qkv"
    assert "import" in run(python, "-I", qkv, "--help", cwd=tmp_path)
    (tmp_path / "people.csv").write_text("name,age\nLi,34\nHu,29\n")
    run(python, "-I", qkv, "import", "people.csv", "people.qkv", "--key", "name", cwd=tmp_path)
    assert "34" in run(python, "-I", qkv, "ask", "people.qkv", "Lee", cwd=tmp_path)
