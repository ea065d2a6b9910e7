"""The simulator: the whole service in one thread under a virtual clock, with everything drawn from a seed.

``ClusterMachine``, ``AgentMachine`` and ``Planner`` are the production classes; only the broker, the
processes and the trainers are simulated. A phase with faults comes first, with invariants checked after
every event; then all faults heal and the job must finish. TigerBeetle's VOPR and FoundationDB's simulation
are the models.
"""
