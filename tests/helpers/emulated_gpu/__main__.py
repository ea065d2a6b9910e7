"""Runs a command with the emulated GPU."""

import os
import sys

from tests.helpers.emulated_gpu import environment

if len(sys.argv) < 2:
    sys.exit("usage: python -m tests.helpers.emulated_gpu COMMAND ...")
os.execvpe(sys.argv[1], sys.argv[1:], environment())
