"""World models as a service: networks, codec, windows, sampler, backend, and their training."""
