from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import Field
from torch import nn

from sparsebit.config.options import selected_options
from sparsebit.config.section import Section
from sparsebit.errors import CalibrationError, ConfigError
from sparsebit.numerics.spec import PerChannel, PerGroup, PerTensor, TensorSpec
from sparsebit.quantization import QuantModel, parse_qconfig
from sparsebit.quantization.observers import Observer, build_observer, register_observer
from sparsebit.quantization.observers import observer as observer_module
from sparsebit.quantization.observers.leveled_histogram import MOST_LEVELS
from sparsebit.quantization.observers.statistics import MinMax
from sparsebit.registry import OBSERVERS
from tests.quantization.tiny import calibrated, qconfig, run, site

NAMES = ["minmax", "moving_average", "percentile", "mse", "kl_histogram", "aciq"]
AFFINE = TensorSpec(8, symmetric=False)


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_all_six_are_registered_whatever_the_case() -> None:
    assert set(NAMES) <= set(OBSERVERS.names())
    assert type(build_observer("KL_Histogram", AFFINE)) is type(build_observer("kl_histogram", AFFINE))
    with pytest.raises(ConfigError, match="did you mean 'percentile'"):
        build_observer("percentil", AFFINE)


@pytest.mark.parametrize("target", ["weight", "activation"])
@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "affine"])
@pytest.mark.parametrize(
    ("granularity", "num_rows"),
    [(PerTensor(), None), (PerChannel(1), 3), (PerChannel(-1), 5), (PerGroup(1, 2), 4 * 2 * 5)],
    ids=["tensor", "channel", "last_axis", "group"],
)
def test_range_has_a_number_per_row_and_holds_zero(
    name: str, granularity: Any, num_rows: int | None, symmetric: bool, target: Any
) -> None:
    observer = build_observer(name, TensorSpec(4, symmetric, granularity), target=target)
    observer.update(torch.randn(4, 3, 5) + 0.5)
    low, high = observer.calc_range()
    assert low.shape == high.shape == (() if num_rows is None else (num_rows,))
    assert low.dtype == high.dtype == torch.float32
    assert (low <= 0).all()
    assert (high >= 0).all()
    assert (low < high).all()


def test_ragged_batches_dtypes_memory_formats_and_gradients(name: str) -> None:
    spec = AFFINE.replace(granularity=PerChannel(1))
    plain, mixed = build_observer(name, spec), build_observer(name, spec)
    x = torch.randn(7, 3, 4, 6).bfloat16()
    for batch in (x[:4], x[4:]):
        plain.update(batch.float())
        mixed.update(batch.to(memory_format=torch.channels_last).requires_grad_())
        mixed.update(torch.empty(0, 3, 4, 6))
    for one, other in zip(plain.calc_range(), mixed.calc_range(), strict=True):
        torch.testing.assert_close(one, other)
        assert not other.requires_grad
    assert all(not tensor.requires_grad for tensor in mixed.state().values())


def test_halves_merge_to_the_whole(name: str) -> None:
    parts = [torch.randn(5, 3), 7 * torch.randn(2, 3)]
    whole, first, second = (build_observer(name, AFFINE) for _ in range(3))
    for part in parts:
        whole.update(part)
    first.update(parts[0])
    second.update(parts[1])
    first.merge(second)
    torch.testing.assert_close(first.calc_range(), whole.calc_range())


def test_merging_unlike_observers_is_refused(name: str) -> None:
    with pytest.raises(CalibrationError, match="must be the same"):
        build_observer(name, AFFINE).merge(build_observer(name, AFFINE.replace(bits=4)))


@pytest.mark.parametrize("target", ["weight", "activation"])
def test_state_deepcopy_pickle_and_reset(name: str, target: Any) -> None:
    observer = build_observer(name, AFFINE, target=target)
    observer.update(torch.randn(100))
    loaded = build_observer(name, AFFINE, target=target)
    loaded.load_state(observer.state())
    for one in (loaded, copy.deepcopy(observer), pickle.loads(pickle.dumps(observer))):
        assert one.calc_range() == observer.calc_range()
    observer.reset()
    assert observer.is_empty
    assert not loaded.is_empty


