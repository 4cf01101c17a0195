"""The experience service: the ledger of tasks, episodes, steps and versions."""
