"""The docs build without a warning or a network, and no link in them leads nowhere."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("sphinx_gallery")

ROOT = Path(__file__).resolve().parents[2]
LOADS = re.compile(
    r"<(?:script|link|img)[^>]*(?:src|href)=\"(?:https?:)?//|@import|url\(['\"]?http"
)
LINK = re.compile(r"!?\[[^\]]*\]\((?!\w+:|#)([^)#\s]+)|(?:src|href)=\"(?!\w+:|#)([^\"#]+)")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pages of a copy of docs/: the gallery is written next to its source and not run here."""
    folder = tmp_path_factory.mktemp("docs")
    left = shutil.ignore_patterns("gallery")
    shutil.copytree(ROOT / "docs", folder / "docs", ignore=left)
    for other in ("bench", "examples"):
        (folder / other).symlink_to(ROOT / other)
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-D", "plot_gallery=0"]
    command += ["-d", "doctrees", "docs", "html"]
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, "QKV_ROOT": str(ROOT)}, capture_output=True
    )
    assert done.returncode == 0, done.stderr.decode()[-5000:]
    return folder / "html"


def test_no_page_loads_anything_from_a_network(built: Path) -> None:
    files = [path for path in built.rglob("*") if path.suffix in (".html", ".css")]
    assert len(files) > 30
    result = {path.name: LOADS.search(path.read_text(encoding="utf-8")) for path in files}
    assert not {name: match[0] for name, match in result.items() if match}


def test_formulas_are_mathml(built: Path) -> None:
    assert "<msub>" in (built / "gallery" / "01_names.html").read_text(encoding="utf-8")


def test_every_public_name_is_in_the_reference(built: Path) -> None:
    import qkv
    from qkv import masks, nn, scores, weightings

    text = "".join(page.read_text(encoding="utf-8") for page in (built / "reference").glob("*"))
    for module in (qkv, masks, nn, scores, weightings):
        for name in module.__all__:
            if isinstance(getattr(module, name), type):
                assert f'{name}"' in text, f"{module.__name__}.{name}"


@pytest.mark.parametrize(
    "page",
    [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for match in LINK.finditer(text):
        link = match[1] or match[2]
        assert (page.parent / link).exists(), link
