"""Where the command `qkv` begins, as `python -m qkv` does."""

import sys


def main() -> None:
    """Run the command; one that is stopped while it still loads says so as any other."""
    try:
        from qkv.cli import main as run
    except KeyboardInterrupt:
        print("qkv: stopped", file=sys.stderr)
        raise SystemExit(130) from None
    run()


if __name__ == "__main__":
    main()
