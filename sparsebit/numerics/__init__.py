"""What a low-bit number is: formats, scales, the one fake-quant operator and its gradients. Needs only torch."""
