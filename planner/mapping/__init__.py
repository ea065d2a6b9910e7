"""Choice of the layers and the number of devices of each stage of a template (Oobleck §4.1.2).

``mapper`` uses either ``paper`` (Eq. 1–4, based on ``additive``) or ``iteration`` (the true step; lower
bounds in ``paths``, simulation and local search in ``quickest``). ``recut`` is for stages whose devices are
given.
"""
