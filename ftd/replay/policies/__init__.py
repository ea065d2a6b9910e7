"""Recovery policies: ftd itself, and documented cost models of other systems."""
