"""The model as MLflow serves it; MLflow copies this file beside the bundle and runs it to load the model.

    curl localhost:5000/invocations -H 'Content-Type: application/json' -d '{"inputs": [
        {"family": "burgers_1d", "u_0": [[0.1, 0.2, ...]], "steps": 20, "parameters": {"nu": 0.01}}]}'

A request is one call of `Model.predict`, its answer {"u": [...]}, or {"mean", "std"} if it asks for `members`.
"""

import warnings
from typing import Any

from mlflow.exceptions import MlflowException
from mlflow.models import set_model
from mlflow.pyfunc import PythonModel, PythonModelContext
from pydantic import BaseModel

import ups
from ups.errors import Fault

warnings.filterwarnings("ignore", ".*Any type hint is inferred as AnyType")  # an array has any number of axes


class Request(BaseModel, extra="forbid"):
    """Arguments of `Model.predict`: `u_0` and `u_before` as nested lists or arrays, `parameters` of the PDE by name.

    Coefficient fields, such as the permeability of Darcy flow, are among the parameters. What is None is left out.
    """

    family: str
    u_0: Any = None
    u_before: Any = None
    steps: int | None = None
    members: int | None = None
    seed: int | None = None
    dt: float | None = None
    parameters: dict[str, Any] | None = None


class ServedModel(PythonModel):
    """Predictions of a bundle."""

    def load_context(self, context: PythonModelContext) -> None:
        """Load the bundle."""
        self.model = ups.load(context.artifacts["bundle"])

    def predict(self, model_input: list[Request]) -> list[dict[str, Any]]:
        """One answer per request.

        Raises:
            MlflowException: a request is wrong, in one line.
        """
        return [self._answer(request) for request in model_input]

    def _answer(self, request: Request) -> dict[str, Any]:
        given = {name: value for name, value in request.model_dump().items() if value is not None}
        parameters = given.pop("parameters", {})
        if wrong := parameters.keys() & {*Request.model_fields, "labels", "self"}:
            raise MlflowException.invalid_parameter_value(
                f"{', '.join(sorted(wrong))}: no parameter of a PDE, give it outside"
            )
        try:
            u = self.model.predict(**given, **parameters)
        except Fault as fault:
            raise MlflowException.invalid_parameter_value(str(fault)) from fault
        return {"u": u} if request.members is None else {"mean": u.mean, "std": u.std}


set_model(ServedModel())
