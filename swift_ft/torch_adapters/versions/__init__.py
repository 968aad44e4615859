"""Differences between the releases of torch that this project runs on. One file, one difference.

A file looks once, when it is imported, at what the installed torch has (never at its number), and gives all
others one way that holds on each. Nothing else in the package asks for a version.

======================  ============================================  ====================================
file                    what differs                                  tests/unit/torch_adapters/versions/
======================  ============================================  ====================================
buffer_sync.py          DDP's name for "keeps buffers equal" (2.13)   test_buffer_sync.py
coalescing.py           batches on groups written in Python (2.14)    test_coalescing.py
first_messages.py       a stage's messages to itself (up to 2.11)     test_stage_shapes.py
fsdp_groups.py          several parameter groups of a module (2.12)   test_fsdp_versions.py
fsdp_reset.py           FSDP goes back by itself (2.13)               test_fsdp_versions.py
gradient_sends.py       gradients that a stage leaves out (2.13)      test_gradient_sends.py
group_hooks.py          hooks on a group (2.14)                       test_group_hooks.py
group_methods.py        methods of groups and operations (2.13, 2.14) test_group_methods.py
launch_options.py       options of torchrun (2.12)                    test_launch_options.py
stage_shapes.py         shapes as records (2.12): one of the next two test_stage_shapes.py
shapes_as_records.py    since 2.12                                    test_stage_shapes.py
shapes_as_tensors.py    before                                        test_stage_shapes.py
======================  ============================================  ====================================

The number is that of the first torch that has it.
"""
