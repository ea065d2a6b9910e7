"""What people see: the live view, the summary, the report, the status page, a node's story, a plan.

Everything here is fed with the same public JSON that any outside tool reads from the broker (the
cluster's state and the stream of events), so that a view can show nothing that the contract hides.
"""
