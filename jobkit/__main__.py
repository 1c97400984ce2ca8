import sys

from jobkit.cli.main import main

sys.exit(main())
