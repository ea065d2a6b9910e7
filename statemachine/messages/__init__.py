"""Values and messages that state machines, trainers and daemons share, each declared once.

This is a leaf package of plain structs: it imports only ``planner.values`` and ``storage.values``, does no
I/O and loads no torch. A struct is both the value that a state machine handles and what goes over the wire.

  values     values that occur in several messages, events and effects
  cluster    messages between the coordinator and the nodes, and their envelopes
  trainer    messages between a node and its trainers
  common     messages that both of these protocols have
  trace      messages by which a node asks its trainers for a trace of their steps
"""
