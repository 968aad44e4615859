"""Private parts of torch's tensors, modules and optimizers in one process.

Stands below all else that knows torch: ``undo/`` and ``logging/`` use it. A new release of torch may change
any of these parts. Then the conformance test of the file fails and names the part.

======================  ==========================================  ======================
file                    what it uses of torch                       tests/unit/torch_core/
======================  ==========================================  ======================
tensors.py              version counters, sparse parts, storages    test_tensors.py
buffers.py              a module's own buffers, copies of many      test_buffers.py
module_tree.py          where a module keeps what is in it          test_module_tree.py
model_state.py          how a module loads its state                test_model_state.py
module_hooks.py         where modules and optimizers keep hooks     test_module_hooks.py
shards.py               local tensors and specs of DTensors         test_shards.py
optimizers.py           step hooks, Muon's kernels, scheduler marks  test_optimizers.py
scalers.py              where scaled gradients are in a step        test_scalers.py
======================  ==========================================  ======================

``fingerprints.py``, ``outputs.py`` and ``global_modes.py`` use public parts only.
"""
