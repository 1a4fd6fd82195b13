"""Scores in physical units, figures and gates."""
