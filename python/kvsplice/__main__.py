"""Run the command line as ``python -m kvsplice``."""

import sys

from kvsplice.cli import main

if __name__ == "__main__":
    sys.exit(main())
