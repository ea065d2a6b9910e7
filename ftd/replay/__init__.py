"""Replay of availability traces under recovery policies, in virtual time: what failures cost."""
