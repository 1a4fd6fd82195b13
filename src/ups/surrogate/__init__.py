"""The trained models as one object that predicts solutions of the PDEs.

- `surrogate`: `Surrogate` encodes fields, predicts rollouts with or without a sampled correction, and decodes them
- `export`: one family's model between physical fields, and files of it that run without this package
- `trained`: the receipts of a run's trained stages, and the surrogate loaded from them
"""
