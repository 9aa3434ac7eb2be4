"""How much a candidate loses against the float model: metrics, samples, confidence bounds."""
