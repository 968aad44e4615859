"""The example training in which each helper adds up its gradients before it sends them."""

import functools

import train_swift

import swift_ft

swift_ft.Session.attach_pipeline = functools.partialmethod(  # type: ignore[assignment]
    swift_ft.Session.attach_pipeline, mode="allreduce"
)
train_swift.main()
