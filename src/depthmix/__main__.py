import os
import sys

from depthmix.cli import main

code = main()
if int(os.environ.get("WORLD_SIZE", "1")) > 1:
    # A process of torchrun: at the interpreter's end torch sometimes aborts in a thread of gloo, when all work is done,
    # and torchrun would call that a failure.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
sys.exit(code)
