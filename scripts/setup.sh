#!/usr/bin/env bash
# Makes .venv beside this checkout and installs Sparsebit into it, editable, at the versions of constraints.txt.
# Usage: scripts/setup.sh [demo|dev]   demo: what `sparsebit demo` needs; dev (default): what the checks need.
# PYTHON=... picks the interpreter. A second call returns at once until pyproject.toml or constraints.txt change.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

profile=${1:-dev}
case $profile in
  demo) extras=demo ;;
  dev) extras=demo,openvino,vision,text,llm,gguf,genai,train,docs,dev ;;
  *) echo "scripts/setup.sh: unknown profile '$profile'; allowed: demo, dev" >&2; exit 2 ;;
esac

fingerprint=$(cat pyproject.toml constraints.txt scripts/setup.sh | cksum)
for done in dev "$profile"; do # dev holds all that demo needs
  [ "$(cat ".venv/.ready-$done" 2>/dev/null || true)" != "$fingerprint" ] || exit 0
done

python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  echo "Sparsebit needs Python 3.11 or newer and '$python' is not: set PYTHON=/path/to/python" >&2
  exit 2
}
[ -x .venv/bin/pip ] || "$python" -m venv --clear .venv
echo "Setting up .venv ($profile): PyTorch and a few packages, a minute or two ..." >&2
.venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[$extras]"
if [ "$profile" = dev ]; then
  # Runtimes without what their packages require for other purposes (pandas, scikit-learn, hydra and others).
  .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt \
    executorch flatbuffers ruamel.yaml tabulate torchao \
    coremltools cattrs pyaml "onnxruntime-qnn; platform_machine == 'x86_64' and platform_system == 'Linux'"
fi
echo "$fingerprint" > ".venv/.ready-$profile"
