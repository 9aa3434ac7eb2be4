"""The operator torch.ops.sparsebit.fake_quantize: its gradients, its devices, its algebra."""
