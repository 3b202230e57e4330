"""`python -m compress` is the command line."""

import sys

from compress.cli import main

sys.exit(main())
