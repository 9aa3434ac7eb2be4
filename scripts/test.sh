#!/usr/bin/env bash
# Sets this checkout up and runs every check: style, types, layers, documentation, tests (last, so that their summary ends the
# output). All of them run even when one fails. Arguments go to pytest; without any, tests that are marked slow are left
# out: `scripts/test.sh -m ''` runs them too.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh dev
PATH="$PWD/.venv/bin:$PATH"
unset PYTHONDONTWRITEBYTECODE # tests start dozens of processes: each would compile the package again
export NO_MKDOCS_2_WARNING=1 # a notice of mkdocs-material's makers, not about this project

failed=()
check() {
  local name=$1
  shift
  echo "== $name"
  "$@" || failed+=("$name")
}
outputs=$(mktemp -d)
trap 'rm -rf "$outputs"' EXIT
ended() { # waits for a check that was started before, and shows what it printed
  local status=0
  wait "$1" || status=$?
  cat "$2"
  return "$status"
}
# The types take the longest: one core for them, and the other one for everything else until they are done.
mypy > "$outputs/types" 2>&1 & types=$!
check "docs" mkdocs build --strict --quiet
check "style" ruff check --output-format concise .
check "format" ruff format --check --output-format concise .
check "layers" lint-imports --no-logo
# A part of what scripts/without_speed.sh runs by hand: quantizers, ops and training by the plain path.
check "without speed" bash scripts/without_speed.sh -m 'not slow' -k 'not compile' \
  tests/quantization/quantizers/test_training.py tests/quantization/quantizers/test_base.py tests/quantization/ops/test_quant_opr.py
check "types" ended "$types" "$outputs/types"
[ $# -gt 0 ] || set -- -m "not slow"
check "tests" pytest -q -n auto --maxprocesses 4 --dist loadfile "$@"

[ ${#failed[@]} -eq 0 ] || { echo "failed: ${failed[*]}" >&2; exit 1; }
