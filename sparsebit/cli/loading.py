"""Models and weights by the names that a command line can carry."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import os
import pickle
import sys
import sysconfig
import traceback
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sparsebit.cli.options import Arguments
from sparsebit.errors import SparsebitError

_TORCH_FILES = (".pt", ".pth", ".bin", ".ckpt")
_SPARSEBIT = str(Path(__file__).parents[1])
_NOT_THEIRS = ("<", *sysconfig.get_paths().values(), _SPARSEBIT)
_TORCH_STARTS = (b"PK", b"\x80")  # a zip archive; a pickle, as torch.save wrote before 1.6
_WRAPPERS = ("state_dict", "model_state_dict", "model")


class LoadingError(SparsebitError):
    """A model, weights or data that the command line names and that cannot be had."""


def load_model(name: str, arguments: Arguments | None = None, weights: Path | None = None) -> nn.Module:
    """The model in eval mode: what `package.module:factory` gives when called (or is), filled with the weights."""
    thing = resolve(name, "--model")
    if isinstance(thing, nn.Module):
        if arguments:
            raise LoadingError(f"--model-args: {name} is a model already, not a factory that takes arguments")
        model = thing
    elif callable(thing):
        positional, keywords = arguments or Arguments()
        hint = "" if arguments else "; --model-args gives arguments"
        with users_code(f"--model {name} failed", for_type_errors=hint):
            model = thing(*positional, **keywords)
    else:
        raise LoadingError(
            f"--model {name} is {_a(thing)}; name a function or class that gives an nn.Module, or one itself"
        )
    if not isinstance(model, nn.Module):
        raise LoadingError(f"--model {name} gives {_a(model)}, not an nn.Module")
    if weights is not None:
        fill(model, read_weights(weights), weights)
    return model.eval()


def resolve(name: str, option: str) -> Any:
    """The object that `package.module:attribute` names; modules in the current folder are found too."""
    module_name, _, attribute = name.partition(":")
    if option == "--model":
        _refuse_files(name)
    if not module_name or not attribute:
        raise LoadingError(f"{option} {name!r}: write MODULE:NAME, such as torchvision.models:resnet18 or my_model:Net")
    if "/" in module_name or module_name.endswith(".py"):
        dotted = module_name.removesuffix(".py").strip("./").replace("/", ".")
        raise LoadingError(f"{option} {name!r}: write the module as Python imports it: {dotted}:{attribute}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does
    with users_code(f"{option} {name}: importing {module_name} failed"):
        try:
            thing = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
                raise
            raise LoadingError(
                f"{option} {name}: there is no module {error.name!r} (looked in {os.getcwd()} and in what is installed)"
            ) from None
    for part in attribute.split("."):
        with users_code(f"{option} {name}: {part} cannot be had"):
            found = hasattr(thing, part)
        if not found:
            near = difflib.get_close_matches(part, [known for known in dir(thing) if not known.startswith("_")])
            raise LoadingError(
                f"{option} {name}: {getattr(thing, '__name__', thing)} has no {part!r}"
                + (f"; did you mean {' or '.join(near)}?" if near else "")
            )
        thing = getattr(thing, part)
    return thing


def read_weights(file: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint by name. Nothing is ever unpickled but tensors and plain containers."""
    if not file.is_file():
        raise LoadingError(f"--weights {file}: there is no such file (looked from {os.getcwd()})")
    if file.suffix == ".safetensors":
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            return load_file(file)
        except SafetensorError as error:
            raise LoadingError(f"--weights {file}: not a whole safetensors file ({error})") from None
    if file.suffix not in _TORCH_FILES:
        raise LoadingError(f"--weights {file}: unknown kind; allowed: .safetensors, {', '.join(_TORCH_FILES)}")
    found = _unpickled(file)
    for key in _WRAPPERS:
        if isinstance(found, Mapping) and isinstance(found.get(key), Mapping):
            found = found[key]
            break
    if not isinstance(found, Mapping) or not found or not all(isinstance(value, Tensor) for value in found.values()):
        shown = f"a mapping of {', '.join(map(str, list(found)[:5]))}" if isinstance(found, Mapping) else _a(found)
        raise LoadingError(
            f"--weights {file}: holds {shown}; wanted is a state_dict, or a mapping with one as "
            f"{' or '.join(map(repr, _WRAPPERS))}"
        )
    return dict(found)


