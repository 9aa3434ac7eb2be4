#!/usr/bin/env bash
# Runs the tests with the newest versions of all packages that pip finds, in .venv-newest: constraints.txt holds the versions
# that the other checks run with, and users have what pip installs today. To be run every week.
# Usage: scripts/test_newest.sh [arguments of pytest]   without any: all tests that are not slow.
# TORCH=... pins torch, as pip writes it (default: torch==2.13.0; TORCH=torch takes the newest). PYTHON=... picks the interpreter.
# KEEP=1 does not upgrade the packages of an earlier call.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

torch=${TORCH:-torch==2.13.0}
venv=.venv-newest
extras=demo,openvino,text,llm,gguf,train,dev
if [ -z "${KEEP:-}" ] || [ ! -x $venv/bin/pytest ]; then
  [ -x $venv/bin/pip ] || "${PYTHON:-python3}" -m venv --clear $venv
  pip() { $venv/bin/python -m pip "$1" --quiet --disable-pip-version-check "${@:2}"; }
  pip install --upgrade "$torch"
  pinned=$($venv/bin/python -c "import torch; print('torch==' + torch.__version__)")
  pip install --upgrade --upgrade-strategy eager "$pinned" -e ".[$extras]"
  # torchvision demands the torch that it was built with, which pip would install in place of the pinned one.
  pip install --upgrade --no-deps timm
  version=$($venv/bin/python -c "
import torch; print(f'0.{int(torch.__version__.split(chr(46))[1]) + 15}.*')")
  pip install --no-deps pillow "torchvision==$version" || echo "scripts/test_newest.sh: no torchvision $version: without it" >&2
  # Packages that have no files for every system.
  for package in onnxruntime-genai sentencepiece; do pip install --upgrade "$package" || true; done
fi
$venv/bin/python -m pip list --disable-pip-version-check --format freeze |
  grep -iE '^(torch|transformers|compressed|accelerate|peft|huggingface|gguf|onnx|openvino|timm|numpy|pydantic|typer)' >&2

unset PYTHONDONTWRITEBYTECODE
[ $# -gt 0 ] || set -- -m "not slow"
exec $venv/bin/python -m pytest -q "$@"
