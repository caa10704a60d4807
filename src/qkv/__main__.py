"""`python -m qkv` is `qkv`."""

from qkv.cli import main

if __name__ == "__main__":
    main()
