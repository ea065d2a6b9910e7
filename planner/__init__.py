"""Planning, pure: no I/O, no clock, no randomness. Start at ``planner.planner.Planner``.

values, errors      what goes in and comes out
memory, costs       bytes and seconds of every possible stage
makespan            the 1F1B recurrence, its bounds, the paper's formula
mapping: paper (additive), iteration (paths, descent, enumeration)    layers and devices of each stage
recut               new layers for stages whose devices are given and differ in speed
precomputed         what was found before the first failure, as values
templates           which template sizes there are
batch, instantiation              which pipelines, and how many microbatches each
reconfiguration, candidates       Oobleck's steps after a failure, and other layouts
tradeoff            a better plan against fewer bytes moved
assignment, cover, placement, transfers    which node takes which place, and what must move
reasons, describe   for people
reliability         how long state in memory is safe, and which f to buy
"""
