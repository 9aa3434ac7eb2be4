"""Models and weights that the command line names: `--model MODULE:FACTORY`, `--weights FILE|DIR`.

Everything here runs the user's own code (imports, factories, data), which may raise anything, or call `sys.exit`. So
each such call is inside of `users_code`, which turns its exceptions into one `LoadingError` with the user's own line;
exceptions of Sparsebit's code keep their traceback, because they are bugs. Weights are unpickled as tensors only.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib
import logging
import os
import pickle
import sys
import sysconfig
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sparsebit.cli.inputs.made_weights import why_random
from sparsebit.cli.option_groups import TrainedModel
from sparsebit.cli.options import Arguments, refuse
from sparsebit.errors import CheckpointError, DeploymentError, SparsebitError

log = logging.getLogger(__name__)

_TORCH_FILES = (".pt", ".pth", ".bin", ".ckpt")
_SPARSEBIT = str(Path(__file__).parents[2])
_NOT_THEIRS = ("<", *sysconfig.get_paths().values(), _SPARSEBIT)  # starts of file names that are not the user's code
_TORCH_STARTS = (b"PK", b"\x80")  # a zip archive; a pickle, as torch.save wrote before 1.6
_WRAPPERS = ("state_dict", "model_state_dict", "model")


class LoadingError(SparsebitError):
    """A model, weights or data named on the command line that cannot be loaded."""


def load_model(
    name: str,
    arguments: Arguments | None = None,
    weights: Path | None = None,
    *,
    random_weights: bool = False,
    saved: Path | None = None,
) -> nn.Module:
    """The model in eval mode: the result of `package.module:factory`, or the object itself, with the weights.

    `weights`: a state_dict, or the folder of a pruned model. Without them, weights that seem to be random cause a
    warning, unless `random_weights` is set. `saved`: the folder of the quantized model whose weights replace them.
    """
    log.info("weights: %s", weights_source(name, weights, saved))
    made = make_model(name, arguments)
    if weights is not None:
        return filled(made.model, weights).eval()
    if saved is None and not random_weights and (reason := why_random(*made)):
        log.warning(
            "--model %s: its weights seem to be random, so every figure below is for an untrained model: %s. Give "
            "the trained ones with --weights FILE, or --random-weights if these are the ones that you mean",
            *(name, reason),
        )
    return made.model.eval()


def load_net(source: TrainedModel, saved: Path | None = None) -> nn.Module:
    """The model that the command line names, as `load_model` loads it."""
    return load_model(
        *(source.model, source.model_args, source.weights), random_weights=source.random_weights, saved=saved
    )


class Made(NamedTuple):
    """A model, a function that makes another (None if it does not come from a call), and the seconds that it took."""

    model: nn.Module
    factory: Callable[[], Any] | None = None
    seconds: float = 0.0


def make_model(name: str, arguments: Arguments | None = None) -> Made:
    """The result of `package.module:factory`, the object itself, or the model in an ONNX file."""
    if is_onnx(name):
        return Made(_from_onnx(name, arguments))
    thing = resolve(name, "--model")
    if isinstance(thing, nn.Module):
        if arguments:
            raise LoadingError(f"--model-args: {name} is a model already, not a factory that takes arguments")
        return Made(thing)
    if not callable(thing):
        raise LoadingError(f"--model {name} is {_a(thing)}; name a function or class that returns an nn.Module, or one")
    positional, keywords = arguments or Arguments()
    factory = functools.partial(thing, *positional, **keywords)
    hint = "" if arguments else "; --model-args sets arguments"
    start = time.monotonic()
    with users_code(f"--model {name} failed", for_type_errors=hint):
        model = factory()
    if not isinstance(model, nn.Module):
        raise LoadingError(f"--model {name} returns {_a(model)}, not an nn.Module")
    return Made(model, factory, time.monotonic() - start)


def is_onnx(name: str) -> bool:
    """Whether `--model` names an ONNX file."""
    return Path(name).suffix.lower() == ".onnx"


def import_model(name: str) -> None:
    """Import the module of `--model`, which may register what a config names; a file has none."""
    if not is_onnx(name):
        resolve(name, "--model")


def _from_onnx(name: str, arguments: Arguments | None) -> nn.Module:
    """The model in a float ONNX file, compared with ONNX Runtime on random inputs."""
    from sparsebit.deploy.loading.load_onnx import load_onnx

    if arguments:
        raise LoadingError(f"--model-args: {name} is a file, not a factory that takes arguments")
    try:
        return load_onnx(Path(name).expanduser())
    except DeploymentError as error:
        raise LoadingError(f"--model {error}") from error


def weights_source(name: str, weights: Path | None, saved: Path | None = None) -> str:
    """Where the weights come from: a file, a pruned folder, the folder of a quantized model, or the factory itself."""
    if saved is not None:
        return f"{saved}, a saved quantized model"
    if weights is None:
        return f"those of the file {name}" if is_onnx(name) else f"as {name} makes them (no --weights)"
    return str(weights) if pruned_folder(weights) is None else f"{pruned_folder(weights)}, a pruned model"


def pruned_folder(weights: Path) -> Path | None:
    """The folder of a pruned model that `weights` is, or that `weights` is a file in; None otherwise."""
    from sparsebit.sparse.shrinking.pruned_folder import CHANNELS, TENSORS

    folder = weights.expanduser()
    if not folder.is_dir() and folder.name in (CHANNELS, TENSORS):
        folder = folder.parent
    return folder if (folder / CHANNELS).is_file() else None


def refuse_weights(weights: Path | None, saved: Path) -> None:
    """Raise if weights are given and a saved quantized model has its own; a pruned folder only shrinks its layers."""
    is_file = weights is not None and pruned_folder(weights) is None
    refuse({f"--weights: {saved} holds the weights; omit {weights} (of a pruned model, give its folder)": is_file})


def filled(model: nn.Module, weights: Path) -> nn.Module:
    """The model with the weights of a file, or the smaller one of a folder that `sparsebit prune` wrote."""
    folder = pruned_folder(weights)
    if folder is None:
        fill(model, read_weights(weights), weights)
        return model
    from sparsebit.sparse import load

    try:
        return load(folder, model)
    except CheckpointError as error:
        raise LoadingError(f"--weights {weights}: {error}") from None


def resolve(name: str, option: str) -> Any:
    """The object that `package.module:attribute` names; modules in the current folder are found too."""
    module_name, _, attribute = name.partition(":")
    if option == "--model":
        _refuse_files(name)
    dotted = module_name.removesuffix(".py").strip("./").replace("/", ".")
    if not module_name or not attribute or "/" in module_name or module_name.endswith(".py"):
        right = f"{dotted}:{attribute}" if dotted and attribute else "torchvision.models:resnet18 or my_model:Net"
        raise LoadingError(f"{option} {name!r}: write MODULE:NAME, the module as Python imports it: {right}")
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
        with users_code(f"{option} {name}: reading {part} failed"):
            found = hasattr(thing, part)
        if not found:
            near = difflib.get_close_matches(part, [known for known in dir(thing) if not known.startswith("_")])
            meant = f"; did you mean {' or '.join(near)}?" if near else ""
            raise LoadingError(f"{option} {name}: {getattr(thing, '__name__', thing)} has no {part!r}{meant}")
        thing = getattr(thing, part)
    return thing


def read_weights(file: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint by name. Only tensors and plain containers are ever unpickled."""
    if not file.is_file() or file.suffix not in (*_TORCH_FILES, ".safetensors"):
        fault = f"unknown kind; allowed: .safetensors, {', '.join(_TORCH_FILES)}"
        if not file.is_file():
            fault = _folder_hint(file) if file.is_dir() else f"there is no such file (looked from {os.getcwd()})"
        raise LoadingError(f"--weights {file}: {fault}")
    if file.suffix == ".safetensors":
        return read_safetensors(file, "--weights")
    found = _unpickled(file)
    if isinstance(found, Mapping):
        found = next((found[key] for key in _WRAPPERS if isinstance(found.get(key), Mapping)), found)
    if not isinstance(found, Mapping) or not found or not all(isinstance(value, Tensor) for value in found.values()):
        shown = f"a mapping of {', '.join(map(str, list(found)[:5]))}" if isinstance(found, Mapping) else _a(found)
        named = " or ".join(map(repr, _WRAPPERS))
        raise LoadingError(f"--weights {file}: holds {shown}; give a state_dict, or a mapping with one as {named}")
    return dict(found)


