"""The trained models as one object that predicts solutions of the PDEs.

- `surrogate`: `Surrogate` encodes fields, predicts rollouts with or without a sampled correction, and decodes them
- `coverage`: what training covered, and reasons for a warning where a prediction is asked for outside of it
- `trained`: the receipts of a run's trained stages, and the surrogate loaded from them
"""
