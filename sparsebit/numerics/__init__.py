"""Low-bit numbers: formats, scales, the one fake-quant operator and its gradients. Needs only torch."""
