"""``python -m kvsplice.lmcache``."""

import logging
import sys

from kvsplice.lmcache.launcher import main

logging.basicConfig(format="%(message)s", level=logging.WARNING)
sys.exit(main())
