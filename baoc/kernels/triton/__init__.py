"""The fused step on a GPU: Triton kernels, the tables they read, and the engine that launches them."""
