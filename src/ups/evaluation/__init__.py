"""Scores in physical units, figures and gates."""

OFF = "off"  # the mode of a method that draws no residuals for a family
