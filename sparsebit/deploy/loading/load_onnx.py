"""`load_onnx`: a float ONNX file as an `nn.Module` with named layers and parameters, compared with ONNX Runtime."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, fx

from sparsebit.deploy.comparing.file_model import Feeds, as_feeds
from sparsebit.deploy.loading.build import build
from sparsebit.deploy.loading.join_nodes import joined_nodes
from sparsebit.deploy.loading.read_file import read_model
from sparsebit.deploy.loading.refusals import refuse_other_files
from sparsebit.deploy.onnx_graph.packages import numpy
from sparsebit.deploy.onnx_graph.qdq_graph import Graph
from sparsebit.deploy.sessions.random_inputs import made_up_feeds
from sparsebit.deploy.sessions.runtime_sessions import open_session
from sparsebit.deploy.sessions.session import Session
from sparsebit.errors import DeploymentError

TOLERANCE = 1e-4
NUM_COMPARED = 4  # batches
_LEAST_RANGE = 1e-2  # of the largest value: the range of nearly equal numbers is that of their roundings


def load_onnx(
    path: str | os.PathLike[str], data: Iterable[Any] | None = None, *, tolerance: float = TOLERANCE
) -> fx.GraphModule:
    """The float model of an ONNX file (opsets 11 to 26), in eval mode, as a torch.fx GraphModule.

    Convolutions, linear layers, norms and embeddings are layers of `torch.nn` with parameters, named as in the file;
    other operators are functions of torch. The module takes the file's inputs in their order, or by their names.

    Its float outputs are compared with ONNX Runtime, each node as it is written, on the first batches of `data` (as the
    model takes them; tuples with labels too), or on random inputs: a difference of more than `tolerance` of an output's
    range is an error. Errors are DeploymentErrors; quantized files, and files with subgraphs, are refused.
    """
    model = read_model(path)
    nodes = Graph(model).nodes
    refuse_other_files(model, nodes, path)
    session = open_session(path, optimize=False)  # each node as it is written: fusions may compute something else
    feeds = list(itertools.islice(_feeds(model, data, session, str(path)), NUM_COMPARED))
    if not feeds:
        raise DeploymentError(f"{path}: data holds no batch, so there is nothing to compare the module on")
    try:
        module = build(model, joined_nodes(model, nodes), feeds[0]).eval()
    except DeploymentError as error:
        raise DeploymentError(f"{path}: {error}") from error
    for one in feeds:
        _compare(module, session, one, tolerance, str(path))
    return module


def _feeds(model: Any, data: Iterable[Any] | None, session: Session, path: str) -> Iterator[Feeds]:
    """The user's batches, or random inputs: also of two samples, if the file takes those."""
    if data is not None:
        for batch in data:
            feeds = as_feeds(batch, session, path)
            _check_sizes(feeds, session, path)
            yield feeds
        return
    one, _ = made_up_feeds(model)
    shapes = session.input_shapes
    if all(shape and shape[0] is None for shape in shapes.values()):
        several = {name: numpy.concatenate([array, array[..., ::-1]]) for name, array in one.items()}
        try:
            session.run(several)
        except DeploymentError:  # its first axis is not that of samples
            pass
        else:
            yield several
    yield one


def _check_sizes(feeds: Feeds, session: Session, path: str) -> None:
    for name, array in feeds.items():
        shape = session.input_shapes[name]
        if shape and (
            len(shape) != array.ndim or any(a not in (None, b) for a, b in zip(shape, array.shape, strict=True))
        ):
            allowed = "x".join("any" if size is None else str(size) for size in shape)
            found = "x".join(map(str, array.shape))
            raise DeploymentError(
                f"{path}: input {name} takes {allowed}, and a batch of the data is {found}. Give batches of that size, "
                "or export the file with a dynamic batch"
            )


def _compare(module: fx.GraphModule, session: Session, feeds: Feeds, tolerance: float, path: str) -> None:
    """Raise where an output differs from ONNX Runtime's by more than `tolerance` of its range."""
    expected = session.run(feeds)
    with torch.no_grad():
        found = module(*(torch.from_numpy(numpy.array(feeds[name])) for name in session.inputs))
    outputs: tuple[Tensor, ...] = found if isinstance(found, tuple) else (found,)
    for name, want, have in zip(session.outputs, expected, outputs, strict=True):
        is_alike = want.shape == tuple(have.shape)
        share = difference(want, have.numpy()) if is_alike else float("inf")
        if not share <= tolerance:
            how = f"by {share:.1e} of its range" if is_alike else f"in shape: {tuple(have.shape)}, not {want.shape}"
            raise DeploymentError(
                f"{path}: the module's output {name} differs from ONNX Runtime's {how}; at most {tolerance:.0e} is "
                "allowed, so the module is not given out. Please report the operators of the file"
            )


def difference(expected: Any, found: Any) -> float:
    """The largest difference of two float arrays as a share of the expected one's range; 0 for other types."""
    if expected.dtype.kind != "f" or not expected.size:
        return 0.0
    expected, found = expected.astype(numpy.float64), found.astype(numpy.float64)
    is_equal = (expected == found) | (numpy.isnan(expected) & numpy.isnan(found))
    finite = expected[numpy.isfinite(expected)]
    largest = float(numpy.abs(finite).max(initial=0.0))
    extent = max(float(numpy.ptp(finite)) if finite.size else 0.0, _LEAST_RANGE * largest) or 1.0
    with numpy.errstate(invalid="ignore"):
        return float(numpy.where(is_equal, 0.0, numpy.abs(expected - found)).max()) / extent
