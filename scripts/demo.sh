#!/usr/bin/env bash
# Sets this checkout up and runs the demo: a small network trained on the spot, quantized at 8, 6, 4 and 3 bits, and
# exported as an ONNX file that is run (`--output FILE.onnx` keeps it).
# Arguments go to `sparsebit demo`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh demo
exec .venv/bin/sparsebit demo "$@"
