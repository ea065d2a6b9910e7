"""The devices that tests train on, and how trainers communicate there: CPUs and gloo, unless the environment says
otherwise (``make gpu-test``, ``make emulated-gpu-test``).
"""

import os

DEVICE = os.environ.get("FTD_TEST_DEVICE", "cpu")
"""Type of the devices; with ``cuda`` all trainers share the host's GPUs."""
BACKEND = os.environ.get("FTD_TEST_BACKEND", "gloo")
"""Library of the trainers' groups; ``nccl`` needs a GPU for each."""