def test_memory_does_not_grow_with_the_data(name: str) -> None:
    observer = build_observer(name, AFFINE)
    observer.update(torch.randn(100))
    size = sum(tensor.numel() for tensor in observer.state().values())
    for _ in range(3):
        observer.update(torch.randn(5000))
    levels = MOST_LEVELS if name == "mse" else 1  # a histogram for each octave of samples
    assert sum(tensor.numel() for tensor in observer.state().values()) <= levels * size


def test_no_data_no_range(name: str) -> None:
    observer = build_observer(name, AFFINE)
    observer.update(torch.empty(0, 3))
    assert observer.is_empty
    with pytest.raises(CalibrationError, match="prepare_calibration"):
        observer.calc_range()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("target", ["weight", "activation"])
def test_non_finite_data_is_refused_at_once(name: str, bad: float, target: Any) -> None:
    observer = build_observer(name, AFFINE, target=target)
    with pytest.raises(CalibrationError, match="NaN or infinity"):
        observer.update(torch.tensor([1.0, bad]))


@pytest.mark.parametrize(
    ("kind", "given", "complaint"),
    [
        ("percentile", {"ALPHA": 0.5}, "^ALPHA=0.5: allowed: a number, at least 0, below 0.5$"),
        ("moving_average", {"EMA_RATIO": 1.0}, "^EMA_RATIO=1.0: allowed: a number, at least 0, below 1$"),
        ("aciq", {"DISTRIBUTION": "gauss"}, "^DISTRIBUTION='gauss': allowed: GAUS, LAPLACE; did you mean GAUS?"),
        ("minmax", {"ALPHA": 0.1}, "^ALPHA=0.1: unknown key"),
    ],
    ids=["alpha", "ema_ratio", "distribution", "none"],
)
def test_options_are_checked(kind: str, given: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        type(build_observer(kind, AFFINE)).OPTIONS.from_dict(given)


def test_constant_and_integer_data(name: str) -> None:
    for value in (torch.full((10,), 3.0), torch.full((10,), 3)):
        observer = build_observer(name, AFFINE)
        observer.update(value)
        low, high = observer.calc_range()
        assert float(low) == 0
        assert float(high) == pytest.approx(3, rel=0.01)


def test_users_observers_join_the_registry() -> None:
    @register_observer("test_double_range")
    class DoubleRange(Observer[MinMax]):
        def new_statistic(self) -> MinMax:
            return MinMax()

        def range_of(self, statistic: MinMax) -> tuple[torch.Tensor, torch.Tensor]:
            low, high = statistic.range()
            return 2 * low, 2 * high

    observer = build_observer("TEST_double_range", AFFINE)
    observer.update(torch.tensor([-1.0, 2.0]))
    assert observer.calc_range() == (-2, 4)
    with pytest.raises(ConfigError, match="already registered"):
        register_observer("minmax")(DoubleRange)
    with pytest.raises(ConfigError, match="subclass of Observer"):
        register_observer("test_no_class")(dict)  # type: ignore[type-var]


def test_registered_without_a_name() -> None:
    @register_observer
    class Doubled(Observer[MinMax]):
        TYPE = "DOUBLED"

        def new_statistic(self) -> MinMax:
            return MinMax()

        def range_of(self, statistic: MinMax) -> tuple[torch.Tensor, torch.Tensor]:
            low, high = statistic.range()
            return 2 * low, 2 * high

    observer = build_observer("doubled", AFFINE)
    observer.update(torch.tensor([-1.0, 3.0]))
    assert [float(end) for end in observer.calc_range()] == [-2, 6]


def test_an_observer_of_the_first_sparsebit_is_explained() -> None:
    with pytest.raises(ConfigError, match=r"range_of\(statistic\) \(calc_minmax\(\) in the first Spars.*docs/guides"):

        @register_observer
        class Old(Observer[MinMax]):
            TYPE = "old"

            def calc_minmax(self) -> None: ...


@pytest.mark.parametrize("kind", ["percentile", "mse", "kl_histogram", "aciq"])
@pytest.mark.parametrize("target", ["weight", "activation"])
def test_ranges_do_not_depend_on_the_rows_at_a_time(kind: str, target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    observer = build_observer(kind, TensorSpec(4, False, PerChannel(0)), target=target)
    observer.update(torch.randn(5, 3000, generator=torch.Generator().manual_seed(0)) * 3.0 ** torch.arange(5)[:, None])
    whole = observer.calc_range()
    monkeypatch.setattr(observer_module, "ROWS_AT_A_TIME", 2)
    assert all(torch.equal(*pair) for pair in zip(whole, observer.calc_range(), strict=True))


class PartOptions(Section):
    PART: float = Field(0.5, gt=0, le=1, description="How much of the range is kept.")


def register_part() -> None:
    @register_observer("part", options=PartOptions)
    class Part(Observer[MinMax]):
        options: PartOptions

        def new_statistic(self) -> MinMax:
            return MinMax()

        def range_of(self, statistic: MinMax) -> tuple[torch.Tensor, torch.Tensor]:
            low, high = statistic.range()
            return self.options.PART * low, self.options.PART * high


PARTS = """
DEVICE: cpu
W: {QUANTIZER: {BIT: 8}, OBSERVER: {TYPE: part, PART: {PART: 0.25}}}
A: {QUANTIZER: {BIT: 8}, OBSERVER: {TYPE: part}, SPECIFIC: [{"1": [OBSERVER.PART.PART, 1]}]}
"""


class TestOptions:
    def test_from_yaml_to_numbers_to_a_folder_and_back(self, tmp_path: Path) -> None:
        register_part()
        model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).eval(), torch.randn(16, 4)
        config = parse_qconfig(PARTS)
        qmodel = calibrated(model, [x], config)
        plain = calibrated(model, [x], config.replace("W.OBSERVER.TYPE", "minmax", "A.OBSERVER.TYPE", "minmax"))
        for name, part in (("0.weight", 0.25), ("1.weight", 0.25), ("0.input", 0.5), ("1.input", 1.0)):
            found = site(qmodel, name)
            assert found.observer.options == PartOptions(PART=part)
            if name != "1.input":  # behind a layer that is quantized more coarsely
                torch.testing.assert_close(found.scale, part * site(plain, name).scale)
        qmodel.save(tmp_path / "saved")
        loaded = QuantModel.load(tmp_path / "saved", model)
        assert loaded.config == config and torch.equal(loaded(x), qmodel(x))
        loaded.prepare_calibration()
        run(loaded, [x])
        loaded.calc_qparams()
        assert torch.equal(site(loaded, "0.input").scale, site(qmodel, "0.input").scale)

    def test_another_bit_width_keeps_them(self) -> None:
        register_part()
        config = parse_qconfig(PARTS).replace("A.SPECIFIC", [])
        qmodel = calibrated(nn.Sequential(nn.Linear(4, 2)), [torch.randn(16, 4)], config)
        quantizer = site(qmodel, "0.weight")
        quantizer.set_bit(4)
        assert quantizer.observer.options == PartOptions(PART=0.25)

    def test_refusals(self) -> None:
        register_part()
        with pytest.raises(ConfigError, match=r"A.OBSERVER.PART.PART=0: allowed: a number, above 0, at most 1"):
            qconfig({"A.OBSERVER.PART.PART": 0})
        with pytest.raises(ConfigError, match=r"A.OBSERVER.PRAT.*did you mean A.OBSERVER.PART\?"):
            qconfig({"A.OBSERVER.PRAT.PART": 1})
        with pytest.raises(ConfigError, match="LAYOUT is a key already"):
            register_observer("layout", options=PartOptions)(type(build_observer("part", AFFINE)))

    def test_built_by_hand(self) -> None:
        register_part()
        observer = build_observer("part", AFFINE)
        assert observer.options == PartOptions()
        config = qconfig({"A.OBSERVER": {"TYPE": "part", "PART": {"PART": 0.75}}}).resolve("A", "fc")
        assert selected_options(config.OBSERVER) == PartOptions(PART=0.75)
        with pytest.raises(CalibrationError, match="must be the same"):
            observer.merge(build_observer("part", AFFINE, PartOptions(PART=0.75)))

    def test_observers_have_their_own_options_only(self, name: str) -> None:
        expected = {"percentile": ["ALPHA"], "moving_average": ["EMA_RATIO"], "aciq": ["DISTRIBUTION"]}
        options = build_observer(name, AFFINE).options
        assert list(type(options).model_fields) == expected.get(name, [])
