"""QuantConfig: its keys, the resolution of layers, globs without a match, and whole files with line numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

from sparsebit.backends import BACKENDS
from sparsebit.config.fields import section_of, walk
from sparsebit.config.reading import read
from sparsebit.config.schema import ActivationConfig, QuantConfig, WeightConfig
from sparsebit.errors import ConfigError
from tests.config.conftest import config

Told = Callable[[dict[str, object]], str]


class TestKeys:
    def test_all_of_the_format(self) -> None:
        quantizer = ["TYPE", "BIT", "DISABLE"]
        observer = ["TYPE", "PERCENTILE.ALPHA", "ACIQ.DISTRIBUTION"]
        expected = ["BACKEND", "DEVICE", "SKIP_TRACE_MODULES", "ALGORITHMS"]
        schedule = "FUSE_BN", "MERGE_BRANCHES", "FOLD_SCALES", "PAD_CHANNELS", "BN_TUNING"
        expected += [f"SCHEDULE.{key}" for key in (*schedule, "DISABLE_UNNECESSARY_QUANT")]
        for kind in "WA":
            expected += [f"{kind}.QSCHEME", f"{kind}.SPECIFIC"]
            expected += [f"{kind}.QUANTIZER.{key}" for key in quantizer] + [
                f"{kind}.OBSERVER.{key}" for key in observer
            ]
        expected += ["W.QUANTIZER.GROUP_SIZE", "A.QUANTIZER.PACT.ALPHA_VALUE", "A.OBSERVER.MOVING_AVERAGE.EMA_RATIO"]
        expected += ["A.OBSERVER.LAYOUT", "A.QADD.ENABLE_QUANT"]
        assert sorted(".".join(path) for path, field in walk(QuantConfig) if not section_of(field)) == sorted(expected)

    def test_defaults(self) -> None:
        made = QuantConfig.from_dict({key: value for key, value in config().items() if key != "DEVICE"})
        assert made.BACKEND == "virtual" and made.SKIP_TRACE_MODULES == () and made.W.SPECIFIC == ()
        assert made.SCHEDULE.to_dict(defaults=True) == {
            "FUSE_BN": False,
            "MERGE_BRANCHES": True,
            "FOLD_SCALES": True,
            "PAD_CHANNELS": True,
            "BN_TUNING": False,
            "DISABLE_UNNECESSARY_QUANT": True,
        }

    @pytest.mark.parametrize("there", [True, False])
    def test_default_device_is_the_gpu_if_there_is_one(self, there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
        made = QuantConfig.from_dict(config({"DEVICE": ...}))
        assert ("cuda" if there else "cpu") == made.DEVICE
        assert made.replace("DEVICE", "CUDA:1").DEVICE == "cuda:1"

    @pytest.mark.parametrize("name", ["TensorRT", "ONNXRUNTIME", "OpenVINO", "Virtual"])
    def test_backend_in_any_case(self, name: str) -> None:
        assert name.lower() == QuantConfig.from_dict(config({"BACKEND": name})).BACKEND

    @pytest.mark.parametrize(
        ("changes", "expected"),
        [
            (
                {"BACKEND": "onnx"},
                f"BACKEND='onnx': allowed: {', '.join(BACKENDS)}; did you mean onnxruntime?",
            ),
            ({"DEVICE": "gpu"}, "DEVICE='gpu': allowed: cpu, cuda, cuda:N"),
            ({"DEVICE": 0}, "DEVICE=0: allowed: cpu, cuda, cuda:N"),
            ({"SKIP_TRACE_MODULES": "stem"}, "SKIP_TRACE_MODULES='stem': allowed: a list of globs, "),
            ({"SKIP_TRACE_MODULES": ["stem", 3]}, "SKIP_TRACE_MODULES=3: allowed: a list of globs, "),
            ({"SCHEDULE.FUSE_BN": "no"}, "SCHEDULE.FUSE_BN='no': allowed: true or false; it was given as text"),
            ({"SCHEDUEL": {}}, "SCHEDUEL={}: unknown key; allowed here: BACKEND, DEVICE, SKIP_TRACE_MODULES, SCHEDULE"),
            ({"W.SPECIFIC": {"fc": []}}, "W.SPECIFIC: must be a list of mappings"),
        ],
    )
    def test_refusals(self, changes: dict[str, object], expected: str, message: Told) -> None:
        assert message(changes).startswith(expected)


class TestResolve:
    def test_without_overrides(self) -> None:
        made = QuantConfig.from_dict(config({"W.QUANTIZER.BIT": 4}))
        weight, activation = made.resolve("W", "fc"), made.resolve("A", "fc")
        assert type(weight) is WeightConfig and type(activation) is ActivationConfig
        assert (weight.QUANTIZER.BIT, activation.QUANTIZER.BIT) == (4, 8)

    def test_override_leaves_its_neighbours(self) -> None:
        changes = {
            "A.QUANTIZER.TYPE": "lsq",
            "A.SPECIFIC": [{"fc": ["QUANTIZER.BIT", 4, "OBSERVER.ACIQ.DISTRIBUTION", "laplace"]}],
        }
        made = QuantConfig.from_dict(config(changes))
        fc, other = made.resolve("A", "fc"), made.resolve("A", "fc2")
        assert (fc.QUANTIZER.BIT, fc.QUANTIZER.TYPE, fc.OBSERVER.ACIQ.DISTRIBUTION) == (4, "lsq", "LAPLACE")
        assert (other.QUANTIZER.BIT, other.OBSERVER.ACIQ.DISTRIBUTION) == (8, "GAUS")
        assert made.resolve("W", "fc").QUANTIZER.BIT == 8

    @pytest.mark.parametrize("form", ["one entry", "several entries"])
    def test_first_wins(self, form: str) -> None:
        pairs = {"layer1.0": ["QUANTIZER.BIT", 2], "layer1.*": ["QUANTIZER.BIT", 4], "*": ["QUANTIZER.BIT", 6]}
        entries = [pairs] if form == "one entry" else [{glob: settings} for glob, settings in pairs.items()]
        made = QuantConfig.from_dict(config({"W.SPECIFIC": entries}))
        bits = [made.resolve("W", name).QUANTIZER.BIT for name in ("stem", "layer1.1", "layer1.0")]
        assert bits == [6, 4, 2]
        backwards = made.replace("W.SPECIFIC", [{glob: pairs[glob]} for glob in reversed(pairs)])
        assert backwards.resolve("W", "layer1.0").QUANTIZER.BIT == 6
        winner = backwards.winner("W", "layer1.0")
        assert winner is not None and winner.glob == "*"
        assert backwards.winner("A", "layer1.0") is None

    def test_later_matches_add_nothing(self) -> None:
        made = QuantConfig.from_dict(
            config({"W.SPECIFIC": [{"fc": ["QUANTIZER.BIT", 4]}, {"*": ["OBSERVER.TYPE", "mse", "QUANTIZER.BIT", 2]}]})
        )
        fc = made.resolve("W", "fc")
        assert (fc.QUANTIZER.BIT, fc.OBSERVER.TYPE) == (4, "minmax")

    def test_many_entries(self) -> None:
        def entries(value: object) -> list[dict[str, object]]:
            return [{f"blocks.{number}.*": ["QUANTIZER.BIT", value]} for number in range(1500)]

        made = QuantConfig.from_dict(config({"W.SPECIFIC": entries(4), "A.SPECIFIC": entries(4)}))
        assert made.resolve("W", "blocks.1499.fc").QUANTIZER.BIT == 4
        assert len(made.unmatched_globs(f"blocks.{number}.fc" for number in range(1000))) == 1000
        with pytest.raises(ConfigError, match="1500 faults"):
            QuantConfig.from_dict(config({"BACKEND": "onnxruntime", "W.SPECIFIC": entries(4)}))

    def test_names_are_as_free_as_elsewhere(self) -> None:
        changes = {"W.SPECIFIC": [{"fc": ["quantizer.type", "LSQ_plus", "OBSERVER.TYPE", "MSE"]}]}
        fc = QuantConfig.from_dict(config(changes)).resolve("W", "fc")
        assert (fc.QUANTIZER.TYPE, fc.OBSERVER.TYPE) == ("lsq+", "mse")

    def test_overrides_that_break_a_rule_only_together(self) -> None:
        changes = {
            "A.SPECIFIC": [{"*.conv": ["QUANTIZER.DISABLE", False]}, {"layer1.*": ["QUANTIZER.DISABLE", True]}],
            "W.SPECIFIC": [{"layer1.*": ["QUANTIZER.BIT", 4]}],
        }
        made = QuantConfig.from_dict(config({"BACKEND": "onnxruntime", **changes}))
        assert made.resolve("W", "layer1.fc").QUANTIZER.BIT == 4
        with pytest.raises(ConfigError, match=r"^W\.QUANTIZER\.BIT=4 at layer1\.conv: onnxruntime runs 8-bit weights"):
            made.resolve("W", "layer1.conv")

    @pytest.mark.parametrize(
        ("settings", "expected"),
        [
            (["QUANTIZER.BITS", 4], ".QUANTIZER.BITS=4 at fc: unknown key; allowed here: TYPE, BIT, DISABLE, PACT"),
            (["QUANTIZER.BITS", 4], "; did you mean A.QUANTIZER.BIT?"),
            (["BIT", 4], "A.BIT=4 at fc: unknown key; allowed here: QSCHEME, QUANTIZER, OBSERVER, QADD; did you mean "),
            (
                ["QUANTIZER.BIT", "4"],
                "A.QUANTIZER.BIT='4' at fc: allowed: a whole number, 1 to 16; it was given as text",
            ),
            (["QUANTIZER.TYPE", "unifrom"], "A.QUANTIZER.TYPE='unifrom' at fc: allowed: lsq, lsq+, pact, uniform"),
            (
                ["QUANTIZER", {"BIT": 4}],
                "={'BIT': 4} at fc: holds further keys; set one of QUANTIZER.TYPE, QUANTIZER.BIT",
            ),
            (["A.QUANTIZER.BIT", 4], "=4 at fc: keys of A.SPECIFIC start below A; write QUANTIZER.BIT"),
            (["W.QUANTIZER.BIT", 4], "=4 at fc: keys of A.SPECIFIC start below A; write QUANTIZER.BIT in W.SPECIFIC"),
            (["SPECIFIC", []], "A.SPECIFIC=[] at fc: unknown key; allowed here: QSCHEME, QUANTIZER, OBSERVER, QADD"),
        ],
        ids=["unknown", "near", "wrong place", "type", "name", "section", "own prefix", "other prefix", "nested"],
    )
    def test_override_is_checked(self, settings: list[object], expected: str, message: Told) -> None:
        assert expected in message({"A.SPECIFIC": [{"fc": settings}]})


class TestUnmatchedGlobs:
    LAYERS = ("conv1", "layer1.0.conv1", "layer1.0.conv2", "fc")

    def test_near_names_are_listed(self) -> None:
        changes = {
            "W.SPECIFIC": [{"layr1.0.conv1": ["QUANTIZER.BIT", 4], "layer1*": ["QUANTIZER.BIT", 4]}],
            "A.SPECIFIC": [{"FC": ["QUANTIZER.BIT", 4], "layer1_0_conv2": ["QUANTIZER.BIT", 4]}],
        }
        made = QuantConfig.from_dict(config(changes))
        first, second = made.unmatched_globs(self.LAYERS)
        assert (first.key, first.glob, first.near[0]) == ("W.SPECIFIC", "layr1.0.conv1", "layer1.0.conv1")
        assert (
            str(second) == "A.SPECIFIC: the glob 'FC' matches no layer, so its settings have no effect; near names: fc"
        )
        assert made.unmatched_globs(self.LAYERS, "A") == [second]

    def test_globs_behind_others_are_told(self) -> None:
        entries = [{glob: ["QUANTIZER.BIT", 4]} for glob in ("layer1*", "layer1.0.conv1", "*")]
        (behind,) = QuantConfig.from_dict(config({"W.SPECIFIC": entries})).unmatched_globs(self.LAYERS)
        assert str(behind) == (
            "W.SPECIFIC: the glob 'layer1.0.conv1' has no effect: 'layer1*' is before it and matches the same "
            "layers, and the first match wins; put 'layer1.0.conv1' before 'layer1*'"
        )

    def test_nothing_near(self) -> None:
        made = QuantConfig.from_dict(config({"A.SPECIFIC": [{"zzz*": ["QUANTIZER.BIT", 4]}]}))
        (unmatched,) = made.unmatched_globs(iter(self.LAYERS))
        assert str(unmatched).endswith("have no effect")

    def test_all_match(self) -> None:
        assert (
            QuantConfig.from_dict(config({"W.SPECIFIC": [{"*": ["QUANTIZER.BIT", 4]}]})).unmatched_globs(self.LAYERS)
            == []
        )


class TestFiles:
    def test_faults_have_file_and_line(self, tmp_path: Any) -> None:
        file = tmp_path / "qconfig.yaml"
        file.write_text(
            "BACKEND: tensorrt\nW:\n  QUANTIZER:\n    BIT: 8\n"
            "A:\n  QUANTIZER: {BIT: 8}\n  SPECIFIC:\n    - {layer1.conv: [QUANTIZER.BIT, 4]}\n",
            encoding="utf-8",
        )
        with pytest.raises(ConfigError) as caught:
            QuantConfig.from_dict(read(file))
        assert str(caught.value) == (
            f"{file}, line 8: A.QUANTIZER.BIT=4 at layer1.conv: tensorrt runs 8-bit per-tensor-symmetric activations; "
            "set 8, or BACKEND: virtual"
        )

    def test_all_faults_at_once(self) -> None:
        text = "backend: virtual\nW: {QUANTIZER: {BIT: '8'}}\nA:\n  QUANTIZER: {BITS: 8}\n  OBSERVER: {TYPE: mes}\n"
        with pytest.raises(ConfigError) as caught:
            QuantConfig.from_dict(read(text))
        head, *faults = str(caught.value).split("\n")
        assert head == "4 faults in the config:"
        assert [fault.split(":")[0].strip() for fault in faults] == ["line 1", "line 2", "line 4", "line 5"]

    @pytest.mark.parametrize(
        ("changes", "keys"),
        [
            ({"TYPO": 1, "W.QUANTIZER.BIT": 4}, ["TYPO=1", "W.QUANTIZER.BIT=4"]),
            ({"W": 3, "A.QUANTIZER.BIT": 4}, ["W=3", "A.QUANTIZER.BIT=4"]),
            ({"W.QUANTIZER.BIT": "8", "A.QUANTIZER.BIT": 4}, ["W.QUANTIZER.BIT='8'", "A.QUANTIZER.BIT=4"]),
            (
                {"W.SPECIFIC": [{"fc": ["BITS", 4]}, {"stem": ["QUANTIZER.BIT", 4]}], "A.QUANTIZER.BIT": 4},
                ["W.BITS=4 at fc", "A.QUANTIZER.BIT=4", "W.QUANTIZER.BIT=4 at stem"],
            ),
            ({"W.SPECIFIC": [{"fc": 3}, 4], "A.QUANTIZER.BIT": 4}, ["W.SPECIFIC", "W.SPECIFIC", "A.QUANTIZER.BIT=4"]),
            ({"W.QUANTIZER": {"BITS": 8}, "SCHEDULE.BN_TUNING": 1}, ["W.QUANTIZER.BITS=8", "SCHEDULE.BN_TUNING=1"]),
        ],
        ids=["unknown key", "section", "type", "override", "entries", "missing"],
    )
    def test_schema_and_rules_together(self, changes: dict[str, object], keys: list[str], message: Told) -> None:
        head, *faults = message({"BACKEND": "onnxruntime", **changes}).split("\n  ")
        assert head == f"{len(keys)} faults in the config:"
        assert sorted(keys) == sorted(key for key in keys if any(fault.startswith(key) for fault in faults)), faults

    @pytest.mark.parametrize("place", ["key", "value", "glob", "glob's key"])
    def test_terminal_escapes_are_shown_escaped(self, place: str, message: Told) -> None:
        bad = "\x1b[2J\x9b1m\nBIT"
        told = message(
            {
                "key": {bad: 1},
                "value": {"BACKEND": bad},
                "glob": {"W.SPECIFIC": [{bad: ["QUANTIZER.BIT", 77]}]},
                "glob's key": {"W.SPECIFIC": [{"fc": [bad, 4]}]},
            }[place]
        )
        assert told.isprintable()
        assert "x1b[2" in told.lower()

    @pytest.mark.parametrize(
        "text",
        [
            # As users of the first Sparsebit write: names of nodes, several globs in one entry, upper-case names.
            """
            BACKEND: virtual
            SKIP_TRACE_MODULES: ["blocks.*.drop_path"]
            W: {QSCHEME: per-channel-symmetric, QUANTIZER: {TYPE: lsq, BIT: 4}}
            A:
              QSCHEME: per-tensor-affine
              QUANTIZER: {TYPE: lsq, BIT: 4}
              SPECIFIC: [{
                "*mlp_fc2": ["QUANTIZER.TYPE", "lsq+"],
                "*norm1": ["QUANTIZER.DISABLE", True],
              }]
            """,
            """
            BACKEND: tensorrt
            SCHEDULE: {FUSE_BN: True}
            W: {QSCHEME: per-channel-symmetric, QUANTIZER: {TYPE: uniform, BIT: 8}, OBSERVER: {TYPE: MINMAX}}
            A:
              QSCHEME: per-tensor-symmetric
              QUANTIZER: {TYPE: uniform, BIT: 8}
              OBSERVER: {TYPE: MSE, LAYOUT: NLC}
              SPECIFIC: [{"head": ["OBSERVER.TYPE", "ACIQ", "OBSERVER.ACIQ.DISTRIBUTION", "laplace"]}]
            """,
        ],
        ids=["training", "tensorrt"],
    )
    def test_old_files_keep_working(self, text: str) -> None:
        made = QuantConfig.from_dict(read(text))
        assert made.resolve("A", "blocks.3.mlp.fc2").QUANTIZER.TYPE in ("lsq+", "uniform")
        assert made.unmatched_globs(["blocks.3.mlp.fc2", "blocks.3.norm1", "head"]) == []


JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["QUANTIZER.BIT", "lsq"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3) | st.just("BIT"), inner, max_size=3)
    ),
    max_leaves=6,
)
KEYS = [".".join(path) for path, _ in walk(QuantConfig)]


class TestProperties:
    @given(st.dictionaries(st.sampled_from(KEYS), JUNK, max_size=3))
    def test_junk_is_a_config_error_or_a_config(self, changes: dict[str, object]) -> None:
        values = config()
        for key, value in changes.items():
            section, (*path, leaf) = values, key.split(".")
            for name in path:
                section = section.setdefault(name, {}) if isinstance(section.get(name, {}), dict) else {}
            section[leaf] = value
        with contextlib.suppress(ConfigError):
            assert isinstance(QuantConfig.from_dict(values), QuantConfig)

    @given(st.text(max_size=60))
    def test_any_text_is_a_config_error_or_a_document(self, text: str) -> None:
        with contextlib.suppress(ConfigError):
            assert isinstance(read(f"{text}\n"), dict)

    @given(
        st.sampled_from(list(BACKENDS)),
        st.lists(st.tuples(st.sampled_from(["fc", "*", "layer1.*", "conv[12]"]), st.sampled_from([4, 8])), max_size=4),
    )
    def test_every_accepted_config_comes_back_from_its_yaml(self, backend: str, bits: list[tuple[str, int]]) -> None:
        values = config({"BACKEND": backend, "W.SPECIFIC": [{glob: ["QUANTIZER.BIT", bit]} for glob, bit in bits]})
        try:
            made = QuantConfig.from_dict(values)
        except ConfigError:
            assert backend != "virtual"
            return
        assert QuantConfig.from_dict(read(made.to_yaml())) == made
        assert yaml.safe_load(made.to_yaml()) == made.to_dict()
