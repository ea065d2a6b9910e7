"""The keeper of scripts' snapshots on a host: a daemon without broker and coordinator."""
