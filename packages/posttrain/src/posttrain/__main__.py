"""`python -m posttrain` is the `posttrain` command."""

from posttrain.command import main

if __name__ == "__main__":
    raise SystemExit(main())
