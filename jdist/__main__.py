"""The command line: `python -m jdist`."""

import sys

from jdist._src.command_line.main import main

if __name__ == "__main__":
    sys.exit(main())
