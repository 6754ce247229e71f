"""``python -m lrstream``: the command line."""

from __future__ import annotations

import sys

from lrstream.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
