"""``ftd local``: a whole cluster on one machine, and faults that need its processes in hand."""
