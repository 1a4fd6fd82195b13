"""Stage `finetune`: training of the operator is continued on one family."""

from dataclasses import replace

from ups.config import FinetuneConfig, OperatorConfig
from ups.data.samples import LatentSamples
from ups.files import place_of
from ups.models.weights import load_weights
from ups.runs.run import Run
from ups.training.stage import Stage
from ups.training.stages.operator import build as build_operator


def build(config: FinetuneConfig, run: Run) -> Stage:
    """The stage of the trained operator, with its final weights, on the samples of `config.family` only.

    The loss has the options that the operator was trained with; options that depend on the progress of the training
    (the rollout length of `horizon_at`) refer to the steps of this stage.
    """
    family, receipt = config.family, run.inputs["operator"]
    trained = Run.read(place_of(run.data_root, receipt)).config | {"steps": config.steps}
    stage = build_operator(OperatorConfig(**trained), run)
    stage.model.load_state_dict(load_weights(run.data_root, receipt))
    assert family is not None and isinstance(stage.train, LatentSamples) and isinstance(stage.valid, LatentSamples)
    train, valid = stage.train.only(family), stage.valid.only(family)
    return replace(stage, train=train, valid=valid, num_tokens=train.num_tokens)
