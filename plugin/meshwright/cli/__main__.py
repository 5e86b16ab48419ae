"""``python -m meshwright.cli``, for when the ``meshwright`` command is not on the path."""

from meshwright.cli import main

if __name__ == "__main__":
    main()
