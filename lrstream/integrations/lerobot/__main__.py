"""``python -m lrstream.integrations.lerobot train [LeRobot's options] [--lrstream.* options]``."""

from __future__ import annotations

import sys

from lrstream.integrations.lerobot.launcher import main

if __name__ == "__main__":
    arguments = sys.argv[1:]
    if arguments[:1] != ["train"]:
        sys.stderr.write("usage: python -m lrstream.integrations.lerobot train [options]\n")
        sys.exit(0 if arguments[:1] in (["-h"], ["--help"]) else 2)
    sys.exit(main(arguments[1:]))
