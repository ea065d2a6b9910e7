"""``ftd coordinator``: the cluster machine, driven; its journal, its planner, its clients."""
