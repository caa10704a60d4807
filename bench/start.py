"""How long does `import qkv` take, warm, beside NumPy's own import?"""

from __future__ import annotations

import subprocess
import sys

from _side_by_side import keep, times


def start(code: str) -> None:
    subprocess.run([sys.executable, "-c", code], check=True)


def main() -> None:
    found = times(
        {
            "python": lambda: start("pass"),
            "import numpy": lambda: start("import numpy"),
            "import qkv": lambda: start("import qkv"),
        }
    )
    keep(
        "start",
        [
            {"side": side, "ms": 1e3 * t, "above python's own ms": 1e3 * (t - found["python"])}
            for side, t in found.items()
        ],
    )


if __name__ == "__main__":
    main()
