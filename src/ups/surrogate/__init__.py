"""The trained models as one object that predicts solutions of the PDEs.

- `model`: `load` and `Model`, which takes and gives arrays in physical units
- `family_cards`: what the card of a model says about a family
- `problem`, `arrays`: checks of what the caller gives; numpy, torch and xarray
- `results`: what a model says about a family, predictions as the caller's kind, ensembles of them
- `bundle`: models with their card on disk
- `files`: predictions of all initial states in a file, written to a file
- `surrogate`: `Surrogate` encodes fields, predicts rollouts with or without a sampled correction, and decodes them
- `export`: one family's model between physical fields, and files of it that run without this package
- `coverage`: what training covered, and reasons for a warning where a prediction is asked for outside of it
- `trained`: the receipts of a run's trained stages, and the surrogate loaded from them
"""
