"""Where the command `qkv` begins, as `python -m qkv` does."""

import gc
import sys

GC_THRESHOLD = 50_000
"""Objects made between two searches for garbage: to load makes many, and none of it."""


def main() -> None:
    """Run the command; one that is stopped while it still loads says so as any other."""
    gc.set_threshold(GC_THRESHOLD)
    try:
        from qkv.cli import main as run
    except KeyboardInterrupt:
        print("qkv: stopped", file=sys.stderr)
        raise SystemExit(130) from None
    run()


if __name__ == "__main__":
    main()
