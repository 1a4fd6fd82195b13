"""Stage `finetune`: the trained operator goes on learning, on one family alone."""

from dataclasses import replace

from ups.config import FinetuneConfig, OperatorConfig
from ups.data.samples import LatentSamples
from ups.models.weights import load_weights
from ups.run import Run
from ups.training import operator
from ups.training.stage import Stage


def build(config: FinetuneConfig, run: Run) -> Stage:
    """The operator's stage as it was trained, from the weights it ended with, on the samples of `config.family`.

    What its loss does in the course of training, it does in the course of these steps.
    """
    family, receipt = config.family, run.inputs["operator"]
    trained = Run.read(run.data_root / receipt["path"]).config | {"steps": config.steps}
    stage = operator.build(OperatorConfig(**trained), run)
    stage.model.load_state_dict(load_weights(run.data_root, receipt))
    assert family is not None and isinstance(stage.train, LatentSamples) and isinstance(stage.valid, LatentSamples)
    return replace(
        stage,
        train=stage.train.only(family),
        valid=stage.valid.only(family),
        num_tokens={family: stage.num_tokens[family]},
    )