def read_safetensors(file: Path, option: str) -> dict[str, Tensor]:
    """The tensors of a safetensors file, which an option names."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(file)
    except SafetensorError as error:
        raise LoadingError(f"{option} {file}: not a whole safetensors file ({error})") from None


def _unpickled(file: Path) -> Any:
    """The result of torch.load, without running code from the file."""
    try:
        with file.open("rb") as stream:
            start = stream.read(2)
        fault = f"not a file of torch.save (it starts with {start!r})"
        if start.startswith(_TORCH_STARTS):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # warnings on pickles of other programs; errors are handled below
                return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        fault = (
            "holds Python objects, which may run code when they are loaded, so it was not opened; save tensors only: "
        )
        fault += "torch.save(model.state_dict(), ...), or a .safetensors file"
    except Exception as error:  # a damaged pickle may raise anything
        fault = f"not a whole file of torch.save ({_first_line(error)})"
        if "TorchScript" in str(error):
            fault = "is a TorchScript archive; save its tensors: torch.save(torch.jit.load(FILE).state_dict(), ...)"
    raise LoadingError(f"--weights {file}: {fault}")


def fill(model: nn.Module, tensors: dict[str, Tensor], file: Path) -> None:
    """Load a state_dict; if it does not fit, the error lists missing and unexpected names."""
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
        and tensor.data_ptr() not in storages  # tied to a tensor that is in the file
    ]
    unexpected = [name for name in tensors if name not in own]
    shapes = [
        f"{name} {tuple(tensor.shape)} (model: {tuple(own[name].shape)})"
        for name, tensor in tensors.items()
        if name in own and own[name].shape != tensor.shape
    ]
    faults = {"missing": missing, "unexpected": unexpected, "of another shape": shapes}
    if any(faults.values()):
        lines = [
            f"\n  {len(names)} {kind}: {', '.join(names[:10])}"
            + (f" and {len(names) - 10} more" if len(names) > 10 else "")
            for kind, names in faults.items()
            if names
        ]
        if shapes and not missing and not unexpected:
            lines.append("\n  If they are those of a pruned model, give the folder that sparsebit prune wrote")
        raise LoadingError(f"--weights {file} does not fit {type(model).__name__}:{''.join(lines)}")
    model.load_state_dict(tensors, strict=False)


@contextlib.contextmanager
def users_code(what: str, *, for_type_errors: str = "", hint: str = "", theirs_alone: bool = True) -> Iterator[None]:
    """For calls of the user's own code: its exceptions become a LoadingError that begins with `what`.

    `sys.exit` too, which would otherwise end the command with success. If Sparsebit's own code also runs inside (not
    `theirs_alone`), exceptions of that code stay as they are.
    """
    try:
        yield
    except (SparsebitError, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:
        if not theirs_alone and _is_ours(error):
            raise
        for_this_type = for_type_errors if isinstance(error, TypeError) else ""
        raise LoadingError(f"{what}: {cause(error)}{for_this_type}{hint}") from error


def cause(error: BaseException) -> str:
    """`ValueError: text (net.py:12)`: an exception of the user's code in one line, with the last line of theirs."""
    frames = [one for one in traceback.extract_tb(error.__traceback__) if not one.filename.startswith(_NOT_THEIRS)]
    where = f" ({os.path.relpath(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    if isinstance(error, SystemExit):
        return f"it called sys.exit({'' if error.code is None else repr(error.code)}){where}"
    return f"{type(error).__name__}: {_first_line(error)}{where}"


def _is_ours(error: BaseException) -> bool:
    """Whether sparsebit's own code raised it: a bug of Sparsebit, whose traceback should be shown."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and frames[-1].filename.startswith(_SPARSEBIT) and not isinstance(error, SystemExit)


def _refuse_files(name: str) -> None:
    """Raise for a file in the place of a model; the message says what to do instead."""
    weights = f"is a file of weights; give --weights {name}, and the model as MODULE:NAME"
    hints = dict.fromkeys((*_TORCH_FILES, ".safetensors"), weights)
    if hint := hints.get(Path(name).suffix.lower()):
        raise LoadingError(f"--model {name}: {hint}")


def _folder_hint(folder: Path) -> str:
    """Advice for a folder that is not that of a pruned model."""
    if (folder / "sparsebit.json").is_file():
        return "is the folder of a quantized model; sparsebit export, check and profile take it as --quantized"
    return "is a folder; give a file in it (a state_dict), or a folder that sparsebit prune wrote (with channels.json)"


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0]


def _a(thing: object) -> str:
    return f"a {type(thing).__name__}"
