"""Layout of a run over devices: degrees, ranks, clusters and pipeline schedules."""
