"""Groups of ranks: how they meet, talk, and are left when a peer is dead."""
