"""`SavableModel`: a model that is saved, loaded, pickled and copied, with all that was done to it since it was made."""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from typing_extensions import Self

from sparsebit.config.steps import BATCHNORM_TUNING
from sparsebit.errors import CaptureError, CheckpointError, ConfigError, SparsebitError
from sparsebit.execution.batches import Call, as_call
from sparsebit.execution.blocks import whole_graph
from sparsebit.execution.distributed import gather_shards, once
from sparsebit.graph.copying import rebind_functions, without_history
from sparsebit.graph.patterns import is_itself
from sparsebit.quantization import checkpoint, manifest
from sparsebit.quantization.calibrated_model import CalibratedModel
from sparsebit.quantization.first_sparsebit import refuse_first_sparsebit
from sparsebit.quantization.float_parameters import FloatParameters
from sparsebit.quantization.inserted_factors import InsertedFactor, insert, remove
from sparsebit.quantization.ops.quant_opr import WeightedQuantOpr
from sparsebit.quantization.quant_config import parse_qconfig
from sparsebit.quantization.quantizers.base import Quantizer
from sparsebit.quantization.sites import Plan
from sparsebit.quantization.stages import Transform, name_of

log = logging.getLogger(__name__)

_WITHOUT_ROUNDING = (BATCHNORM_TUNING, "equalize", "smooth")


