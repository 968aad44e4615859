"""Random faults against a real training: real processes, real signals, compared with an undisturbed run.

    swift-chaos --plans 20 --machines 4 -- train.py --store {folder}/store

See :mod:`swift_ft.testing.chaos.campaign`, and :mod:`swift_ft.cli.chaos`.
"""
