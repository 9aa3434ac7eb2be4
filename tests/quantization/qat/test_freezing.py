from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from sparsebit.errors import ConfigError
from sparsebit.quantization import FreezeSchedule, QuantModel
from tests.quantization.tiny_training import numbers, ready, train


def changed(qmodel: QuantModel, num_steps: int = 1) -> set[str]:
    """The last parts of the names of what a step of training changes."""
    before = numbers(qmodel)
    train(qmodel, num_steps)
    return {name for name, value in numbers(qmodel).items() if not torch.equal(value, before[name])}


def statistics(names: set[str]) -> set[str]:
    return {name for name in names if "running" in name or "num_batches" in name}


def learned(names: set[str]) -> set[str]:
    return {name for name in names if "_quantizer" in name}


class TestBatchNorm:
    def test_statistics_stand_still_though_train_is_called_again(self) -> None:
        qmodel = ready()
        assert statistics(changed(qmodel))
        qmodel.freeze("batchnorm")
        qmodel.eval()
        qmodel.train()
        assert not statistics(changed(qmodel, 2))
        assert {"model.bn1.weight", "model.conv1.op.weight"} <= changed(qmodel)

    def test_norms_compute_with_them(self) -> None:
        qmodel, x = ready(), torch.randn(4, 1, 8, 8)
        with torch.no_grad():
            by_batch = qmodel(x)
            qmodel.freeze("batchnorm")
            qmodel.train()
            frozen = qmodel(x)
        assert torch.equal(frozen, qmodel.eval()(x)) and not torch.allclose(frozen, by_batch)

    def test_a_parent_does_not_thaw_them(self) -> None:
        qmodel = ready()
        qmodel.freeze("batchnorm")
        parent = torch.nn.Sequential(qmodel)
        parent.train()
        assert qmodel.training and not qmodel.model.bn1.training

    def test_unfreeze(self) -> None:
        qmodel = ready()
        qmodel.freeze("batchnorm")
        qmodel.unfreeze("batchnorm")
        assert qmodel.model.bn1.training and statistics(changed(qmodel))

    def test_in_eval_mode_unfreezing_leaves_the_mode_alone(self) -> None:
        qmodel = ready().eval()
        qmodel.freeze("batchnorm")
        qmodel.unfreeze("batchnorm")
        assert not qmodel.model.bn1.training

    def test_tuning_takes_new_statistics_of_frozen_norms(self) -> None:
        qmodel, x = ready(), torch.randn(8, 1, 8, 8)
        qmodel.freeze("batchnorm")
        with torch.no_grad(), qmodel.batchnorm_tuning():
            qmodel(x)
            assert int(qmodel.model.bn1.num_batches_tracked) == 1

    def test_a_copy_is_frozen_too(self) -> None:
        qmodel = ready()
        qmodel.freeze("batchnorm")
        assert not statistics(changed(copy.deepcopy(qmodel).train()))


class TestScales:
    @pytest.mark.parametrize("way", ["lsq", "lsq+", "pact"])
    def test_they_stand_still(self, way: str) -> None:
        qmodel = ready(way)
        assert learned(changed(qmodel))
        qmodel.freeze("scales")
        assert not learned(changed(qmodel.train(), 2))
        qmodel.unfreeze("scales")
        assert learned(changed(qmodel))

    def test_what_somebody_else_has_frozen_stays_so(self) -> None:
        qmodel = ready()
        names = [name for name, _ in qmodel.named_parameters() if name.endswith("scale")]
        qmodel.get_parameter(names[0]).requires_grad_(False)
        schedule = FreezeSchedule(qmodel, scales=1)
        assert not qmodel.get_parameter(names[0]).requires_grad
        schedule.step()
        qmodel.freeze("scales")  # a second time
        assert not any(qmodel.get_parameter(name).requires_grad for name in names)
        qmodel.unfreeze("scales")
        assert [name for name in names if not qmodel.get_parameter(name).requires_grad] == names[:1]

    def test_quantizers_that_are_off_for_good_stay_so(self) -> None:
        qmodel = ready()
        off = next(quantizer for quantizer in qmodel.quantizers() if not quantizer.fake_fused)
        off.set_fake_fused()
        qmodel.freeze("scales")
        qmodel.unfreeze("scales")
        assert not any(parameter.requires_grad for parameter in off.parameters())


@pytest.mark.parametrize("way", ["following", "dorefa"])
def test_observers(way: str) -> None:
    qmodel = ready(way)
    assert learned(changed(qmodel, 2))  # the first step begins with the weights that were calibrated
    qmodel.freeze("observers")
    assert not learned(changed(qmodel.train(), 2))
    qmodel.unfreeze("observers")
    assert learned(changed(qmodel))


def test_without_names_everything_that_is_there() -> None:
    qmodel = ready("lsq")
    qmodel.freeze()
    found = changed(qmodel)
    assert not statistics(found) and not learned(found) and "model.conv1.op.weight" in found


class TestSchedule:
    def test_each_part_at_its_iteration(self) -> None:
        qmodel = ready("lsq")
        schedule = FreezeSchedule(qmodel, batchnorm=2, scales=3)
        seen: list[tuple[bool, bool]] = []
        for _ in range(5):
            found = changed(qmodel.train())
            seen.append((bool(statistics(found)), bool(learned(found))))
            schedule.step()
        assert seen == [(True, True), (True, True), (False, True), (False, False), (False, False)]

    def test_from_the_start(self) -> None:
        qmodel = ready("following")
        FreezeSchedule(qmodel, observers=0)
        assert not learned(changed(qmodel))

    def test_its_state_goes_forth_and_back(self) -> None:
        qmodel = ready("lsq")
        schedule = FreezeSchedule(qmodel, scales=2)
        start = schedule.state_dict()
        for _ in range(2):
            schedule.step()
        fresh = ready("lsq")
        FreezeSchedule(fresh, scales=2).load_state_dict(schedule.state_dict())
        assert not learned(changed(fresh))
        schedule.load_state_dict(start)
        assert learned(changed(qmodel))


class TestFaults:
    @pytest.mark.parametrize(("part", "message"), [
        ("observers", r"init_QAT\(follow_ranges=True\)"), ("scales", "lsq, lsq\\+ or pact"),
        ("batchnorm", "BN_TUNING: true"), ("weights", "allowed: observers, batchnorm, scales"),
    ])  # fmt: skip
    def test_what_the_model_does_not_have(self, part: str, message: str) -> None:
        qmodel = ready("fixed", {"SCHEDULE.FUSE_BN": True})
        with pytest.raises(ConfigError, match=message):
            qmodel.freeze(part)  # type: ignore[arg-type]
        if part != "weights":
            with pytest.raises(ConfigError, match=message):
                FreezeSchedule(qmodel, **{part: 5})

    def test_negative(self) -> None:
        with pytest.raises(ConfigError, match="scales=-1"):
            FreezeSchedule(ready(), scales=-1)


def test_frozen_statistics_survive_packing() -> None:
    """Norms that are computed again in the backward use the running statistics too."""
    grads: list[Tensor] = []
    for packs in (False, True):
        qmodel = ready()
        qmodel.freeze("batchnorm")
        qmodel.pack_saved_activations(packs)
        torch.manual_seed(1)
        qmodel(torch.randn(4, 1, 8, 8)).square().sum().backward()
        grads.append(qmodel.model.conv1.op.weight.grad)
    assert torch.equal(*grads)
