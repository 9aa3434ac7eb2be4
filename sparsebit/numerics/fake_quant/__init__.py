"""The operator `torch.ops.sparsebit.fake_quantize`: definition, gradients, kernels by device, decomposed form."""
