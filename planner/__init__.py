"""The planner, which is pure: no I/O, no clock, no randomness. Start at ``planner.planner.Planner``.

values, errors       inputs and results
stages               time and bytes of every possible stage, and of pipelines of them
mapping              layers and devices of each stage of a template
templates            the sizes of pipelines, each with its best mapping
pipelines            which pipelines a number of nodes forms, and the microbatches of each
precomputed          all of that as values, computed before the first failure
changes              after a failure or a join: layouts, the choice among them, slots, transfers, stragglers
reasons, describe    for people; preview, timeline: for ``ftd plan``
intervals            how often to take snapshots and to write checkpoints
state_loss           how often no memory holds the state any more
reliability          how long state in memory is safe, and which f to buy

An example:

>>> from planner.planner import Planner
>>> from planner.values import LayerProfile, ModelProfile, Policy, Situation
>>> layer = LayerProfile(
...     forward_ms=2.0, backward_ms=4.0, parameter_bytes=4_000_000, gradient_bytes=4_000_000,
...     optimizer_bytes=8_000_000, activation_bytes=1_000_000, output_bytes=100_000)
>>> profile = ModelProfile(layers=(layer,) * 8, microbatch_rows=4, device_memory_bytes=100_000_000)
>>> planner = Planner(profile, Policy(global_batch=64, microbatch_rows=4, tolerate=1))
>>> planner.precompute(5)  # The slow part: everything that up to five nodes may need.
>>> plan = planner.plan(planner.initial_situation(["a", "b", "c", "d", "e"]))
>>> [(pipeline.nodes, pipeline.microbatches) for pipeline in plan.pipelines]
[(('a', 'b', 'c'), 9), (('d', 'e'), 7)]

A node fails. The remaining devices hold the layers of their stages and no others:

>>> stages = [stage for pipeline in plan.pipelines for stage in pipeline.stages]
>>> held = {
...     device: frozenset(range(stage.first_layer, stage.end_layer))
...     for stage in stages for device in stage.devices if device.node != "b"}
>>> after = planner.plan(Situation(nodes=("a", "c", "d", "e"), holdings=held, previous=plan))
>>> [(pipeline.nodes, pipeline.microbatches) for pipeline in after.pipelines]
[(('a', 'c'), 8), (('d', 'e'), 8)]
>>> len(after.transfers)  # One for each layer that "a" or "c" lacks.
3
"""
