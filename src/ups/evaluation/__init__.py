"""Scores in physical units, figures and gates."""

OFF = "off"  # the mode of a method that draws no residuals for a family
PLAIN_STAGES = ("codec", "operator", "steady")  # of predictions without corrector
