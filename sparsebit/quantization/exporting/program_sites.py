"""`program_differences`: where a runtime's program has other integers than the simulation, site by site."""

from __future__ import annotations

import inspect
import tempfile
from pathlib import Path

from sparsebit.deploy.comparing.divergence import SiteDifference, difference_of
from sparsebit.deploy.programs.flat_program import flat_program
from sparsebit.deploy.programs.site_outputs import SiteGrid
from sparsebit.deploy.programs.targets import TARGETS
from sparsebit.deploy.runtimes import PROFILES
from sparsebit.deploy.sessions.runtime_sessions import open_session
from sparsebit.execution.batches import Call
from sparsebit.graph.state.modes import evaluating
from sparsebit.quantization.calibrating.model_state import switched_on
from sparsebit.quantization.exporting.export_checks import feeds_of
from sparsebit.quantization.exporting.export_constants import quantizers_as_constants
from sparsebit.quantization.exporting.stored_parameters import simulated_codes
from sparsebit.quantization.faithful.simulation import SimulatedModel


def program_differences(qmodel: SimulatedModel, call: Call) -> list[SiteDifference]:
    """Every activation site on one batch, in the order of the program.

    A program has no outputs in its middle, so it is written once more with all sites as outputs, and run. The first
    site that differs is where the runtime's arithmetic and the simulation part: all sites before it are equal.
    """
    target, sites = TARGETS[qmodel.config.BACKEND], dict[str, SiteGrid]()
    runtime = PROFILES[target.name].executes
    assert runtime is not None, "require_to_run asks first"
    with switched_on(qmodel):
        expected, _ = simulated_codes(qmodel, call)
        with evaluating(qmodel), quantizers_as_constants(qmodel):
            signature = inspect.signature(qmodel.original.forward)
            program, facts = flat_program(qmodel, *call, signature, target, sites=sites)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"sites{target.ending}"
        target.write(program, facts, file)
        session = open_session(file, runtime, num_threads=1)
        found = dict(zip(session.outputs, session.run(feeds_of(session, call)), strict=True))
    codes = {site: grid.codes(found[site]) for site, grid in sites.items()}
    return [difference_of(site, codes[site], expected[site]) for site in sites if site in expected]
