"""What a server does, found by driving it: `worldserve contract probe`.

The contract says in words what an action means and what a frame shows; a server that breaks it raises no error. The
probes run a few chosen episodes over the wire, without privileges, and compare what moves with what a trusted target
showed. `matrix` proves them: it makes every fault of `worldserve.faults` on purpose.
"""
