"""Random faults against a real training: real processes, real signals, compared with an undisturbed run.

    python -m swift_ft.testing.chaos --plans 20 --machines 4 -- train.py --store {folder}/store

See :mod:`swift_ft.testing.chaos.campaign`.
"""
