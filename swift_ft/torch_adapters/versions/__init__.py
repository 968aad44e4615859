"""What differs between the releases of torch that this project runs on. One file, one difference.

A file looks once, when it is imported, at what the installed torch has (never at its number), and gives all
others one way that holds on each. Nothing else in the package asks for a version.

======================  ============================================  ====================================
file                    what differs                                  tests/unit/torch_adapters/versions/
======================  ============================================  ====================================
group_hooks.py          hooks on a group (2.14)                       test_group_hooks.py
group_methods.py        methods of groups and operations (2.13, 2.14) test_group_methods.py
======================  ============================================  ====================================

The number is that of the first torch that has it.
"""
