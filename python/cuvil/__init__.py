"""A tensor JIT for PyTorch inference."""
