"""The snapshot agent of a host, a daemon that protects the snapshots of scripts without broker and
coordinator.
"""
