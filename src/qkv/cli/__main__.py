"""Run the command line with `python -m qkv.cli`, which is the same as `qkv`."""

from qkv.cli import main

if __name__ == "__main__":
    main()
