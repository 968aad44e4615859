"""The detection of machines, workers and stores that are gone.

======================  ====================================================  ================================
gone                    noticed by                                            file
======================  ====================================================  ================================
a machine               three others: its connection ends, or it is silent    sentinel.py, neighbour_watch.py
a worker                its agent: its process ends or is stopped, or its     worker_watch.py, which hears it
                        heartbeats stay out                                   by worker_channels.py
a worker's answer       all others, by a deadline; its agent asks where it    late_workers.py
                        is
the rendezvous store    each machine: it does not answer                      store_watch.py
a whole run             a launcher that would go on with it: no sign of life  abandoned_runs.py
                        in the store, and no answer of any machine
======================  ====================================================  ================================

``policy.py`` judges all but the last, by what was heard and when. It is pure, as is ``awake_clock.py``, by
which a watcher counts its own time. ``kernel.py`` reads what the kernel tells of processes. All timings
stand in one table, `config/detection_timings.py`.

Relays of the journal are not found here but by those that read through them, which then take another way
(`coordination/relay/upstream.py` and `worker_journal.py`).
"""
