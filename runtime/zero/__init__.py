"""Layers in parts: ZeRO-1, shards and tensor parallelism on one rank, and replicas of parts in host memory
(AOR).
"""
