"""The entry point of the command `qkv` and of `python -m qkv`."""

import gc
import sys

GC_THRESHOLD = 50_000
"""Allocations between two garbage collections: imports allocate much and free nothing."""


def main() -> None:
    """Run the command; report Ctrl-C also while modules load."""
    gc.set_threshold(GC_THRESHOLD)
    try:
        from qkv.cli import main as run
    except KeyboardInterrupt:
        print("qkv: stopped", file=sys.stderr)
        raise SystemExit(130) from None
    run()


if __name__ == "__main__":
    main()
