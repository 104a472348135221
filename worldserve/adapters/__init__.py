"""The contract in other libraries' words: Gymnasium, Stable-Baselines3, TorchRL, dm_env, dm_env_rpc, RLinf, WorldArena.

Each module needs the library it is named after, and nothing imports one but its caller. `docs/adapters.md` says what
each is for and where it ends.
"""
