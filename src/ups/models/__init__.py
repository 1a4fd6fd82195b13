"""Networks on tokens and the codec between fields and tokens."""
