"""The colours of plots. Blue, orange and green are Okabe's and Ito's: everybody can tell them apart."""

BLUE, ORANGE, GREEN, RED = "#0072b2", "#e69f00", "#009e73", "#d55e00"

INK, FAINT, WAITING, PAPER = "#1b1f27", "#69707d", "#e7eaee", "#fefefe"
"""What a dark page replaces."""
