"""``python -m meshwright.cli``, where the ``meshwright`` command is not on the path."""

from meshwright.cli import main

if __name__ == "__main__":
    main()
