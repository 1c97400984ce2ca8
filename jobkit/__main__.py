"""python -m jobkit VERB."""

import sys

from jobkit.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
