"""Rounding of weights on data: GPTQ, reconstruction, bias correction, batch norm tuning."""
