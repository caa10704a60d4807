"""How the pages are built: `make docs` runs the gallery and writes build/docs."""

from __future__ import annotations

import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
# A test builds a copy of this folder, and says where the rest is.
ROOT = Path(os.environ.get("QKV_ROOT", HERE.parent))
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]
os.environ.setdefault("KERAS_BACKEND", "torch")

import qkv  # noqa: E402

project = "qkv"
author = "the qkv authors"
copyright = author
version = release = qkv.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx_design",
    "sphinx_gallery.gen_gallery",
    "tools.pages",
]
exclude_patterns = ["gallery/*.ipynb", "gallery/*.py", "gallery/*.json", "pictures"]
default_role = "py:obj"
myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3
# A link to README and the like leads out of these pages; a test asks that the file is there.
suppress_warnings = ["config.cache", "myst.xref_missing"]

autodoc_member_order = "bysource"
autodoc_typehints = "none"
autodoc_default_options = {"members": True}
autodoc_mock_imports = ["mxnet"]

sphinx_gallery_conf = {
    "examples_dirs": [str(ROOT / "examples" / "gallery")],
    "gallery_dirs": ["gallery"],
    "filename_pattern": r"\.py$",
    "within_subsection_order": "FileNameSortKey",
    "image_scrapers": ("tools.pages.pictures",),
    "capture_repr": ("__repr__",),
    "ignore_repr_types": r"matplotlib|qkv\.plot",
    "remove_config_comments": True,
    "download_all_examples": False,
    "show_memory": False,
    "write_computation_times": False,
    "show_signature": False,
    "min_reported_time": 60,
    "abort_on_example_error": True,
}

html_theme = "furo"
html_title = "qkv"
html_static_path = ["static"]
html_css_files = ["qkv.css"]
html_math_renderer = "mathml"
html_show_sphinx = False
html_copy_source = False
html_show_sourcelink = False
pygments_style = "friendly"
pygments_dark_style = "native"
