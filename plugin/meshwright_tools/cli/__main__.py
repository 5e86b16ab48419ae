"""``python -m meshwright_tools.cli``, for when the ``meshwright`` command is not on the path."""

from meshwright_tools.cli import main

if __name__ == "__main__":
    main()
