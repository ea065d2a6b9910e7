"""The whole service in one thread under a virtual clock: a seed draws everything.

The very same ``ClusterMachine``, ``AgentMachine`` and ``Planner`` as in production; only the broker, the
processes and the trainers are modelled. A safety phase with faults, invariants after every event, then the
world heals and the job must finish (TigerBeetle's VOPR and FoundationDB's simulation are the models).
"""
