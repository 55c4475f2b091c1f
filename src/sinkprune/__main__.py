"""`python -m sinkprune`."""

import sys

from sinkprune.entry_points import sinkprune

sys.exit(sinkprune())
