"""A rank in a process of its own that forms its group and then stands still, for tests that end it.

``python -m tests.helpers.peer PORT GENERATION RANK SIZE`` prints ``formed`` once it has met the others.
"""

import sys
import threading

from runtime.groups.gloo import GlooCommunicator
from runtime.groups.store import Rendezvous
from tests.helpers.harness import TOKEN


def main() -> None:
    port, generation, rank, size = map(int, sys.argv[1:])
    rendezvous = Rendezvous(host="127.0.0.1", port=port, token=TOKEN, generation=generation)
    communicator = GlooCommunicator(rendezvous, rank, size, "127.0.0.1")
    communicator.form([])
    print("formed", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
