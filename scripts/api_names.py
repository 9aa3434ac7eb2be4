"""Writes the tables of docs/reference/api.md: every public name with the first sentence of its docstring.

`python scripts/api_names.py` writes them, `--check` says whether they are in step. A public name without a docstring,
or one that no group below lists, is an error.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import re
import sys
from pathlib import Path

from marked_sections import table, update

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "api.md"
# Per module, the sections of the page and the names in each.
GROUPS: dict[str, dict[str, str]] = {
    "sparsebit": {
        "in one call": "compress quantize record __version__",
        "files and runtimes": "load_onnx audit open_session tensorrt_violations PROFILES RuntimeProfile Tolerance",
        "results": "Coverage ErrorProfile AccuracyGains GradientCheck Parity Audit RunRecord read_record write_record "
        "extend_record measured",
        "errors": "SparsebitError ConfigError SpecError BackendError CaptureError CalibrationError CheckpointError "
        "DeploymentError RecordError MissingExtraError",
    },
    "sparsebit.quantization": {
        "models": "QuantModel QuantConfig parse_qconfig Plan Site weights_of_first_sparsebit",
        "number formats": "TensorSpec PerTensor PerChannel PerGroup Granularity qparams_from_range broadcast_to "
        "fake_quantize",
        "algorithms": "apply_algorithms register_algorithm equalize Equalized smooth Smoothed gptq LayerRounding "
        "correct_biases tune_batchnorms reconstruct BlockReconstruction",
        "mixed precision": "sensitivity Sensitivity search_bits BitSearch SiteBudget pareto_curve search_latency "
        "LatencySearch",
        "training": "DistillationLoss FreezeSchedule CudaGraphStep",
        "placement": "measure_placement MeasuredPlacement PlacementProfile apply_placement",
        "own classes": "Quantizer register_quantizer Observer register_observer MinMax MovingMinMax Samples Histogram "
        "Section QuantOpr MultipleInputsQuantOpr QIdentity register_qmodule QMODULE_MAP",
        "stages and graphs": "capture Captured prepare transform Transform make_plan attach MatchingNode "
        "SubgraphMatcher ReplacePatternBase",
        "blocks": "Block BlockData find_blocks run_blocks mix gather",
    },
    "sparsebit.sparse": {
        "sparse models": "SparseModel SparseConfig parse_sconfig LayerFit RatioChoice ModelSize model_size Zeros "
        "reestimate_norms save load",
        "channel groups": "find_groups ChannelGroups Group Unit Spared ChannelPlan",
        "residual blocks": "find_residual_blocks ResidualBlocks ResidualBlock SparedBlock SkippedBlock",
        "two of four": "recommend_2_4 TwoFourAdvice accelerate_2_4",
        "own sparsity": "register_criterion Evidence scale_penalty register_sparser Sparser register_smodule SparseOpr "
        "SMODULE_MAP",
    },
    "sparsebit.compress": {
        "a search under a goal": "compress Result PerSample WholeSet OfModel",
        "own rungs": "register_rung Rung Known Candidate Recipe Study",
        "channels and bits": "choose_channels_and_bits JointChoice",
    },
    "sparsebit.llm": {
        "quantizing language models": "quantize Recipe recipe_for Calibration QuantizedModel convert ConvertedModel "
        "BitAllocation LayerBits EndToEnd LoadCheck ExpertCalibration ScaledInput ARCHITECTURES Architecture",
        "packed language models": "load load_streamed stream_usage StreamUsage QuantLinear PackedWeight FloatLinear "
        "FloatWeight kernel_paths probe_cpu CpuProbe resident_bytes cache_bytes compiled_settings",
        "adapters of language models": "finetune Tuning FinetunedModel merge MergedModel add_adapter load_adapter",
        "text and perplexity": "calibration_tokens token_stream windows perplexity Perplexity evaluate_tasks TaskScore",
    },
}
# Values and type aliases, which have no docstrings.
VALUES = {
    "compress": "The fastest file that keeps the loss, or the most accurate one in a budget, by a search.",
    "ARCHITECTURES": "The `Architecture` of each `model_type`, by its name.",
    "__version__": "The version of the package.",
    "PROFILES": "The `RuntimeProfile` of each backend, by its name.",
    "Granularity": "`PerTensor`, `PerChannel` or `PerGroup`: which elements share a scale.",
    "SMODULE_MAP": "The registered class of each module class whose weights unstructured sparsity prunes.",
    "QMODULE_MAP": "The registered class of each op that is quantized.",
    "Transform": "A function that rewrites a float graph in place before the plan is made.",
}


def sections() -> dict[str, str]:
    """The table of each section."""
    found = {}
    for module, groups in GROUPS.items():
        public = set(importlib.import_module(module).__all__)
        listed = [name for names in groups.values() for name in names.split()]
        if sorted(listed) != sorted(public):
            raise SystemExit(f"{module}: groups and __all__ differ in {sorted(public.symmetric_difference(listed))}")
        for title, names in groups.items():
            rows = [(f"`{name}`", line(module, name)) for name in names.split()]
            found[title] = table((f"from `{module}`", ""), rows)
    return found


def line(module: str, name: str) -> str:
    """The first sentence of the docstring."""
    value = getattr(importlib.import_module(module), name)
    is_documented = inspect.isclass(value) or inspect.isroutine(value)
    text = VALUES.get(name) or (inspect.getdoc(value) if is_documented else None)
    if not text or (inspect.isclass(value) and name not in VALUES and "__doc__" not in vars(value)):
        raise SystemExit(f"{module}.{name} has no docstring")
    paragraph = text.split("\n\n", 1)[0].replace("\n", " ")
    return re.split(r"(?<=[^.][.])\s+(?=[A-Z`])", paragraph, maxsplit=1)[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    return update(PAGE, sections(), check=parser.parse_args().check)


if __name__ == "__main__":
    sys.exit(main())
