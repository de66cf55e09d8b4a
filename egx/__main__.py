"""`python -m egx`, where the command `egx` is not on the path."""

from egx.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
