"""`python -m offbeat` is `offbeat`."""

import sys

from offbeat.cli import main

if __name__ == "__main__":
    sys.exit(main())
