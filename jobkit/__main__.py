"""python -m jobkit VERB ...: the same as the `jobkit` command (cli/main.py)."""

import sys

from jobkit.cli.main import main

sys.exit(main())
