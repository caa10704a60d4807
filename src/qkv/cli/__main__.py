"""`python -m qkv.cli` is `qkv`."""

from qkv.cli import main

if __name__ == "__main__":
    main()
