"""The laboratory beside the protocol: DP-SGD, attacks, audits, traces, rehearsals, runs, sweeps and reports."""