def _unpickled(file: Path) -> Any:
    """What torch.load gives, without running anything that the file brings."""
    try:
        with file.open("rb") as stream:
            start = stream.read(2)
    except OSError as error:
        raise LoadingError(f"--weights {file}: cannot be read ({error.strerror})") from None
    if not start.startswith(_TORCH_STARTS):
        raise LoadingError(f"--weights {file}: not a file of torch.save (it starts with {start!r})")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of pickles of other programs; errors are handled below
            return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise LoadingError(
            f"--weights {file}: holds Python objects, which may run code when they are loaded, so it was not opened; "
            "save tensors only: torch.save(model.state_dict(), ...), or a .safetensors file"
        ) from None
    except Exception as error:  # the reader of pickles raises whatever its bytes lead to
        if "TorchScript" in str(error):
            raise LoadingError(
                f"--weights {file}: is a TorchScript archive; save its tensors: "
                "torch.save(torch.jit.load(FILE).state_dict(), ...)"
            ) from None
        raise LoadingError(f"--weights {file}: not a whole file of torch.save ({_first_line(error)})") from None


def fill(model: nn.Module, tensors: dict[str, Tensor], file: Path) -> None:
    """Load a state_dict; one that does not fit is an error that lists what is missing and what is left over."""
    if all(name.startswith("module.") for name in tensors):  # saved from DataParallel
        tensors = {name.removeprefix("module."): tensor for name, tensor in tensors.items()}
    own = model.state_dict()
    storages = {tensor.data_ptr() for name, tensor in own.items() if name in tensors and tensor.numel()}
    missing = [
        name
        for name, tensor in own.items()
        if isinstance(tensor, Tensor)
        and name not in tensors
        and not name.endswith("num_batches_tracked")  # files from before torch 0.4.1 have none
        and tensor.data_ptr() not in storages  # tied to a tensor that is there
    ]
    unexpected = [name for name in tensors if name not in own]
    shapes = [
        f"{name} {tuple(tensor.shape)} (model: {tuple(own[name].shape)})"
        for name, tensor in tensors.items()
        if name in own and own[name].shape != tensor.shape
    ]
    faults = {"missing": missing, "unexpected": unexpected, "of another shape": shapes}
    if any(faults.values()):
        lines = [f"\n  {len(names)} {kind}: {_listed(names)}" for kind, names in faults.items() if names]
        raise LoadingError(f"--weights {file} does not fit {type(model).__name__}:{''.join(lines)}")
    model.load_state_dict(tensors, strict=False)


@contextlib.contextmanager
def users_code(what: str, *, for_type_errors: str = "", theirs_alone: bool = True) -> Iterator[None]:
    """Around the user's own code: what it raises becomes a LoadingError that begins with `what`.

    So does `sys.exit`, which would end the command as if all had gone well. Where sparsebit runs between (not
    `theirs_alone`), what its own code raises stays as it is.
    """
    try:
        yield
    except (SparsebitError, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:
        if not theirs_alone and _is_ours(error):
            raise
        hint = for_type_errors if isinstance(error, TypeError) else ""
        raise LoadingError(f"{what}: {cause(error)}{hint}") from error


def cause(error: BaseException) -> str:
    """`ValueError: text (net.py:12)`: an exception of the user's code in one line, with the last line of theirs."""
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(_NOT_THEIRS)
    ]
    where = f" ({os.path.relpath(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    if isinstance(error, SystemExit):
        return f"it called sys.exit({'' if error.code is None else repr(error.code)}){where}"
    return f"{type(error).__name__}: {_first_line(error)}{where}"


def _is_ours(error: BaseException) -> bool:
    """Whether sparsebit's own code raised it: a fault of ours, of which the traceback is wanted."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and frames[-1].filename.startswith(_SPARSEBIT) and not isinstance(error, SystemExit)


def _refuse_files(name: str) -> None:
    """A file where a model is named: what to do instead."""
    suffix = Path(name).suffix.lower()
    if suffix == ".onnx":
        raise LoadingError(
            f"--model {name}: is an ONNX file, and quantize and profile take the PyTorch model that it was exported "
            "from, as MODULE:NAME. Without that model: sparsebit audit and sparsebit check look at ONNX files of any "
            "tool, and onnxruntime.quantization quantizes them"
        )
    if suffix in (*_TORCH_FILES, ".safetensors"):
        raise LoadingError(f"--model {name}: is a file of weights; give --weights {name}, and the model as MODULE:NAME")


def _listed(names: Iterable[str], most: int = 10) -> str:
    names = list(names)
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0]


def _a(thing: object) -> str:
    return f"a {type(thing).__name__}"
