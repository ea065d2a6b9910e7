"""The colours of plots. The first seven are from Okabe and Ito's palette, which colour-blind people can tell apart."""

BLUE, ORANGE, GREEN, RED = "#0072b2", "#e69f00", "#009e73", "#d55e00"
PURPLE, SKY, YELLOW = "#cc79a7", "#56b4e9", "#f0e442"

FORWARD = (BLUE, "#4ba3d6")
"""Colours of the forward passes of even and odd microbatches, so that adjacent ones differ."""
BACKWARD = (ORANGE, "#f3c766")

INK, FAINT, WAITING, PAPER = "#1b1f27", "#69707d", "#e7eaee", "#fefefe"
"""Neutral colours, which a page with a dark theme replaces."""
