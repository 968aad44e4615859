"""Torch's groups, DDP, FSDP, pipelining, DCP and elastic agent, with their private parts.

Tested on torch 2.11 to 2.14.

A new release of torch may change any of these parts. Then the conformance test of the file fails and names
the part. The test of seams (tests/unit) looks for private parts everywhere else. What differs between
releases is in ``versions/``, which has a table of its own.

======================================  ==========================================  ==========================
file                                    what it uses of torch                       tests/unit/torch_adapters/
======================================  ==========================================  ==========================
seams.py                                looks for all of these, by name          test_seams.py
communication.py                        how schedules begin and wait, backends      test_communication.py
rendezvous_store.py                     the classes of the key-value stores, how a  test_communication.py,
                                        client begins                               test_rendezvous_store.py
comm_errors.py                          frames in which torch communicates          test_communication.py
killed_children.py                      how a DataLoader tells of killed processes  test_killed_children.py
bad_samples.py                          the text of an error in a DataLoader        test_bad_samples.py
transports.py                           gloo's constructor, a group's backends,     test_failed_group.py
                                        switches of both
gathering.py                            nothing: the members of a group meet        test_gathering.py
lasting_group.py                        methods of a group                          test_script_groups.py
lasting_work.py                         methods of an operation                     test_communication.py
script_groups.py                        how groups are made, what torch registers   test_script_groups.py
connections.py                          gloo's sockets                              test_stuck.py
forks.py                                what gloo's groups wait for as they end     test_forks.py
directed_group.py                       methods of a group                          test_directed_group.py
present_members.py                      how a batch begins and ends on a group      test_batches.py
abortable_waits.py                      the wait of all schedules                   test_abortable_waits.py
ddp.py                                  DDP's reducer                               test_ddp.py
ddp_passes.py                           its forward, callbacks of the engine        test_ddp.py
ddp_buckets.py                          how DDP chooses buckets                     test_ddp.py
ddp_construction.py                     which parameters DDP averages               test_ddp.py
accepted_ddp.py                         whether DDP has a hook, or DTensors         test_ddp.py
ddp_buffers.py                          when DDP synchronises buffers               test_ddp_buffers.py
distribution.py                         how tensors come to a mesh                  test_distribution.py
wrappers.py                             whether an optimizer can hold hooks           test_wrappers.py
fsdp.py                                 FSDP2's progress in an iteration            test_fsdp.py
dcp/reader.py                           DCP's reader, its metadata                  test_dcp.py
dcp/saved_tensors.py                    what torch.save writes of a tensor          test_saved_tensors.py
dcp/store_files.py                      DCP's files through fsspec                  test_dcp.py
dcp/verified_files.py                   DCP's files                                 test_dcp.py
dcp/writer.py                           DCP's writer                                test_dcp.py
elastic_agent.py                        torchelastic's agent, its workers' start    test_elastic_agent.py
pipelining/hook.py                      steps, messages and state of a schedule     test_pipelining.py
pipelining/layer_averages.py            when a stage has all its gradients          test_layer_averages.py
pipelining/microbatch.py                compute of one microbatch                   test_pipelining.py
pipelining/p2p_routes.py                receive buffers and destinations            test_pipelining.py
pipelining/computed_order.py            the order that a schedule makes             test_computed_order.py
pipelining/schedule_order.py            a schedule's list of actions                test_pipelining.py
pipelining/shared_step.py               what a step takes and leaves behind         test_pipelining.py
pipelining/stage_metadata.py            the exchange of shapes                      test_pipelining.py
======================================  ==========================================  ==========================

Parts that differ, and since which torch:

======================================  =====  ============================================================
file                                    torch  what is different
======================================  =====  ============================================================
ddp_buffers.py                          2.13   the name of what keeps buffers equal
fsdp.py                                 2.12   a module has several parameter groups
fsdp.py                                 2.13   FSDP goes back by itself
lasting_group.py                        2.13   collectives of single tensors
lasting_group.py                        2.14   gathers of them, hooks, windows, groups to be reconfigured
pipelining/hook.py                      2.13   a step takes arguments for the loss function
pipelining/hook.py                      2.14   a stage keeps its group three times; a step takes split batches
pipelining/p2p_routes.py                2.13   a stage leaves out gradients that no one awaits
pipelining/stage_metadata.py            2.12   shapes are records
process_group.py                        2.14   another function makes gloo's groups
======================================  =====  ============================================================

``dcp/errors.py``, ``device_waits.py``, ``exchange.py``, ``first_cut.py``, ``layer_stack.py``,
``link_times.py``, ``pipelining/batch_sizes.py``, ``pipelining/interceptor.py``,
``pipelining/resending.py``, ``pipelining/tied_parameters.py``, ``process_group.py``,
``script_operations.py``, ``served.py`` and ``step_failures.py`` use public parts only.
"""
