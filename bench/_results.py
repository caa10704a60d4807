"""Print results, and store them with the machine in results/*.json (results/aarch64/*.json on
aarch64 processors).
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
PACKAGES = (
    "numpy",
    "torch",
    "triton",
    "jax",
    "entmax",
    "pykeops",
    "faiss-cpu",
    "scikit-learn",
)


def machine() -> dict[str, Any]:
    """Return the processor, the device and the versions of everything measured."""
    found = {"cpu": _processor(), "cores": len(os.sched_getaffinity(0))}
    try:
        import torch

        if torch.cuda.is_available():
            found["gpu"] = torch.cuda.get_device_name()
            found["cuda"] = torch.version.cuda
            found["cudnn"] = torch.backends.cudnn.version()
    except ImportError:
        pass
    found["python"] = platform.python_version()
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _processor() -> str:
    try:
        output = subprocess.run(
            ["lscpu"], capture_output=True, text=True, check=False, env={}
        ).stdout
    except OSError:
        output = ""
    name = next(
        (x.partition(":")[2] for x in output.splitlines() if x.startswith("Model name")), ""
    )
    return name.strip() or platform.machine()


def commit() -> str:
    """Return the commit of src/, with a + if it was changed since; else QKV_COMMIT."""

    def git(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["git", "-C", str(RESULTS.parent.parent), *words],
            capture_output=True,
            text=True,
            check=False,
        )

    try:
        head = git("rev-parse", "--short", "HEAD").stdout.strip()
        changed = git("status", "--porcelain", "--", "src").stdout.strip()
    except OSError:
        head = changed = ""
    return os.environ.get("QKV_COMMIT") or (head and head + "+" * bool(changed)) or "unknown"


def write(name: str, rows: list[dict[str, Any]], replace: bool) -> None:
    """Write the rows into the file of this name, and into $OUT if that is set."""
    now, when = machine(), {"commit": commit(), "date": datetime.now(UTC).date().isoformat()}
    # Times of another kind of processor are no news of the same rows.
    own = platform.machine() != "x86_64" and "gpu" not in now
    path = (RESULTS / platform.machine() if own else RESULTS) / f"{name}.json"
    old: list[dict[str, Any]] = []
    if not replace and path.exists():
        before = json.loads(path.read_text())
        fresh = {row["work"] for row in rows}
        if before["machine"] == now:
            old = [row for row in before["rows"] if row.get("work") not in fresh]
    for row in rows:
        for key, value in when.items():
            row.setdefault(key, value)
    text = json.dumps({"machine": now, "rows": old + rows}, indent=2, ensure_ascii=False) + "\n"
    for folder in (path.parent, *(Path(x) for x in (os.environ.get("OUT"),) if x)):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / path.name).write_text(text)


def show(row: dict[str, Any]) -> None:
    """Print a row: the time of each side, the speedup of qkv, and its error."""
    print(row["work"])
    ours = row["sides"].get("qkv", {}).get("ms")
    for name, side in row["sides"].items():
        cells = [f"  {name:<33}"]
        if "ms" in side:
            cells.append(f"{milliseconds(side['ms']):>12}")
            cells.append(f"{side['ms'] / ours:7.2f}×" if ours and name != "qkv" else " " * 8)
        cells += [f"{x}: {y:.3g}" for x, y in side.items() if x not in ("ms", "note")]
        cells += [side["note"]] if "note" in side else []
        print("  ".join(cells), flush=True)
    for goal in row["goals"]:
        print(f"  goal {goal['goal']}: {verdict(goal)}", flush=True)


def show_goals(rows: list[dict[str, Any]]) -> None:
    """Print each goal of the rows, and how many were met."""
    goals = [(row["work"], goal) for row in rows for goal in row["goals"]]
    print("---")
    for work, goal in goals:
        print(f"{work:<68}  {goal['goal']:<40}  {verdict(goal)}")
    print(f"{sum(goal['met'] is True for _, goal in goals)} of {len(goals)} goals met")


def verdict(goal: dict[str, Any]) -> str:
    if goal["met"] is None:
        return "not measured"
    return f"{goal['found']:.3g}, {'met' if goal['met'] else 'MISSED'}"


def milliseconds(ms: float) -> str:
    return f"{ms / 1e3:.3g} s" if ms >= 1e4 else f"{ms:,.0f} ms" if ms >= 100 else f"{ms:.3g} ms"
