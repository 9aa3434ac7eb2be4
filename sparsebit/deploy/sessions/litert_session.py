"""A `.tflite` file in LiteRT's interpreter, on the CPU. The file's integers become floats, and floats its integers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparsebit.deploy.onnx_graph.packages import numpy
from sparsebit.deploy.sessions.native_output import native_output_read
from sparsebit.deploy.sessions.program_facts import KEY, Port, ProgramFacts, ProgramSession
from sparsebit.deploy.sessions.sealed_file import require_whole
from sparsebit.deploy.sessions.session import File
from sparsebit.errors import DeploymentError, MissingExtraError

_IDENTIFIER = b"TFL3"
_MODEL = "QuantModel_"  # in the names of values that a layer of the model computes or stores


class LiteRtSession(ProgramSession):
    """`num_threads`: 0 lets LiteRT choose."""

    runtime = "litert"

    def __init__(self, file: File, num_threads: int = 0) -> None:
        name = "the program" if isinstance(file, bytes) else os.fspath(file)
        data = file if isinstance(file, bytes) else Path(file).read_bytes()
        # The interpreter reads a damaged file beyond its end.
        if data[4:8] != _IDENTIFIER:
            raise DeploymentError(f"{name} does not load in LiteRT: it is not a .tflite file")
        require_whole(data, name)
        module = _interpreter_module()
        try:
            with native_output_read():
                self.interpreter = module.Interpreter(model_content=data, num_threads=num_threads or None)
                self.interpreter.allocate_tensors()
                self.runner = self.interpreter.get_signature_runner()
        except (RuntimeError, ValueError) as error:
            raise DeploymentError(f"{name} does not load in LiteRT: {str(error).splitlines()[0]}") from error
        self.given, self.made = (
            sorted(ports.items(), key=lambda port: _number(port[0]))
            for ports in (self.runner.get_input_details(), self.runner.get_output_details())
        )
        stored = _stored_facts(data)
        super().__init__(self._own_facts() if stored is None else ProgramFacts.from_json(stored, name))

    def run(self, feeds: Mapping[str, Any]) -> list[Any]:
        arrays = self.checked(feeds)
        inputs = {key: _to_codes(array, detail) for (key, detail), array in zip(self.given, arrays, strict=True)}
        try:
            found = self.runner(**inputs)
        except (RuntimeError, ValueError) as error:
            raise DeploymentError(f"the program does not run in LiteRT: {error}") from error
        kinds = [port.dtype for port in self.facts.outputs]
        return [_to_numbers(found[key], detail, kind) for (key, detail), kind in zip(self.made, kinds, strict=True)]

    def _own_facts(self) -> ProgramFacts:
        """Of a program that another tool wrote; integers with a scale count as floats."""
        inputs, outputs = (tuple(_port(key, detail) for key, detail in ports) for ports in (self.given, self.made))
        return ProgramFacts("", inputs, outputs)


@dataclass(frozen=True)
class Operator:
    """One operator of a file. `name`: that of a value of its layer; `is_integer`: it reads and writes integers."""

    op: str
    name: str
    shape: tuple[int, ...]
    is_integer: bool
    reads_integers: bool


def operators(data: bytes) -> list[Operator]:
    """The operators of a file, as it is written."""
    module = _interpreter_module()
    plain = module.OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES
    interpreter = module.Interpreter(model_content=data, experimental_op_resolver_type=plain)
    tensors = {one["index"]: one for one in interpreter.get_tensor_details()}
    found = []
    for one in interpreter._get_ops_details():
        inputs, outputs = ([tensors[place] for place in one[key] if place in tensors] for key in ("inputs", "outputs"))
        # Shapes, axes and biases are int32: the first two inputs are data and weight.
        kinds = [tensor["dtype"].__name__ for tensor in (*inputs[:2], *outputs)]
        kinds = [kind for kind in kinds if kind != "int32"]
        is_integer = bool(kinds) and all(kind in ("int8", "int16") for kind in kinds)
        last: Any = outputs[0] if outputs else {"name": "", "shape": ()}
        shape = tuple(int(size) for size in last["shape"])
        # The result of the last layer is called like the output; its weight and its bias are called like the layer.
        names = [last["name"], *(tensor["name"] for tensor in inputs[1:])]
        name = next((one for one in names if _MODEL in one), last["name"])
        found.append(Operator(one["op_name"], name, shape, is_integer, "int8" in kinds[:2]))
    return found


def with_facts(data: bytes, facts: ProgramFacts) -> bytes:
    """The file with the facts in its metadata."""
    import flatbuffers
    from ai_edge_litert import schema_py_generated as schema

    model = schema.ModelT.InitFromPackedBuf(data, 0)
    buffer, entry = schema.BufferT(), schema.MetadataT()
    buffer.data = numpy.frombuffer(facts.to_json().encode(), dtype=numpy.uint8)
    model.buffers.append(buffer)
    entry.name, entry.buffer = KEY, len(model.buffers) - 1
    model.metadata = [*(model.metadata or []), entry]
    builder = flatbuffers.Builder(len(data) + len(buffer.data))
    builder.Finish(model.Pack(builder), file_identifier=_IDENTIFIER)
    return bytes(builder.Output())


def _stored_facts(data: bytes) -> str | None:
    from ai_edge_litert import schema_py_generated as schema

    model = schema.Model.GetRootAs(data, 0)
    for place in range(model.MetadataLength()):
        entry = model.Metadata(place)
        if entry.Name() == KEY.encode():
            return bytes(model.Buffers(entry.Buffer()).DataAsNumpy()).decode(errors="replace")
    return None


def _interpreter_module() -> Any:
    try:
        from ai_edge_litert import interpreter
    except Exception:  # a broken package raises anything
        raise MissingExtraError("ai-edge-litert", "litert", "running a .tflite file") from None
    return interpreter


def _number(key: str) -> int:
    """`args_10` -> 10."""
    digits = key.rpartition("_")[2]
    return int(digits) if digits.isdigit() else 0


def _to_codes(array: Any, detail: Mapping[str, Any]) -> Any:
    """The array as the file's input takes it: the converter drops a quantize op that begins the program."""
    scale, zero_point = detail["quantization"]
    if not scale or array.dtype.kind != "f" or detail["dtype"] is array.dtype.type:
        return array
    ends = numpy.iinfo(detail["dtype"])
    codes = numpy.rint(array / numpy.float32(scale)) + numpy.float32(zero_point)
    return numpy.clip(codes, ends.min, ends.max).astype(detail["dtype"])


def _to_numbers(array: Any, detail: Mapping[str, Any], kind: str) -> Any:
    scale, zero_point = detail["quantization"]
    if not scale or array.dtype.kind == "f" or not kind.startswith("float"):
        return array.copy()
    return (array.astype(numpy.float32) - numpy.float32(zero_point)) * numpy.float32(scale)


def _port(key: str, detail: Mapping[str, Any]) -> Port:
    kind = "float32" if detail["quantization"][0] else detail["dtype"].__name__
    return Port(key, kind, tuple(int(size) for size in detail["shape"]))
