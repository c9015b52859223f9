"""The child process of `depthmix bench`; not for people."""

import sys

from depthmix.bench.processes import child

sys.exit(child())
