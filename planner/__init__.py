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

An example:

>>> from planner.planner import Planner
>>> from planner.values import LayerProfile, ModelProfile, Policy, Situation
>>> layer = LayerProfile(
...     forward_ms=2.0, backward_ms=4.0, parameter_bytes=4_000_000, gradient_bytes=4_000_000,
...     optimizer_bytes=8_000_000, activation_bytes=1_000_000, output_bytes=100_000)
>>> profile = ModelProfile(layers=(layer,) * 8, microbatch_rows=4, device_memory_bytes=100_000_000)
>>> planner = Planner(profile, Policy(global_batch=64, microbatch_rows=4, tolerate=1))
>>> planner.precompute(5)  # The slow part: all that up to five nodes may need.
>>> plan = planner.plan(planner.fresh(["a", "b", "c", "d", "e"]))
>>> [(pipeline.nodes, pipeline.microbatches) for pipeline in plan.pipelines]
[(('a', 'b', 'c'), 9), (('d', 'e'), 7)]

A node fails. Who is left holds the layers of its stages, and these alone:

>>> stages = [stage for pipeline in plan.pipelines for stage in pipeline.stages]
>>> held = {
...     device: frozenset(range(stage.first_layer, stage.end_layer))
...     for stage in stages for device in stage.devices if device.node != "b"}
>>> after = planner.plan(Situation(nodes=("a", "c", "d", "e"), holdings=held, previous=plan))
>>> [(pipeline.nodes, pipeline.microbatches) for pipeline in after.pipelines]
[(('a', 'c'), 8), (('d', 'e'), 8)]
>>> len(after.transfers)  # Layers that "a" and "c" lack, and who sends them.
3
"""
