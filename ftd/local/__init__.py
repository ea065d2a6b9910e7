"""``ftd local``: a whole cluster on one machine, and the scenarios of faults that are played on it."""
