"""Communication between the ranks of a generation: how groups form, what they exchange, and how an abort frees
them.
"""
