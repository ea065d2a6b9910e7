"""Node and cluster state machines, sans-IO: ``step(event) -> list[Effect]``.

They use no clock, randomness, sockets or threads: each event carries the time, and everything to be done
comes out as an effect. The same objects run under asyncio in production and under a virtual clock in the
simulator.
"""
