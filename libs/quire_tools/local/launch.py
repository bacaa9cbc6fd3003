"""Becomes the command that follows, which dies with the process that started this: `launch.py PARENT-PID COMMAND …`.

A script of its own, and no function that runs between fork and exec: where the parent has gRPC streams open, gRPC's
handlers crash one forked child in five.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1

ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):  # it has died by now
    sys.exit(1)
os.execvp(sys.argv[2], sys.argv[2:])
