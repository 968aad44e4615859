"""Scenarios of the recovery protocol as text: events, and what each participant has to do after them.

One event or expectation per line, words as in a shell, ``#`` begins a comment. ``R`` is a rank, a list
(``0,2``) or ``all``; ``M`` is a machine. An event is of the current generation (epoch, start of the workers)
unless ``gen=`` (``epoch=``, ``started_in=``) says otherwise. ``R`` in ``prepared``, ``taken`` and ``next`` is
of the world that was planned last.

    open 4 [workers=2] [restarts=1] [max-failures=3] [checkpoint=20] [torch=2.9] [min=2]
           [on-loss=shrink] [max-machine-failures=5]
    join M ... [slot=1] [on=M] [torch=2.9] [identity=host1] [domain=rack1]
    lost M ["why"] [by=M] [silent] [on-request] [signal=15] [starts-again] [ran=7200]
           [cause="out of memory"]
    drain M                                sessionless M [ran=7200]       declined M ["why"]
    unhealthy M ["why"]                    damaged R at 20 ["why"]
    report R at 47 | replaying at 25 | nothing   [dirty="why"] [stages=1,5] [shapes-unknown]
                                                 [holds=model] [pipeline=1]
                                                 [updated=0,1] [rounds] [undoable=0,1] [no-update]
                                                 [cannot-resend]
                                                 [steps=60] [layers=9] [completes] [spoiled]
                                                 [cut=4,5] [microbatches=8] [min-stages=2] [copies]
                                                 [takes-unlike]
                                                 [kept=15] [held=15] [held-of=1]
                                                 [parts-due=1] [parts-done=0]
    ready R                                communication-failed R "why"
    replay-failed R ["why"] [diverged] [differs-at=20]
    request-layout R at 32 3,4,2           request-shares R at 32 4,8,12  stopped R at 32
    persisted R at 20 [path=p] [named]     committed 20                   request-checkpoint R at 22 ["why"]
    plan-change M ... [world=1] [plan=p | plan=cuts:4,5@6/3,3,3@10] [command="train.py --wide"] ["why"]
    prepared R [world=1]                   request-switch R at 32 [world=1]
    offered R at 32 [from=R]               taken R [world=1]              given-up ["why"] [world=1]
    awaiting R                             layout-declined R ["why"]      pace R 2900
    differed R | nothing at 29 ["each time"] [right]                      doubted 20 ["why"]
    audits M 1 20..40                      audited M 1 20..40 [slots=0,1] [rank=1] [changed] ["problem"]
    audited M 1 20..40 at=29 [digest=x]                                   [then=back]
    finished R                             exited M ... [rank=1] [at=12]
    script-failed M "why" [code=3] [after=27] [cause=device] [usage] [differs] [alike]
    deadline-passed M ... ["why"] [phase=agreeing]
    request-machines M 2,3
    closed "why" [code=130]                inject "fault"                 came-back M R
    event '{"event": "MachineLost", ...}'  (any one, as the journal has it)

    expect phase live                      expect generation 2            expect epoch 1
    expect members A E - D                 expect spares F                expect committed 20 | nothing
    expect mode replay | nothing           expect resume 47               expect reason "part of the text"
    expect worker R run                    expect worker R of M started_in 1 [world=0] die
    expect worker R next prepare | take | hold | die
    expect change 1 | nothing              expect world 1                 expect given-up ["part of the text"]
    expect next M start | adopt | drop | nothing [started=1]
    expect agent M launch | wait | rejoin | refused | leave | retire | stop
    expect agent M started_in 1 launch     expect checkpoint-needed M ...
    expect guests A:1,2 C:3 | nothing      expect smaller A C             expect why-guests ["part"]
    expect pipelines 2 3                   expect grows A E C | nothing   expect grown-pipelines 2 3
    expect full 4 | nothing                expect to-ask 3
    expect task R idle | resend | load 20 | replay 20..47 | load 20 replay 20..47 [with 1,2]
    expect undo R 0,1 | nothing            expect back R,R | nothing
    expect transfers 0>2,3 1>0:4,5 1>0/4,5 | nothing
    expect commit-due 20 | nothing         expect missing M ...           expect log-since 4
    expect finished 0 1                    expect requested 22 | nothing  expect injected first second
    expect awaiting 0 1                    expect asked 2 3
    expect patience 2                      expect saves-again 0 1         expect stops-at 32 | nothing
    expect parts-from 0 | nothing
    expect machine-patience 2              expect differed 1@29 0,1@39
    expect audit M 1 20..40 | nothing      expect marks 20 40:0,2         expect judged machine:1@29
    expect logs-needed 20 | nothing        expect clean 0 2               expect act M MachineLost | nothing
    expect layout 3 4 2                    expect layers 3 4 2            expect shares 32:4,8,12
    expect verdict ok | failed ["part of the text"] [code=1] | nothing
"""

from swift_ft.testing.scenario.line import ScenarioError
from swift_ft.testing.scenario.reader import Scenario

__all__ = ["Scenario", "ScenarioError"]
