"""``ftd node``: the daemon of one host, its trainers, and what they meet through."""
