"""`load_onnx`: a float ONNX file as an `nn.Module` with named layers and parameters, compared with ONNX Runtime."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator
from typing import Any

from torch import fx

from sparsebit.deploy.comparing.file_model import Feeds, as_feeds
from sparsebit.deploy.loading.build import build
from sparsebit.deploy.loading.compare import compare, compare_other_sizes
from sparsebit.deploy.loading.join_nodes import joined_nodes
from sparsebit.deploy.loading.read_file import read_model
from sparsebit.deploy.loading.refusals import refuse_other_files
from sparsebit.deploy.onnx_graph.packages import numpy, onnx
from sparsebit.deploy.onnx_graph.qdq_graph import Graph
from sparsebit.deploy.sessions.random_inputs import made_up_feeds
from sparsebit.deploy.sessions.runtime_sessions import open_session
from sparsebit.deploy.sessions.session import Session
from sparsebit.errors import DeploymentError

TOLERANCE = 1e-4
OF_HALVES = 1e-2  # of files with float16 weights, which runtimes round at other places
NUM_COMPARED = 4  # batches
_WIDER = 4  # times the first sample is the second one: into the saturated parts of activations


def load_onnx(
    path: str | os.PathLike[str], data: Iterable[Any] | None = None, *, tolerance: float = TOLERANCE
) -> fx.GraphModule:
    """The float model of an ONNX file (opsets 11 to 26), in eval mode, as a torch.fx GraphModule.

    Convolutions, linear layers, norms and embeddings are layers of `torch.nn` with parameters, named as in the file;
    other operators are functions of torch. The module takes the file's inputs in their order, or by their names.

    Its outputs are compared with ONNX Runtime, each node as it is written, on the first batches of `data` (as the model
    takes them; tuples with labels too), or on random inputs: a difference of more than `tolerance` of an output's range
    is an error (1e-2, where the file has float16 weights). So is one at another batch size, or at another size of an
    axis that the file leaves open, if ONNX Runtime takes that size. Errors are DeploymentErrors; quantized files, and
    files with subgraphs, are refused.
    """
    model = read_model(path)
    nodes = Graph(model).nodes
    refuse_other_files(model, nodes, path)
    session = open_session(path, optimize=False)  # each node as it is written: fusions may compute something else
    feeds = _feeds(model, data, session, str(path))
    first = next(feeds, None)
    if first is None:
        raise DeploymentError(f"{path}: data holds no batch, so there is nothing to compare the module on")
    try:  # before the first run: the rows refuse results that no machine has memory for
        module = build(model, joined_nodes(model, nodes), first).eval()
    except DeploymentError as error:
        raise DeploymentError(f"{path}: {error}") from error
    is_half = any(tensor.data_type == onnx.TensorProto.FLOAT16 for tensor in model.graph.initializer)
    if is_half and tolerance == TOLERANCE:
        tolerance = OF_HALVES
    for one in itertools.islice(itertools.chain([first], feeds), NUM_COMPARED):
        compare(module, session, one, tolerance, str(path))
    compare_other_sizes(model, module, session, first, tolerance, str(path))
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
    yield one
    shapes = session.input_shapes
    if all(shape and shape[0] is None for shape in shapes.values()):
        wider = {name: array * _WIDER if array.dtype.kind == "f" else array for name, array in one.items()}
        several = {name: numpy.concatenate([array, wider[name][..., ::-1]]) for name, array in one.items()}
        if _runs(session, several):  # else its first axis is not that of samples
            yield several
    integers = [name for name, array in one.items() if array.dtype.kind in "iu" and not array.any()]
    for most in (100, 2) if integers else ():  # the zeros above are an index of any table, and the same one
        random = numpy.random.default_rng(0)
        varied = {n: random.integers(0, most, a.shape).astype(a.dtype) if n in integers else a for n, a in one.items()}
        if _runs(session, varied):
            yield varied
            break


def _runs(session: Session, feeds: Feeds) -> bool:
    try:
        session.run(feeds)
    except DeploymentError:
        return False
    return True


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
