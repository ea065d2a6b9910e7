"""Views for people: the live view, the summary, the report, the status page, a node's story, a plan.

All views are made from the public JSON that any outside tool can read from the broker (the cluster's state
and the stream of events), so no view can show more than the contract offers.
"""
