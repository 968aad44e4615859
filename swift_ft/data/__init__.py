"""Batches by index: the same batch whenever a step asks for it, live, repeated or replayed.

batches = swift_ft.data.IndexedBatches(dataset, batch_size=32, shuffle=True, num_workers=4)
for step in session.steps(10_000):
    with step:
        x, y = batches[step.index]
"""

from swift_ft.data.file_index import write_index
from swift_ft.data.files import FileSamples
from swift_ft.data.global_batches import GlobalBatches
from swift_ft.data.indexed import IndexedBatches
from swift_ft.data.loader import LoaderBatches
from swift_ft.data.sample_log import samples_by_iteration

__all__ = [
    "FileSamples",
    "GlobalBatches",
    "IndexedBatches",
    "LoaderBatches",
    "samples_by_iteration",
    "write_index",
]
