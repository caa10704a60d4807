"""Write bench/RESULTS.md from bench/results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
HEAD = "| work | qkv | error | compared with | goal |\n|---|---|---|---|---|\n"


def main() -> None:
    found = [json.loads(path.read_text()) for path in results()]
    kinds = dict.fromkeys(map(kind, sorted(found, key=lambda x: "gpu" in x["machine"])))
    files = [[x for x in found if kind(x) == each] for each in kinds]
    goals = [goal["met"] for file in found for row in file["rows"] for goal in row.get("goals", ())]
    summary = f"{goals.count(True)} of {len(goals)} goals are met."
    parts = [f"# What was measured\n\n{summary}\n", *filter(None, map(table, files))]
    (ROOT / "bench" / "RESULTS.md").write_text("\n".join(parts))


def kind(file: dict[str, Any]) -> str:
    """Return what was measured: a device or a processor."""
    return file["machine"].get("gpu") or file["machine"]["cpu"]  # type: ignore[no-any-return]


def results() -> list[Path]:
    """Return the results of one folder, x86-64 first."""
    folder = ROOT / "bench" / "results"
    return [*sorted(folder.glob("*.json")), *sorted(folder.glob("*/*.json"))]


def table(files: list[dict[str, Any]]) -> str:
    """Return the rows of one kind of machine, and below them the machines."""
    rows = [row for file in files for row in file["rows"] if "sides" in row]
    if not rows:
        return ""
    machines = [file["machine"] for file in files if any("sides" in row for row in file["rows"])]
    sources = dict.fromkeys(place(machine) for machine in machines)
    sources |= dict.fromkeys(f"commit {row['commit']}, {row['date']}" for row in rows)
    foot = "Median times, error relative to float64, × how many times as fast qkv is. "
    return HEAD + "".join(map(line, rows)) + f"\n{foot}{'; '.join(sources)}.\n"


def place(machine: dict[str, Any]) -> str:
    where = machine.get("gpu") or f"{machine['cpu']}, {machine['cores']} cores"
    versions = [f"{x} {machine[x]}" for x in ("python", "torch", "triton") if x in machine]
    return ", ".join((where, *versions))


def line(row: dict[str, Any]) -> str:
    """Return one line, with the peers that a goal names, or all without a goal."""
    sides = row["sides"]
    ours = sides.get("qkv", {})
    peers = [name for name in sides if not name.startswith("qkv")]
    named = [name for name in peers if any(name in goal["goal"] for goal in row["goals"])]
    compared = "; ".join(peer(name, sides[name], ours) for name in named or peers)
    error = f"{ours['error']:.1e}" if "error" in ours else ""
    goals = "<br>".join(f"{goal['goal']}: {verdict(goal)}" for goal in row["goals"])
    return f"| {row['work']} | {cost(ours)} | {error} | {compared} | {goals} |\n"


def peer(name: str, side: dict[str, Any], ours: dict[str, Any]) -> str:
    ratio = f" ({side['ms'] / ours['ms']:.2g}×)" if "ms" in side and "ms" in ours else ""
    return f"{name} {cost(side) or side.get('note', '')}{ratio}"


def cost(side: dict[str, Any]) -> str:
    cells = []
    if "ms" in side:
        ms = side["ms"]
        cells.append(f"{ms / 1e3:.3g} s" if ms >= 1e3 else f"{ms:.3g} ms")
    if "extra MiB" in side:
        cells.append(f"{side['extra MiB']:,.0f} MiB")
    return ", ".join(cells)


def verdict(goal: dict[str, Any]) -> str:
    if goal["met"] is None:
        return "not measured"
    return f"{goal['found']:.3g}" + ("" if goal["met"] else ", **missed**")


if __name__ == "__main__":
    main()
