"""`python -m segrew` is the command line."""

import sys

from segrew.cli import main

sys.exit(main())
