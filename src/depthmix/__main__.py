import sys

from depthmix.cli import main

sys.exit(main())
