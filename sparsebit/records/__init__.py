"""Plain, frozen results for JSON and reports: of one verb, and of a whole run (`RunRecord`)."""

from __future__ import annotations

from sparsebit.records.audit import Audit
from sparsebit.records.coverage import Coverage, FloatLayer, OpaqueModule, ParameterRecord, QuantizedLayer
from sparsebit.records.error_profile import (
    AccuracyGains,
    ErrorProfile,
    LayerError,
    LayerGain,
    SiteError,
    ValueHistogram,
)
from sparsebit.records.files import extend_record, read_record, write_record
from sparsebit.records.gradients import GradientCheck
from sparsebit.records.parity import OutputParity, Parity, ParityCheck, Tolerance
from sparsebit.records.phases import Measured, measured
from sparsebit.records.run_record import CalibrationFacts as Calibration
from sparsebit.records.run_record import Environment, FileFacts, ModelFacts, OutputError, Run, RunRecord

__all__ = [
    "AccuracyGains",
    "Audit",
    "Calibration",
    "Coverage",
    "Environment",
    "ErrorProfile",
    "FileFacts",
    "FloatLayer",
    "GradientCheck",
    "LayerError",
    "LayerGain",
    "Measured",
    "ModelFacts",
    "OpaqueModule",
    "OutputError",
    "OutputParity",
    "ParameterRecord",
    "Parity",
    "ParityCheck",
    "QuantizedLayer",
    "Run",
    "RunRecord",
    "SiteError",
    "Tolerance",
    "ValueHistogram",
    "extend_record",
    "measured",
    "read_record",
    "write_record",
]
