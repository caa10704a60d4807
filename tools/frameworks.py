"""Write the tables of transforms in docs/frameworks.md from their tests."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "frameworks.md"
MARKED = re.compile(r"(?<=<!-- transforms -->\n).*?(?=<!-- /transforms -->)", re.DOTALL)
sys.path.insert(0, str(ROOT))

from tests.transforms import OPTIONS, TORCH, Check, Option  # noqa: E402
from tests.transforms_jax import JAX  # noqa: E402
from tests.transforms_layers import GAPS, LAYERS, PEER  # noqa: E402
from tests.transforms_tensorflow import TENSORFLOW  # noqa: E402


def main() -> None:
    PAGE.write_text(MARKED.sub(lambda _: tables(), PAGE.read_text()))


def tables() -> str:
    """Return a table for each framework, and the options of its columns."""
    parts = [
        table("PyTorch", TORCH, {**OPTIONS, **LAYERS, **PEER}, GAPS),
        table("JAX", JAX, OPTIONS, {}),
        table("TensorFlow", TENSORFLOW, OPTIONS, {}),
        "| column | tried with |\n|---|---|\n",
    ]
    for family, names in families({**OPTIONS, **LAYERS}).items():
        parts[-1] += f"| {family} | {'; '.join(names)} |\n"
    return "\n".join(parts)


def table(
    title: str,
    checks: dict[str, Check],
    options: dict[str, Option],
    gaps: dict[str, tuple[str, ...]],
) -> str:
    columns = families(options)
    lines = [f"| {title} | {' | '.join(columns)} |", "|---" * (1 + len(columns)) + "|"]
    for transform in checks:
        cells = (cell(names, gaps.get(transform, ())) for names in columns.values())
        lines.append(f"| {transform} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def cell(names: list[str], gaps: tuple[str, ...]) -> str:
    """Return ✓, nothing, or what is not supported."""
    missing = [name for name in names if name in gaps]
    if not missing:
        return "✓"
    return "" if len(missing) == len(names) else f"all but {', '.join(missing)}"


def families(options: dict[str, Option]) -> dict[str, list[str]]:
    """Return the options of each column."""
    found: dict[str, list[str]] = {}
    for name, option in options.items():
        found.setdefault(option.family, []).append(name)
    return found


if __name__ == "__main__":
    main()
