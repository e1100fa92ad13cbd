"""Experiments beside the protocol: whole runs, sweeps, reports, audits, traces. Nothing below imports it."""