class SavableModel(CalibratedModel):
    """What `QuantModel` keeps of itself: what makes it again from the float model."""

    # Whether algorithms changed weights before the model was saved, or tuned its norms; `float_parameters` is empty.
    float_values_are_lost = False

    @property
    def float_parameters(self) -> FloatParameters:
        """What weights and biases were in the float model, of those that algorithms have changed."""
        kept: FloatParameters = self.__dict__.setdefault("_float_parameters", FloatParameters())
        return kept

    @contextlib.contextmanager
    def in_float(self) -> Iterator[None]:
        """Inside, the model computes what the float model does: quantization off, the float model's parameters."""
        switches = {quantizer: quantizer.use_quant for quantizer in self.quantizers()}
        with contextlib.ExitStack() as stack:
            if self._root is not None:
                self.float_parameters.drop_outdated(self._root.graph_module)
                for block in whole_graph(self._root.graph_module):
                    stack.enter_context(self.float_parameters.original(block))
            try:
                self.set_quant(w_quant=False, a_quant=False)
                yield
            finally:
                for quantizer, is_on in switches.items():
                    quantizer.use_quant = is_on

    def forget_float_parameters(self) -> None:
        """Note that what the float model computes is not known any more: its batch norms have new statistics."""
        self.__dict__["_float_parameters"] = FloatParameters()
        self.float_values_are_lost = True

    def insert_factors(self, factors: Sequence[InsertedFactor]) -> None:
        """Put multiplications by a factor per channel (one, at first) into the graph; a saved model has them too."""
        self._require_settled("insert_factors")
        if self._root is None:
            raise CaptureError(
                "insert_factors() needs a graph of the whole model, which could not be traced: see coverage"
            )
        insert(self._root.graph_module, factors)
        self._inserted_factors += tuple(factors)

    def remove_factors(self, names: Iterable[str]) -> None:
        """Take inserted multiplications out of the graph; what they multiplied by is lost."""
        self._require_settled("remove_factors")
        gone = [factor for factor in self._inserted_factors if factor.name in set(names)]
        if gone and self._root is not None:
            remove(self._root.graph_module, gone)
        self._inserted_factors = tuple(factor for factor in self._inserted_factors if factor not in gone)

    def with_plan(self, plan: Plan) -> Self:
        """A copy of this calibrated model with the sites of `plan` alone, which are among its own; the rest is float.

        Weights and the numbers of the quantizers that stay are those of this model: nothing is calibrated again. What
        algorithms made of a layer whose weight is float now is the float model's again.
        """
        self._require_settled("with_plan")
        if missing := plan.missing_in(self.plan):
            raise ConfigError(f"the plan has sites that the model has not: {', '.join(missing[:5])}")
        description = {**self._description(), "plan": plan.to_dict()}
        old, kept = self.sites, set(plan.sites)
        originals = self._originals_of(set(old) - kept)
        state = self.state_dict(keep_vars=True)
        tensors = {key: originals.get(id(value), value).detach().to(value, copy=True) for key, value in state.items()}
        new = type(self)._revived(self.original, description, self._example, tensors, self._transforms, sites=kept)
        for name, quantizer in new.sites.items():
            quantizer.load_state_dict(old[name].state_dict())
            quantizer.use_quant = old[name].use_quant
        new.__dict__["_float_parameters"] = copy.copy(self.float_parameters)
        new.float_values_are_lost = self.float_values_are_lost
        if new._root is not None:
            new.float_parameters.drop_outdated(new._root.graph_module)
        new._make_room_for_biases()
        return new

    def _originals_of(self, sites: Collection[str]) -> dict[int, Tensor]:
        """What algorithms changed in the layers of these weight sites, as it is in the float model: by the id of the
        parameter.
        """
        layers = [
            m for m in self.model.modules() if is_itself(m, WeightedQuantOpr) and m.weight_quantizer.name in sites
        ]
        rounded = [name for name in self.applied_algorithms if name not in _WITHOUT_ROUNDING]
        if self.float_values_are_lost and layers and rounded:
            log.warning(
                "%s: the float values of what %s rounded are not known any more (a saved model has none), so "
                "these weights stay rounded as they were. Start from the float model",
                *(", ".join(layer.weight_quantizer.name for layer in layers), ", ".join(rounded)),
            )
        if self._root is None:
            return {}
        theirs = {id(parameter) for layer in layers for parameter in layer.op.parameters()}
        changed = self.float_parameters.changed(self._root.graph_module)
        return {id(parameter): value for parameter, value in changed if id(parameter) in theirs}

    # --- keeping

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write a self-describing folder (safetensors + JSON), as a whole: a process that reads it meanwhile, or finds
        it after a kill, sees the older saving or this one.

        With several processes rank 0 writes, and the others return when it has. Call it on all of them, or on rank 0
        alone; on all where the parameters are sharded, as they are gathered.
        """
        tensors = gather_shards(self.state_dict(keep_vars=True))
        # By its last name: machines may keep it under different paths.
        once(f"save({Path(folder).name!r})", lambda: checkpoint.write(folder, self._description(), tensors))
        return Path(folder)

    @classmethod
    def load(
        cls,
        folder: str | os.PathLike[str],
        model: nn.Module,
        *,
        example_inputs: Any = None,
        device: str | None = None,
        transforms: Sequence[Transform] = (),
    ) -> Self:
        """The saved model again, around a float `model` of the same architecture (its weights do not matter).

        `device`: in the place of the saved DEVICE. `example_inputs`: only where those of the saved model had no form in
        JSON. `transforms`: those that the saved model was built with; they are code, which a folder does not hold.
        """
        description, tensors = checkpoint.read(folder)
        saved, given = description.get("transforms", []), [name_of(step) for step in transforms]
        if saved != given:
            raise CheckpointError(
                f"{folder} was built with transforms={saved}, load() is given {given}; give those functions"
            )
        if device is not None:
            description["config"]["DEVICE"] = device
        example = (
            checkpoint.decode(description["example"]) if example_inputs is None else as_call(example_inputs, model)
        )
        try:
            return cls._revived(model, description, example, tensors, transforms)
        except ConfigError as error:  # a GPU that is not here, a quantizer that is not registered, ...
            raise CheckpointError(f"{folder}: {error}") from error
        except SparsebitError:
            raise
        except Exception as error:  # whatever torch and the model's own code raise when the tensors do not fit
            raise CheckpointError(
                f"{folder} was saved from another model than the {type(model).__name__} given, or needs the "
                f"example_inputs that it was built with{manifest.naming_notice(description)}:\n{error}"
            ) from error

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As of any module; a state_dict of the first Sparsebit is an error that says how to convert it."""
        refuse_first_sparsebit(state_dict)
        return super().load_state_dict(state_dict, strict, assign)

    def _description(self) -> dict[str, Any]:
        """What makes this model again, besides the float model and the tensors; goes to JSON."""
        return {
            "config": self.config.to_dict(),
            "example": checkpoint.encode(self._example),
            "switches": {"weight": self.is_quantized("weight"), "activation": self.is_quantized("activation")},
            "folded_layers": self._folded_layers,
            "inserted_factors": [factor.to_dict() for factor in self._inserted_factors],
            "own_code": dict(self._policy.own_code),
            "untouched": dict(self._policy.untouched),
            "transforms": [name_of(step) for step in self._transforms],
            "plan": None if self._given_plan is None else self._given_plan.to_dict(),
            "algorithms": list(self.applied_algorithms),
            "weights_changed": self.float_values_are_lost or bool(len(self.float_parameters)),
            "sites": {q.name: q.describe() for q in self.quantizers() if not q.fake_fused},
        }

    @classmethod
    def _revived(
        cls,
        model: nn.Module,
        description: dict[str, Any],
        example: Call | None,
        tensors: dict[str, Tensor],
        transforms: Sequence[Transform] = (),
        *,
        sites: set[str] | None = None,
    ) -> Self:
        """`sites`: those that the new model has, where it has fewer than `tensors` are of; their numbers stay out."""
        qmodel = cls.__new__(cls)
        nn.Module.__init__(qmodel)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the user was warned when the model was built first
            config, saved = parse_qconfig(description["config"]), description.get("plan")
            plan = Plan.from_dict({**saved, "config": config.to_dict()}) if saved else None
            cuts = {name: description.get(name, {}) for name in ("own_code", "untouched")}
            policy = cls._leaf_policy(config, **cuts)
            qmodel._set_up(model, config, example, policy, plan=plan, transforms=transforms)
        qmodel._fold_norms(lambda name, *_: name in description["folded_layers"])
        if inserted := [InsertedFactor.from_dict(record) for record in description.get("inserted_factors", [])]:
            qmodel.insert_factors(inserted)
        for quantizer in (q for q in qmodel.quantizers() if not q.fake_fused):
            site = manifest.site_of(description, quantizer.name)
            quantizer.set_bit(site.get("bits", quantizer.spec.bits))
        if sites is None:
            qmodel.load_state_dict(tensors)
            qmodel.set_quant(*manifest.switches_of(description))
        else:
            qmodel._load_all_but_quantizers(tensors)
        qmodel.applied_algorithms = tuple(description.get("algorithms", ()))
        qmodel.float_values_are_lost = bool(description.get("weights_changed", False))
        return qmodel.eval()

    def _load_all_but_quantizers(self, tensors: dict[str, Tensor]) -> None:
        quantizers = [name for name, module in self.named_modules() if isinstance(module, Quantizer)]
        own = self.state_dict()
        rest = {key for key in own if not key.startswith(tuple(f"{name}." for name in quantizers))}
        self.load_state_dict({key: tensors.get(key, value) if key in rest else value for key, value in own.items()})

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled as what makes it again: torch.fx graphs do not survive a pickle."""
        parts = (self.original, self._description(), self._example, self.state_dict(), self._transforms)
        return _unpickled, (type(self), self.training, *parts)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        memo.update(without_history(self) | without_history(self.original))
        made_again = ("_weights", "_built_state")
        own = {key: value for key, value in self.__dict__.items() if key not in made_again}
        new.__dict__.update(copy.deepcopy(own, memo))
        rebind_functions(self._code_modules(), new._code_modules(), memo)
        if self._weights_now() == self._built_weights:
            new._built_weights = new._weights_now()
        new._built_state = self._built_state.of_copy(new.original, new.source)
        return new


def _unpickled(kind: type[SavableModel], training: bool, *parts: Any) -> SavableModel:
    return kind._revived(*parts).train(training)
