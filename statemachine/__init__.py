"""Node and cluster state machines, sans-IO: ``step(event) -> list[Effect]``.

No clock, no randomness, no sockets, no threads: time comes in as a field of each event, everything to be
done goes out as an effect. The same objects run under asyncio in production and under a virtual clock in
the simulator.
"""
