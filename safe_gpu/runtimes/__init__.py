"""How a process sees and opens its GPUs.

This room has the calls to the CUDA driver library, the meaning of CUDA_VISIBLE_DEVICES, and the placeholders that hold
a GPU. It does not know which GPUs are free.
"""
