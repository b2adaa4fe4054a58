"""``python -m diagkit``: the command line."""

import sys

from diagkit.cli import main

if __name__ == "__main__":
    sys.exit(main())
