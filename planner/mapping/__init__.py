"""Which layers and how many devices each stage of a template gets (Oobleck §4.1.2).

``mapper`` asks either ``paper`` (Eq. 1–4, over ``additive``) or ``iteration`` (the true step; lower bounds in
``paths``, simulation and local search in ``quickest``). ``recut`` is for stages whose devices are given.
"""
