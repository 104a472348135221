"""The services: each owns its model whole, and they meet only through `worldserve` and the wire."""
