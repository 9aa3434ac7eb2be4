"""Random nets as programs of ExecuTorch: `python -m tests.differential.programs --nets 50 --seed 0 --log FILE`.

XNNPACK is a judge of its own kind: it does not run ONNX files, so each net is quantized for it, and the codes of every
site are compared with the simulation's. The first site that differs has equal inputs: if it is more than a step off,
float rounding does not explain it, and it is a fault. Resumable: a net that is in the log is not run again.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from sparsebit.errors import SparsebitError
from sparsebit.quantization.exporting.program_sites import program_differences
from tests.differential.__main__ import net_of
from tests.differential.judging import _quiet
from tests.fuzz.program import Compiled
from tests.quantization.tiny import calibrated, qconfig


def judged(seed: int, backend: str = "executorch") -> dict[str, Any]:
    """`outcome`: `same`, `drift` (the first difference is one step), `refused`, `invalid`, or `fault`."""
    net, began = net_of(seed), time.process_time()
    record: dict[str, Any] = {"seed": seed, "outcome": "same", "details": "", "sites": 0}
    with _quiet():
        compiled = Compiled(net)
        try:
            model = compiled.make()
            batch = compiled.inputs(0)[0]
            model(*batch)
        except Exception as error:  # the net itself does not run
            return record | {"outcome": "invalid", "details": f"{type(error).__name__}: {error}"[:300]}
        config = dict(compiled.names["CONFIG"]) | {"BACKEND": backend}
        try:
            qmodel = calibrated(model, [batch], qconfig(config, backend=config.pop("BACKEND")))
            differences = program_differences(qmodel, (batch, {}))
        except SparsebitError as error:
            return record | {"outcome": "refused", "details": f"{type(error).__name__}: {error}"[:300]}
        except Exception as error:
            return record | {"outcome": "fault", "details": f"crash: {type(error).__name__}: {error}"[:600]}
    record["sites"], record["seconds"] = len(differences), round(time.process_time() - began, 1)
    first = next((one for one in differences if one.largest), None)
    if first is not None:
        record |= {"outcome": "drift" if first.largest == 1 else "fault", "details": str(first)}
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", default="executorch")
    parser.add_argument("--log", type=Path, required=True)
    asked = parser.parse_args()
    lines = asked.log.read_text().splitlines() if asked.log.exists() else []
    records = {row["seed"]: row for row in map(json.loads, lines)}
    for seed in range(asked.seed, asked.seed + asked.nets):
        if seed not in records:
            records[seed] = judged(seed, asked.backend)
            with asked.log.open("a") as file:
                file.write(json.dumps(records[seed]) + "\n")
    sys.stdout.write(f"{dict(Counter(row['outcome'] for row in records.values()))}\n")


if __name__ == "__main__":
    main()
