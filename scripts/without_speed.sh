#!/usr/bin/env bash
# The tests outside of quantization/speed, in a copy of the repository without that folder: the plain path is complete by itself.
# Usage: scripts/without_speed.sh [arguments of pytest]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python="$(pwd)/.venv/bin/python"
data="${SPARSEBIT_DATA:-$(cd .. && pwd)/shared/data}"
copy="$(mktemp -d)"
trap 'rm -rf "$copy"' EXIT
git ls-files -z --cached --others --exclude-standard | xargs -0 cp --parents -t "$copy" 2>/dev/null || true
rm -rf "$copy/sparsebit/quantization/speed" "$copy/tests/quantization/speed" "$copy/benchmarks/qat_step.py"
cd "$copy"
PYTHONPATH="$copy" SPARSEBIT_DATA="$data" "$python" -m pytest -q -p no:cacheprovider "$@"
