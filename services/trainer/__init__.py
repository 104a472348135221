"""Policies, SFT, PPO, evaluation and reports: the trainer, a client of simulators and world models alike."""
