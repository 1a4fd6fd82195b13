"""Export of one family's model between physical fields to a file that runs without this package.

All files hold the codec and plain prediction alone: no corrector, no ensembles. They take batches of any size, and hold
a description of themselves. Inputs come in the order of `PhysicalModel.inputs`, for Burgers the state u and nu (B,):

    u_next = torch.export.load("burgers_1d.pt2").module()(u, nu)                                      # pt2
    u_next = onnxruntime.InferenceSession("burgers_1d.onnx").run(None, {"u": u, "nu": nu})[0]         # onnx, NumPy
    u_next = torch._inductor.aoti_load_package("burgers_1d.aoti.pt2")(u, nu)                          # aoti

Compiled packages (aoti) do not look at their inputs, unless the environment has AOTI_RUNTIME_CHECK_INPUTS=1.
"""

import copy
import io
import json
import logging
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from ups import __version__
from ups.data.families import Dataset, condition_features
from ups.data.pdebench import FAMILIES
from ups.errors import ConfigFault, DataFault
from ups.files import publish
from ups.models.codec import decode_fields, encode_fields, group_name
from ups.models.sizes import Domain
from ups.surrogate.family_cards import FamilyCard, with_time_step
from ups.surrogate.surrogate import Surrogate, condition_of

Format = Literal["pt2", "onnx", "aoti"]
METADATA = "ups.json"  # name of the description, JSON, in files of all formats
OPSET = 18  # of ONNX
EXTRA = ("onnx", "onnxscript", "onnxruntime")
EXAMPLE_BATCH = 2  # a batch of one would be taken for one that is always one


class PhysicalModel(nn.Module):
    """The model of one family between physical fields, without corrector: encode, advance or solve, decode.

    Inputs are, in the order of `inputs`: the state `u` (B, C, *grid) unless the family is steady, for one with a
    `History` the snapshot `u_before` a time step earlier, `coefficients` (B, C_c, *grid) if it has any, and each PDE
    parameter (B,). The result (B, C, *grid) is the state after `substeps` time steps of the dataset, or the steady
    solution. Since the codec's bases are orthonormal, decoding and encoding again between two steps changes a rollout
    by rounding alone. Gradients flow to all inputs.

    Raises:
        DataFault: the surrogate has no model of this family.
    """

    def __init__(self, surrogate: Surrogate, dataset: Dataset, domain: Domain, substeps: int = 1) -> None:
        super().__init__()
        self.substeps = substeps
        name, self.dataset, self.domain = dataset.family, dataset, domain
        self.family, model = FAMILIES[name], surrogate.model(name)
        if model is None or name not in model.statistics.rows:
            raise DataFault(f"there is no trained model of {name} to export: train one on this family")
        kinds = ("fields", "coefficients") if self.family.coefficients else ("fields",)
        self.groups = {kind: surrogate.codec.groups[group_name(name, kind)] for kind in kinds}
        for kind in kinds:
            self.register_buffer(f"{kind}_bases", surrogate.codec.bases(group_name(name, kind)).detach().clone())
        self.register_buffer("features", torch.tensor(condition_features(dataset)).to(self.fields_bases))
        self.model = copy.deepcopy(model).requires_grad_(False).eval()
        self._drop_unused_weights()

    @property
    def inputs(self) -> dict[str, tuple[int, ...]]:
        """Names of the inputs, with their shapes without the batch axis."""
        grid, names = self.groups["fields"].grid, [] if self.family.steady else ["u"]
        if self.family.name in self.model.sizes.history:
            names.append("u_before")
        state = dict.fromkeys(names, self.family.fields)
        given = {"coefficients": self.family.coefficients} if self.family.coefficients else {}
        arrays = {name: (len(fields), *grid) for name, fields in (state | given).items()}
        return arrays | dict.fromkeys(self.family.parameters, ())

    @property
    def metadata(self) -> dict[str, Any]:
        """What a file says about itself, plain values."""
        family, dataset, times = self.family, self.dataset, self.dataset.times
        return {
            "family": dataset.family,
            "equation": family.equation,
            "output": "steady solution" if family.steady else "state after one time step dt",
            "inputs": {name: ["batch", *shape] for name, shape in self.inputs.items()},
            "fields": family.fields,
            "coefficients": family.coefficients,
            "parameters": family.parameters,
            "grid": self.groups["fields"].grid,
            "lengths": dataset.lengths,
            "boundary": dataset.boundary,
            "dt": None if family.steady else float(self.substeps * (times[1] - times[0])),
            "corrector": "not included",
            "versions": {"ups": __version__, "torch": torch.__version__},
        }

    def example(self, batch_size: int) -> tuple[Tensor, ...]:
        """Inputs of the right shapes, all one."""
        return tuple(self.features.new_ones(batch_size, *shape) for shape in self.inputs.values())

    def forward(self, *inputs: Tensor) -> Tensor:
        """The next state or the steady solution (B, C, *grid)."""
        group, named = self.groups["fields"], dict(zip(self.inputs, inputs, strict=True))
        batch_size = inputs[0].shape[0]
        condition = condition_of(self.features, {n: named[n] for n in self.family.parameters}, batch_size)
        if self.family.steady:
            z = inputs[0].new_zeros(batch_size, group.num_tokens, group.num_channels)
        else:
            snapshots = [named[name] for name in ("u", "u_before") if name in named]
            z = torch.cat([encode_fields(u, group, self.fields_bases) for u in snapshots], -1)
        coefficients = z[..., :0]
        if self.family.coefficients:
            coefficients = encode_fields(named["coefficients"], self.groups["coefficients"], self.coefficients_bases)
        for _ in range(self.substeps):
            z = self.model(z, coefficients, condition, self.domain)
        return decode_fields(z[..., : group.num_channels], group, self.fields_bases)

    def _drop_unused_weights(self) -> None:
        """Empty the weights that are of other families alone: those to which the result has no gradient."""
        weights = list(self.model.requires_grad_(True).parameters())
        gradients = torch.autograd.grad(self(*self.example(EXAMPLE_BATCH)).sum(), weights, allow_unused=True)
        self.model.requires_grad_(False)
        for weight, gradient in zip(weights, gradients, strict=True):
            if gradient is None:
                weight.data = weight.new_empty(0)


