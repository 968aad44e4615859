"""All timings of the detection of machines, workers and stores that are gone. No other file has one.

`launch/detection/` is the room that detects; relays (`coordination/relay/`) and clients of the rendezvous
store look after their own connections. A name with ``_S`` is in seconds; the others are numbers, or shares
of another timing. docs/reference.md draws this table, with the files that use each line.

The network, which stands below this file, has limits of its own: a connection to a host that says nothing
ends after half a minute (`network/channel.py`). The verdicts on machines come earlier.
"""

from __future__ import annotations

# ------------------------------------------------------------------------------------- what a user may change

MACHINE_SILENCE_S = 1.0
"""``--machine-silence``: the silence after which a machine is lost. On two cores with eight busy processes
each, heartbeats come at most 0.23 s apart (decision 77): a busy machine has four times that."""

HEARTBEAT_TIMEOUT_S = 10.0
"""``--heartbeat-timeout``: the silence after which a worker is lost. A call may hold its interpreter for
seconds, and it computes meanwhile."""

REPORT_TIMEOUT_S = 300.0
"""``--report-timeout``: the time after which a machine is lost whose worker does not answer the others in a
recovery. A replacement's script has to reach its session in it."""

REPLAY_TIMEOUT_S = 300.0
"""``--replay-timeout``: the time without progress in a replay after which the machine is lost."""

STORE_SILENCE_S = 300.0
"""``--rendezvous-timeout``: the silence of the rendezvous store after which a recovery gives it up. A person
may have to start it, and training does not wait for it."""

# -------------------------------------------------------------------------------- machines, by their watchers

BEATS = 10
"""Heartbeats of an agent, and at least of a worker, in the allowed silence: one or two may come late."""

LONGEST_BEAT_S = 0.5
"""The longest time between two heartbeats of an agent, where much silence is allowed. A watcher wakes as
often as it sends its own, so it costs nothing to send them."""

BEAT_GRACE = 0.2
"""Part of the time between two heartbeats by which a watcher may wake late without counting as held up."""

SILENCE_SHARES = (0.95, 0.975, 1.0)
"""By a watcher's turn, the share of the allowed silence after which it reports. The first one leaves the
others time to read its report, and all are done when the silence has lasted as long as allowed."""

TOGETHER_BEATS = 3
"""Heartbeats within which machines that fall silent do so at once: a busy one may send two of them too late
(decision 77)."""

END_STEP_S = 0.05
"""Between two watchers' reports of the end of a connection: the second one reads the first one's report."""

FIRST_CONTACT = 5
"""The time until a machine can be heard, in allowed silences. Both sides compute for that, and where many
connect at once, it takes longer than a heartbeat."""

DIALS = 2
"""Attempts to connect in the time that the first contact may take."""

RING_PAUSE_S = 0.001
"""Between two looks of an agent at the ring while a job forms, for each machine in it: a look costs the size
of the job."""

# ------------------------------------------------------------------------------------ workers, by their agent

WORKER_BEAT_S = 0.5
"""Between two heartbeats of a worker to its agent: twenty in the ten seconds that it may be silent. Less, if
``--heartbeat-timeout`` is short."""

HEARTBEAT_LOOKS = 4
"""Looks of an agent at heartbeats, in the time for which a worker may be silent."""

STACK_S = 0.2
"""The time in which a worker that holds the interpreter has to write where it is, before its loss is told."""

LATE_LOOKS = 4
"""Looks of an agent at a worker that all others wait for, in the time for which they wait. It asks where that
one is, and the last answer has to arrive before the time is over."""

STOPPED_LOOKS = 10
"""Looks of an agent at a stopped worker, in the time for which it may be stopped, which is a machine's."""

ASLEEP_SHARE = 0.5
"""Part of the allowed silence: a process that has not looked for longer was held up, and heard nobody."""

LOSS_MARGIN_S = 5.0
"""The wait of a worker whose connection broke, beyond the time in which a loss is found. If none is known by
then, the network was at fault."""

OTHERS_REPORT_S = 2.0
"""The delay of a failed connection that ends a script without a session. The worker whose failure was the
cause reports first, and this process is ended meanwhile."""

SETTLES_S = 0.1
"""The time in which other losses of a rack are found after the first silent machine: that between two
heartbeats. A plan before the last of them would be made twice (decision 78)."""

LOOP_MARGIN_S = 10.0
"""The time of an agent's loop beyond that for silent and ending workers, after which ``/healthz`` calls it
stuck."""

# -------------------------------------------------------------------- relays, by those that read through them

HEAD_SILENCE_S = 1.0
"""The silence after which a head is passed over. A false alarm costs no more than another way to the
journal."""

RELAY_BEAT_S = 0.25
"""Between two signs of life of a relay that other machines follow: four in a head's silence."""

AGENT_SILENCE_S = 2.0
"""The silence of an agent after which its workers read the journal in the store."""

WORKERS_BEAT_S = AGENT_SILENCE_S / 4
"""Between two signs of life of a relay that workers alone follow."""

STORE_GLANCE_S = 0.5
"""The wait of such a worker at the store, before it listens to its agent again."""

EVENT_ALLOWED_S = 2.5
"""The time after which a head is suspected that has not passed an event on. Each relay on the way may hold
one for 0.4 s (`coordination/relay/merging.py`), and the longest way has four."""

PART_ALLOWED_S = 3.0
"""The same for a part of a checkpoint, which each relay on the way may hold for longer."""

SUSPECTED_FOR_S = 30.0
"""The time until a head that failed is tried again."""

HEAD_LOOK_S = 30.0
"""Between two looks of a machine that reads from the store whether it has a head again."""

# ----------------------------------------------------------------------- the rendezvous store, and whole runs

SIGN_S = 2.5
"""The longest time between two signs of life that a run's machines leave in the store."""

SIGN_LOOK_S = 0.25
"""Between two looks of a launcher at this sign, while it waits for the next one."""

SIGNS_MISSED = 3
"""Signs in a row that are not missed by chance: then a run may be over, and its machines are asked."""

ADDRESS_ANSWERS_S = 2.0
"""The time in which a machine of such a run has to answer at its port."""

STORE_NOTICE_S = 4 * SIGN_S
"""The silence of the store that is worth a line, if ``--rendezvous-timeout`` is at least twice as long."""

STORE_CONNECTION_SILENCE_S = 5.0
"""The silence after which a client opens another connection to the store. TCP asks a host that was cut off
ever more seldom, and learns of its return ever later."""

STORE_CLIENT_SILENCE_S = 300.0
"""The silence after which the store closes a client's connection, although the kernel asks it. Only a
descriptor waits for that."""

KEEP_ALIVE_PROBES = 4
"""Questions of the kernel to a silent host, before a connection to or from the store fails."""

STORE_ENDED_ALONE_S = 10.0
"""The time for which a store serves on after its run has ended, for machines that still read the end."""

STORE_ALONE_S = 600.0
"""The time for which a store whose run has not ended waits for machines: that of a run for an empty slot."""

STORE_ALONE_LOOK_S = 2.0
"""Between two looks of a store at its connections."""

OOM_KILL_S = 3.0
"""The age of a kill by the kernel for want of memory that explains a worker's end: the process gives its
memory back before it has ended, and its agent is then told at once."""

THREADS_S = 1.0
"""The time between two looks at the threads of this machine's workers, whose numbers the kernel's messages
name. A worker has hundreds, and a look at each heartbeat would cost the agent more than all else."""

KERNEL_MESSAGE_S = 30.0
"""The age of a message in the kernel's log that explains a failure: drivers report an error of a device or a
link some seconds before a program meets it."""
