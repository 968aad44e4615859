"""What the paper states in numbers about its figures 9 to 11 and table 3, with where it does.

The bars and markers of the figures themselves are pictures: where the text gives no number, none is here.
"""

from __future__ import annotations

TESTBED = "16 DGX-2 with 8 V100 each, 40 Gbit/s Ethernet, HDFS (§7)"
SCHEDULE = "200 iterations, a checkpoint at iteration 100, a machine killed at iteration 150 (§7)"

SHORTER_PERCENT = {
    "replication": {"Wide-ResNet-50": 98.9},
    "logging, a group per machine": {"ViT-128/32": 36.0, "BERT-128": 58.5},
    "logging, parallel recovery": {"ViT-128/32": 57.3, "BERT-128": 76.3},
}
"""Figure 9: recovery time, less than that of global checkpointing (§7.1)."""

REPLICATION_PERCENT = {"CheckFreq": 98.1, "Elastic Horovod": 98.1}
"""Figure 9a: replication's recovery time, less than theirs."""

FIGURE_9_WORDS = (
    "Throughput: no numbers in the text; logging is 'slightly slower' than global checkpointing for "
    "ViT-128/32 and 'similar' for BERT-128, and with 8 groups 'similar' for ViT-128/32, too."
)
FIGURE_10_WORDS = (
    "Throughput during recovery of ViT-128/32: 12.5 to 15 times global checkpointing's with parallel "
    "recovery; 8 groups take longer than 16. No further numbers in the text."
)
FIGURE_11_WORDS = (
    "The markers' numbers are not in the text, only that recovery takes longer with less storage."
)

TABLE_3 = {
    "ViT-128/32": {16: (24.66, 0.23), 8: (11.51, 0.11)},
    "BERT-128": {16: (8.05, 0.075), 8: (3.76, 0.035)},
}
"""By number of groups: GB logged per iteration, and GB/s that this takes of the bubbles on average."""

TABLE_3_PRESETS = {"ViT-128/32": "vit-128", "BERT-128": "bert-128"}
"""Their names in :mod:`swift_ft.planning.presets`."""