def physical_model(surrogate: Surrogate, card: FamilyCard, dt: float | None) -> PhysicalModel:
    """The model of a family with the time step `dt` of `Model.predict`.

    Raises:
        ConfigFault: as `with_time_step`; or `dt` takes several steps that start from two snapshots each.
        DataFault: the surrogate has no model of this family.
    """
    dataset, step, substeps = with_time_step(card, dt)
    model = PhysicalModel(surrogate, dataset, card.domain, substeps)
    if substeps > 1 and "u_before" in model.inputs:
        what = f"steps of {card.name} start from two snapshots, {step / substeps:g} apart"
        raise ConfigFault(f"{what}: export with this dt instead of {step:g}")
    return model


def export(model: PhysicalModel, path: Path, form: Format) -> None:
    """Write a model to `path`, whole or not at all: as program of torch, ONNX graph, or compiled for this machine.

    `pt2` is for `torch.export.load`, on CPU or GPU as the model is, and keeps gradients. `aoti` is machine code by
    AOTInductor, which takes a C++ compiler and some minutes. Files of both run what is in them when they are loaded.

    Raises:
        ConfigFault: the format is unknown, or a package or compiler that it needs is missing.
        StorageFault: the disk is full or read-only.
    """
    if form not in get_args(Format):
        raise ConfigFault(f"format {form!r} is unknown: choose one of {', '.join(get_args(Format))}")
    if form == "onnx" and (missing := [name for name in EXTRA if find_spec(name) is None]):
        raise ConfigFault(f"ONNX needs the extra: pip install -e '.[export]' (there is no {', '.join(missing)})")
    if form == "aoti":
        _expect_compiler()
    program, description = trace(model), json.dumps(model.metadata, indent=1, allow_nan=False)
    writers = {"pt2": _pt2_bytes, "onnx": partial(_onnx_bytes, list(model.inputs)), "aoti": _aoti_bytes}
    content = writers[form](program, description)
    with publish(path) as temporary:
        temporary.write_bytes(content)


def trace(model: PhysicalModel) -> ExportedProgram:
    """The model as a program of torch operators for batches of any size."""
    example = model.example(EXAMPLE_BATCH)
    # Called once before it is traced, so that cached constants such as Fourier bases are tensors with values.
    model(*example)
    batch_axes = tuple({0: torch.export.Dim("batch")} for _ in example)
    return torch.export.export(model, example, dynamic_shapes=(batch_axes,), strict=False)


def _pt2_bytes(program: ExportedProgram, description: str) -> bytes:
    buffer = io.BytesIO()
    torch.export.save(program, buffer, extra_files={METADATA: description})
    return buffer.getvalue()


def _onnx_bytes(names: list[str], program: ExportedProgram, description: str) -> bytes:
    # Reports at every export that torchvision, whose operators nobody needs here, is not installed.
    logging.getLogger("torch.onnx._internal.exporter._registration").setLevel(logging.ERROR)
    onnx_program = torch.onnx.export(
        program, opset_version=OPSET, input_names=names, output_names=["output"], verbose=False
    )
    onnx_program.model.metadata_props[METADATA] = description
    _keep_names_apart(onnx_program.model.graph)
    return onnx_program.model_proto.SerializeToString()


def _keep_names_apart(graph: Any) -> None:
    """Rename values inside an ONNX graph that have the name of an input: a parameter may be called `mean`."""
    names = {value.name for value in graph.inputs}
    inside = [*graph.initializers.values(), *(value for node in graph for value in node.outputs)]
    for value in inside:
        if value.name in names:
            value.name = f"inside.{value.name}"


def _aoti_bytes(program: ExportedProgram, description: str) -> bytes:
    buffer = io.BytesIO()
    configuration = {"aot_inductor.metadata": {METADATA: description}}
    torch._inductor.aoti_compile_and_package(program, package_path=buffer, inductor_configs=configuration)
    return buffer.getvalue()


def _expect_compiler() -> None:
    from torch._inductor import cpp_builder, exc  # takes seconds to import

    try:
        cpp_builder.get_cpp_compiler()
    except exc.InvalidCxxCompiler as error:
        raise ConfigFault("AOTInductor finds no C++ compiler: install g++ or export to pt2 or onnx") from error
